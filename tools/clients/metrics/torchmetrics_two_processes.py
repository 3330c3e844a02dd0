"""Metrics over two processes have the bits of one process, with a short last batch."""

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassCalibrationError

import trainstack as ts


def values(backend):
    ts.seed_everything(0)
    inputs = torch.randn(53, 3)
    data = TensorDataset(inputs, inputs.argmax(1))
    metrics = {
        "accuracy": MulticlassAccuracy(3),
        "auroc": MulticlassAUROC(3),
        "calibration": MulticlassCalibrationError(3),
    }
    module = ts.SupervisedModule(nn.Linear(3, 3), nn.CrossEntropyLoss(), "sgd", data, data, metrics=metrics)
    args = ts.TrainerArguments(backend=backend, train_batch_size=53, val_batch_size=8, max_steps=1, writers=[])
    trainer = ts.Trainer(module, args)
    found = trainer.validate().metrics
    trainer.close()
    return {name: float(value) for name, value in found.items() if name != "val/loss"}


if __name__ == "__main__":
    one = values("sp")
    two = ts.launch(values, "ddp", nproc=2)
    assert two[0] == one == two[1], (one, two)
