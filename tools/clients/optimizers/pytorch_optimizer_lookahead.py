"""Lookahead of pytorch-optimizer, whose state dict has another form."""

import torch
from pytorch_optimizer import Lookahead
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts


def train(epochs, folder):
    ts.seed_everything(0)
    inputs = torch.randn(64, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    module = ts.SupervisedModule(
        nn.Linear(4, 1), nn.MSELoss(), lambda parameters: Lookahead(torch.optim.SGD(parameters, lr=0.1), k=3), data
    )
    args = ts.TrainerArguments(epochs=epochs, train_batch_size=8, output_dir=folder, resume="auto")
    ts.Trainer(module, args).train()
    return module.model.weight.detach()


if __name__ == "__main__":
    whole = train(2, "whole")
    train(1, "parts")
    assert torch.equal(train(2, "parts"), whole)
