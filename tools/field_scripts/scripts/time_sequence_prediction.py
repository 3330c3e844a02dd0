"""pytorch/examples, time_sequence_prediction: L-BFGS with a closure over one batch, in float64."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tools.field_scripts.training import train, weights_of
from trainstack import ModuleInterface


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 11), nn.LSTMCell(11, 11), nn.Linear(11, 1)

    def forward(self, values):
        zeros = torch.zeros(len(values), 11, dtype=torch.double)
        first, second, outputs = (zeros, zeros), (zeros, zeros), []
        for value in values.split(1, dim=1):
            first = self.lstm1(value, first)
            second = self.lstm2(first[0], second)
            outputs.append(self.linear(second[0]))
        return torch.cat(outputs, dim=1)


def data():
    shifts = torch.arange(9, dtype=torch.double)[:, None]
    waves = torch.sin((torch.arange(25) + shifts) / 5)
    return waves[:, :-1], waves[:, 1:]


def plain():
    torch.manual_seed(0)
    model, criterion = Sequence().double(), nn.MSELoss()
    inputs, target = data()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=5)
    for _ in range(3):

        def closure():
            optimizer.zero_grad()
            loss = criterion(model(inputs), target)
            loss.backward()
            return loss

        optimizer.step(closure)
    return weights_of(model)


class Sine(ModuleInterface):
    def __init__(self):
        super().__init__()
        self.model, self.criterion = Sequence().double(), nn.MSELoss()

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(TensorDataset(*data()), batch_size=batch_size)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return torch.optim.LBFGS(self.parameters(), lr=0.8, max_iter=5), None

    def train_step(self, global_step, batch, device):
        inputs, target = batch
        return self.criterion(self.model(inputs), target)


def port():
    torch.manual_seed(0)
    module = Sine()
    train(module, epochs=3, train_batch_size=9)
    return weights_of(module.model)
