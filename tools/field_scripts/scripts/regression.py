"""pytorch/examples, regression: endless random batches, until the loss is small."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from tools.field_scripts.training import train, weights_of
from trainstack import ModuleInterface, StopTraining

GOAL = 1e-3


class Batches(IterableDataset):
    """Batches of 32 values with their powers, and a polynomial of degree 4 of them."""

    def __iter__(self):
        draw = torch.Generator().manual_seed(0)
        weight, bias = torch.randn(4, 1, generator=draw) * 5, torch.randn(1, generator=draw) * 5
        while True:
            values = torch.randn(32, 1, generator=draw)
            x = torch.cat([values**power for power in range(1, 5)], 1)
            yield x, x.mm(weight) + bias


def plain():
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    for x, y in Batches():
        model.zero_grad()
        output = F.smooth_l1_loss(model(x), y)
        loss = output.item()
        output.backward()
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)
        if loss < GOAL:
            break
    return weights_of(model)


class Regression(ModuleInterface):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(4, 1)

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(Batches(), batch_size=None)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return torch.optim.SGD(self.parameters(), lr=0.1), None

    def train_step(self, global_step, batch, device):
        x, y = batch
        return F.smooth_l1_loss(self.model(x), y)

    def on_end_train_step(self, global_step, losses):
        if losses.item() < GOAL:
            raise StopTraining("the loss is small")


def port():
    torch.manual_seed(1)
    module = Regression()
    train(module, max_steps=100_000, train_batch_size=32)
    return weights_of(module.model)
