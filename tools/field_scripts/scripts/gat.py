"""pytorch/examples, gat: graph attention with dropout on 650 training nodes, which are one batch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tools.field_scripts.training import train, weights_of
from trainstack import ModuleInterface

NODES, TRAINING = 700, 650


def graph():
    """Features (NODES, 16), the adjacency as bool (NODES, NODES), and labels (NODES,)."""
    draw = torch.Generator().manual_seed(0)
    edges = (torch.rand(NODES, NODES, generator=draw) < 0.01) | torch.eye(NODES, dtype=torch.bool)
    return torch.randn(NODES, 16, generator=draw), edges, torch.randint(4, (NODES,), generator=draw)


class Attention(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear, self.dropout = nn.Linear(inputs, outputs, bias=False), nn.Dropout(0.6)
        self.source, self.target = nn.Linear(outputs, 1), nn.Linear(outputs, 1, bias=False)

    def forward(self, x, edges):
        h = self.linear(self.dropout(x))
        scores = F.leaky_relu(self.source(h) + self.target(h).T, 0.2).masked_fill(~edges, -torch.inf)
        return self.dropout(scores.softmax(1)) @ h


class GAT(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Attention(16, 8), Attention(8, 4)

    def forward(self, x, edges):
        return F.log_softmax(self.second(F.elu(self.first(x, edges)), edges), dim=1)


def plain():
    torch.manual_seed(1)
    model = GAT()
    features, edges, labels = graph()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    nodes = torch.arange(TRAINING)
    for _ in range(6):
        model.train()
        optimizer.zero_grad()
        loss = F.nll_loss(model(features, edges)[nodes], labels[nodes])
        loss.backward()
        optimizer.step()
    return weights_of(model)


class Nodes(ModuleInterface):
    splits_batches = False

    def __init__(self):
        super().__init__()
        self.model = GAT()
        features, edges, labels = graph()
        self.register_buffer("features", features, persistent=False)
        self.register_buffer("edges", edges, persistent=False)
        self.nodes = TensorDataset(torch.arange(TRAINING), labels[:TRAINING])

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(self.nodes, batch_size=batch_size)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return torch.optim.Adam(self.parameters(), lr=5e-3, weight_decay=5e-4), None

    def train_step(self, global_step, batch, device):
        nodes, labels = batch
        return F.nll_loss(self.model(self.features, self.edges)[nodes], labels)


def port():
    torch.manual_seed(1)
    module = Nodes()
    train(module, epochs=6, train_batch_size=TRAINING)
    return weights_of(module.model)
