"""AdamWScheduleFree without changes: the trainer sets its modes."""

import torch
from schedulefree import AdamWScheduleFree
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts


def train(epochs, folder):
    ts.seed_everything(0)
    inputs = torch.randn(64, 2)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    module = ts.SupervisedModule(
        nn.Linear(2, 1), nn.MSELoss(), AdamWScheduleFree, data, data, optimizer_kwargs={"lr": 0.1}
    )
    args = ts.TrainerArguments(epochs=epochs, train_batch_size=8, val_batch_size=32, output_dir=folder, resume="auto")
    trainer = ts.Trainer(module, args)
    trainer.train()
    return trainer


if __name__ == "__main__":
    whole = train(4, "whole")
    train(2, "parts")
    resumed = train(4, "parts")
    assert torch.equal(whole.module.model.weight, resumed.module.model.weight)
    losses = whole.history.get_metric_values("val/loss")
    assert losses == resumed.history.get_metric_values("val/loss")
    assert losses[-1] < losses[0]
