"""AdamW with a state of 8 bits, by torchao; a resume is exact."""

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchao.optim import AdamW8bit

import trainstack as ts


def train(epochs, folder):
    ts.seed_everything(0)
    inputs = torch.randn(64, 64)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
    module = ts.SupervisedModule(net, nn.MSELoss(), AdamW8bit, data, data, optimizer_kwargs={"lr": 1e-3})
    args = ts.TrainerArguments(epochs=epochs, train_batch_size=8, val_batch_size=32, output_dir=folder, resume="auto")
    trainer = ts.Trainer(module, args)
    trainer.train()
    return trainer


if __name__ == "__main__":
    whole = train(4, "whole")
    train(2, "parts")
    resumed = train(4, "parts")
    states = [trainer.module.model.state_dict() for trainer in (whole, resumed)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    losses = whole.history.get_metric_values("val/loss")
    assert losses[-1] < losses[0]
