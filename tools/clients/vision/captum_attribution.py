"""Captum explains the trained network."""

import torch
from captum.attr import IntegratedGradients, LayerGradCam
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts

if __name__ == "__main__":
    ts.seed_everything(0)
    inputs = torch.randn(256, 4)
    data = TensorDataset(inputs, (inputs[:, 2] > 0).long())
    module = ts.SupervisedModule(
        nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)),
        nn.CrossEntropyLoss(),
        "adam",
        data,
        optimizer_kwargs={"lr": 0.02},
    )
    ts.Trainer(module, ts.TrainerArguments(epochs=10, train_batch_size=32)).train()
    module.model.eval()
    attributions = IntegratedGradients(module.model).attribute(inputs[:32], target=1)
    assert attributions.abs().mean(0).argmax() == 2  # the only input that matters
    assert LayerGradCam(module.model, module.model[0]).attribute(inputs[:8], target=1).shape[0] == 8
