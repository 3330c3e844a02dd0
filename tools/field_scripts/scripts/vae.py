"""pytorch/examples, vae: a loss that is a sum, random numbers in the forward pass, an image in each epoch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tools.field_scripts.training import loader, train, weights_of
from trainstack import ModuleInterface


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(784, 64), nn.Linear(64, 8), nn.Linear(64, 8)
        self.fc3, self.fc4 = nn.Linear(8, 64), nn.Linear(64, 784)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        h = F.relu(self.fc1(x.view(-1, 784)))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.decode(z), mu, logvar


def loss_function(outputs, x):
    reconstruction, mu, logvar = outputs
    bce = F.binary_cross_entropy(reconstruction, x.view(-1, 784), reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def data():
    return TensorDataset(torch.rand(100, 1, 28, 28, generator=torch.Generator().manual_seed(0)))


def plain():
    torch.manual_seed(1)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(2):
        model.train()
        for (x,) in loader(data(), batch_size=32):
            optimizer.zero_grad()
            loss = loss_function(model(x), x)
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            sample = model.decode(torch.randn(4, 8))
    return [*weights_of(model), sample]


class Vae(ModuleInterface):
    loss_reduction = "sum"

    def __init__(self):
        super().__init__()
        self.model = VAE()

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(data(), batch_size=batch_size)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return torch.optim.Adam(self.parameters(), lr=1e-3), None

    def train_step(self, global_step, batch, device):
        (x,) = batch
        return loss_function(self.model(x), x)

    def on_end_train_epoch(self, global_step):
        with torch.no_grad():
            self.sample = self.model.decode(torch.randn(4, 8))


def port():
    torch.manual_seed(1)
    module = Vae()
    train(module, epochs=2, train_batch_size=32)
    return [*weights_of(module.model), module.sample]
