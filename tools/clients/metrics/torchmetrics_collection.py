"""A MetricCollection of torchmetrics together with single metrics, one of them a confusion matrix."""

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)

import trainstack as ts

if __name__ == "__main__":
    ts.seed_everything(0)
    inputs = torch.randn(200, 3)
    data = TensorDataset(inputs, inputs.argmax(1))
    metrics = {
        "all": MetricCollection({"accuracy": MulticlassAccuracy(3), "f1": MulticlassF1Score(3)}),
        "auroc": MulticlassAUROC(3),
        "confusion": MulticlassConfusionMatrix(3),
    }
    module = ts.SupervisedModule(
        nn.Linear(3, 3), nn.CrossEntropyLoss(), "sgd", data, data, optimizer_kwargs={"lr": 0.5}, metrics=metrics
    )
    trainer = ts.Trainer(module, ts.TrainerArguments(epochs=5, train_batch_size=20, val_batch_size=30))
    trainer.train()
    values = trainer.validate().metrics
    assert values["val/all/accuracy"] > 0.8
    assert values["val/confusion"].sum() == 200
    assert trainer.history.get_latest_metric("val/auroc") > 0.9
