"""BERT for classification: dict batches with a padding collator, the model's own loss, a metric, a cosine schedule."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torchmetrics.classification import MulticlassAccuracy
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

import trainstack as ts

WORDS = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "good", "bad", "film", "very"])}


class Sentiment(ts.SupervisedModule):
    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3)
        return [optimizer], [get_cosine_schedule_with_warmup(optimizer, 2, self.plan.total_steps)]


if __name__ == "__main__":
    ts.seed_everything(0)
    words = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    rows = [{"text": "very " * (i % 3) + ("good" if i % 2 else "bad") + " film", "label": i % 2} for i in range(32)]
    data = Dataset.from_list(rows).map(lambda row: tokenizer(row["text"]), remove_columns="text")
    config = BertConfig(vocab_size=6, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    module = Sentiment(
        BertForSequenceClassification(config),
        None,
        "adamw",
        data,
        data,
        collate_fn=DataCollatorWithPadding(tokenizer),
        metrics={"accuracy": MulticlassAccuracy(2, average="micro")},
        target_keys=["labels"],
        output_mapping={"logits": "preds"},
    )
    trainer = ts.Trainer(module, ts.TrainerArguments(epochs=8, train_batch_size=8, val_batch_size=8))
    trainer.train()
    assert trainer.history.get_latest_metric("val/accuracy") == 1.0
