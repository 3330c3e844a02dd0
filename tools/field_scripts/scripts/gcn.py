"""pytorch/examples, gcn: all nodes of a graph are one batch, and the graph is a sparse buffer."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tools.field_scripts.training import train, weights_of
from trainstack import ModuleInterface

NODES, TRAINING = 120, 80


def graph():
    """Features (NODES, 16), a normalised adjacency, sparse (NODES, NODES), and labels (NODES,)."""
    draw = torch.Generator().manual_seed(0)
    edges = (torch.rand(NODES, NODES, generator=draw) < 0.05).float() + torch.eye(NODES)
    features, labels = torch.randn(NODES, 16, generator=draw), torch.randint(4, (NODES,), generator=draw)
    return features, (edges / edges.sum(1, keepdim=True)).to_sparse(), labels


class GraphConv(nn.Linear):
    def forward(self, x, adjacency):
        return torch.sparse.mm(adjacency, x @ self.weight.T) + self.bias


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.gc1, self.gc2, self.dropout = GraphConv(16, 8), GraphConv(8, 4), nn.Dropout(0.5)

    def forward(self, x, adjacency):
        return F.log_softmax(self.gc2(self.dropout(F.relu(self.gc1(x, adjacency))), adjacency), dim=1)


def plain():
    torch.manual_seed(1)
    model = GCN()
    features, adjacency, labels = graph()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    nodes = torch.arange(TRAINING)
    for _ in range(10):
        model.train()
        optimizer.zero_grad()
        loss = F.nll_loss(model(features, adjacency)[nodes], labels[nodes])
        loss.backward()
        optimizer.step()
    return weights_of(model)


class Nodes(ModuleInterface):
    def __init__(self):
        super().__init__()
        self.model = GCN()
        features, adjacency, labels = graph()
        self.register_buffer("features", features, persistent=False)
        self.register_buffer("adjacency", adjacency, persistent=False)
        self.nodes = TensorDataset(torch.arange(TRAINING), labels[:TRAINING])

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(self.nodes, batch_size=batch_size)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return torch.optim.Adam(self.parameters(), lr=1e-2, weight_decay=5e-4), None

    def train_step(self, global_step, batch, device):
        nodes, labels = batch
        return F.nll_loss(self.model(self.features, self.adjacency)[nodes], labels)


def port():
    torch.manual_seed(1)
    module = Nodes()
    train(module, epochs=10, train_batch_size=TRAINING)
    return weights_of(module.model)
