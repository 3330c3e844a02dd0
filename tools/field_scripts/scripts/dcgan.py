"""pytorch/examples, dcgan: an update of the discriminator, then one of the generator with the new discriminator."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tools.field_scripts.training import loader, train, weights_of
from trainstack import ModuleInterface

NOISE = 16


def networks():
    torch.manual_seed(1)
    generator = nn.Sequential(
        *(nn.ConvTranspose2d(NOISE, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(True)),
        *(nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True)),
        *(nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False), nn.Tanh()),
    )
    discriminator = nn.Sequential(
        *(nn.Conv2d(3, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)),
        *(nn.Conv2d(8, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.LeakyReLU(0.2, inplace=True)),
        *(nn.Conv2d(16, 1, 4, 1, 0, bias=False), nn.Sigmoid(), nn.Flatten(0)),
    )
    return generator, discriminator


def data():
    return TensorDataset(torch.rand(56, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1)


def plain():
    net_g, net_d = networks()
    criterion = nn.BCELoss()
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for _ in range(2):
        for (real,) in loader(data(), batch_size=16):
            net_d.zero_grad()
            label = torch.full((len(real),), 1.0)
            criterion(net_d(real), label).backward()
            fake = net_g(torch.randn(len(real), NOISE, 1, 1))
            criterion(net_d(fake.detach()), label.fill_(0.0)).backward()
            optimizer_d.step()
            net_g.zero_grad()
            criterion(net_d(fake), label.fill_(1.0)).backward()
            optimizer_g.step()
    return weights_of(net_g, net_d)


class Dcgan(ModuleInterface):
    def __init__(self):
        super().__init__()
        self.net_g, self.net_d = networks()
        self.criterion = nn.BCELoss()

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(data(), batch_size=batch_size)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        optimizer_d = torch.optim.Adam(self.net_d.parameters(), lr=2e-4, betas=(0.5, 0.999))
        optimizer_g = torch.optim.Adam(self.net_g.parameters(), lr=2e-4, betas=(0.5, 0.999))
        return [optimizer_d, optimizer_g], []

    def train_step(self, global_step, batch, device):
        (real,) = batch
        ones, zeros = torch.ones(len(real), device=device), torch.zeros(len(real), device=device)
        loss_real = self.criterion(self.net_d(real), ones)
        fake = self.net_g(torch.randn(len(real), NOISE, 1, 1, device=device))
        yield loss_real + self.criterion(self.net_d(fake.detach()), zeros), 0
        yield self.criterion(self.net_d(fake), ones), 1


def port():
    module = Dcgan()
    train(module, epochs=2, train_batch_size=16)
    return weights_of(module.net_g, module.net_d)
