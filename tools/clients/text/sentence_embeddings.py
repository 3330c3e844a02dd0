"""A model and a loss of sentence-transformers, with pairs of tokenised sentences."""

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import trainstack as ts

WORDS = ["[PAD]", "[UNK]", "a", "b", "c", "d", "e", "f", "g", "h"]


def make_model():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    config = BertConfig(vocab_size=10, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertModel(config).save_pretrained("tiny")
    tokenizer.save_pretrained("tiny")
    body = Transformer("tiny")
    return SentenceTransformer(modules=[body, Pooling(16)], device="cpu")


class Pairs(ts.ModuleInterface):
    def __init__(self):
        super().__init__()
        self.model = make_model()
        self.loss = MultipleNegativesRankingLoss(self.model)

    def collate(self, rows):
        return [dict(self.model.tokenize(list(texts))) for texts in zip(*rows, strict=True)]

    def get_train_dataloader(self, sampler, batch_size):
        rows = [(f"{one} a", f"{one} b") for one in "cdefgh"]
        return self.build_dataloader(rows, sampler, batch_size, collate_fn=self.collate)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2), None

    def train_step(self, global_step, batch, device):
        return self.loss(batch, None)

    def batch_weight(self, batch):
        return len(batch[0]["input_ids"])


if __name__ == "__main__":
    ts.seed_everything(0)
    module = Pairs()
    trainer = ts.Trainer(module, ts.TrainerArguments(epochs=6, train_batch_size=3))
    trainer.train()
    losses = trainer.history.get_metric_values("train/loss_epoch")
    assert losses[-1] < losses[0]
    assert module.model.encode(["c a"]).shape == (1, 16)
