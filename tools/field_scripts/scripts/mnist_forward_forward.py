"""pytorch/examples, mnist_forward_forward: each layer has an optimizer and a loss, and is trained before the next."""

import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tools.field_scripts.training import train, weights_of
from trainstack import ModuleInterface

SIZES, UPDATES, THRESHOLD = (64, 32, 16), 10, 2.0


class Layer(nn.Linear):
    def forward(self, x):
        return torch.relu(super().forward(x / (x.norm(2, 1, keepdim=True) + 1e-4)))

    def goodness_loss(self, x_pos, x_neg):
        g_pos, g_neg = self(x_pos).pow(2).mean(1), self(x_neg).pow(2).mean(1)
        return torch.log(1 + torch.exp(torch.cat([THRESHOLD - g_pos, g_neg - THRESHOLD]))).mean()


def layers():
    torch.manual_seed(1)
    return [Layer(*sizes) for sizes in itertools.pairwise(SIZES)]


def data():
    draw = torch.Generator().manual_seed(0)
    return torch.randn(50, SIZES[0], generator=draw), torch.randn(50, SIZES[0], generator=draw)


def plain():
    found = layers()
    h_pos, h_neg = data()
    for layer in found:
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.03)
        for _ in range(UPDATES):
            loss = layer.goodness_loss(h_pos, h_neg)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        h_pos, h_neg = layer(h_pos).detach(), layer(h_neg).detach()
    return weights_of(*found)


class ForwardForward(ModuleInterface):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(layers())

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(TensorDataset(*data()), batch_size=batch_size)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return [torch.optim.Adam(layer.parameters(), lr=0.03) for layer in self.layers], []

    def train_step(self, global_step, batch, device):
        h_pos, h_neg = batch
        for number, layer in enumerate(self.layers):
            for _ in range(UPDATES):
                yield layer.goodness_loss(h_pos, h_neg), number
            h_pos, h_neg = layer(h_pos).detach(), layer(h_neg).detach()


def port():
    module = ForwardForward()
    train(module, epochs=1, train_batch_size=50)
    return weights_of(*module.layers)
