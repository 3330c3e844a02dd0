"""A metric of torchmetrics gets the `labels` that are an input of the model."""

import torch
from torchmetrics.classification import MulticlassAccuracy
from transformers import BertConfig, BertForSequenceClassification

import trainstack as ts

if __name__ == "__main__":
    ts.seed_everything(0)
    config = BertConfig(vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    rows = [{"input_ids": torch.tensor([2 + i % 2, 4, 5]), "labels": i % 2} for i in range(16)]
    module = ts.SupervisedModule(
        BertForSequenceClassification(config),
        None,
        "adamw",
        rows,
        rows,
        metrics={"accuracy": MulticlassAccuracy(2, average="micro")},
    )
    trainer = ts.Trainer(module, ts.TrainerArguments(epochs=2, train_batch_size=8, val_batch_size=8))
    trainer.train()
    assert 0 <= trainer.history.get_latest_metric("val/accuracy") <= 1
