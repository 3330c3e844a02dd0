"""`validate()` and `predict()` with batches that are padded to their longest row."""

import torch
from transformers import BertConfig, BertForTokenClassification

import trainstack as ts


def pad(rows):
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name, value):
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    return {"input_ids": padded("input_ids", 0), "attention_mask": padded("mask", 0), "labels": padded("labels", -100)}


if __name__ == "__main__":
    ts.seed_everything(0)
    config = BertConfig(vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    rows = [{"input_ids": [2] * n, "mask": [1] * n, "labels": [n % 2] * n} for n in range(1, 13)]
    module = ts.SupervisedModule(BertForTokenClassification(config), None, "adamw", rows, rows, collate_fn=pad)
    trainer = ts.Trainer(module, ts.TrainerArguments(train_batch_size=4, val_batch_size=4))
    trainer.train()
    logits = trainer.validate(pad_value=-100.0)["default"]["outputs"]["logits"]
    assert logits.shape == (12, 12, 2)
    assert (logits[0, 4:] == -100).all()  # the first batch was padded to four tokens
    lengths = [
        batch["logits"].shape[1]
        for batch in trainer.predict(module.get_val_dataloaders(torch.utils.data.SequentialSampler, 4), stream=True)
    ]
    assert lengths == [4, 8, 12]
