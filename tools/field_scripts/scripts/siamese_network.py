"""pytorch/examples, siamese_network: the dataset draws the second image of a pair with `random`."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tools.field_scripts.training import SeededSamples, loader, train, weights_of
from trainstack import ModuleInterface


class Pairs(Dataset):
    def __init__(self):
        draw = torch.Generator().manual_seed(0)
        self.images = torch.randn(60, 1, 12, 12, generator=draw)
        self.labels = torch.randint(4, (60,), generator=draw)
        self.groups = [torch.where(self.labels == label)[0].tolist() for label in range(4)]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        label = int(self.labels[index])
        same = index % 2 == 0
        group = label if same else random.choice([other for other in range(4) if other != label])
        return self.images[index], self.images[random.choice(self.groups[group])], torch.tensor(float(same))


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(200, 16))
        self.head = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, one, other):
        return self.head(torch.cat([self.body(one), self.body(other)], 1))


def plain():
    torch.manual_seed(1)
    model, criterion = Siamese(), nn.BCELoss()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    for epoch in range(2):
        for one, other, target in loader(SeededSamples(Pairs(), epoch), batch_size=16):
            optimizer.zero_grad()
            loss = criterion(model(one, other).squeeze(1), target)
            loss.backward()
            optimizer.step()
    return weights_of(model)


class SiameseModule(ModuleInterface):
    def __init__(self):
        super().__init__()
        self.model, self.criterion = Siamese(), nn.BCELoss()

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(Pairs(), batch_size=batch_size)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return torch.optim.Adadelta(self.parameters(), lr=1.0), None

    def train_step(self, global_step, batch, device):
        one, other, target = batch
        return self.criterion(self.model(one, other).squeeze(1), target)


def port():
    torch.manual_seed(1)
    module = SiameseModule()
    train(module, epochs=2, train_batch_size=16)
    return weights_of(module.model)
