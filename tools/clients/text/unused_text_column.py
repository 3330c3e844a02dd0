"""A text column remains in the dataset after `map`; the collator must not get it."""

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding, PreTrainedTokenizerFast

import trainstack as ts

if __name__ == "__main__":
    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "good": 2, "bad": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    data = Dataset.from_list([{"text": "good " * (1 + i % 3), "label": i % 2} for i in range(8)])
    data = data.map(lambda row: tokenizer(row["text"]))
    config = BertConfig(vocab_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    module = ts.SupervisedModule(
        BertForSequenceClassification(config),
        None,
        "adamw",
        data,
        collate_fn=DataCollatorWithPadding(tokenizer),
        remove_unused_columns=True,
    )
    trainer = ts.Trainer(module, ts.TrainerArguments(train_batch_size=4))
    trainer.train()
    assert trainer.global_steps_finished == 2
