"""An endless iterable with `max_steps`, like collectors of reinforcement learning."""

import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

import trainstack as ts


class Collector(IterableDataset):
    def __iter__(self):
        for i in itertools.count():
            yield torch.full((3,), i / 100)


class Policy(ts.ModuleInterface):
    def __init__(self):
        super().__init__()
        self.model, self.mean = nn.Linear(3, 1), MeanMetric()

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(Collector(), batch_size=batch_size)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return torch.optim.SGD(self.parameters(), lr=0.01), None

    def train_step(self, global_step, batch, device):
        self.mean.update(batch)
        return self.model(batch).square().mean()


if __name__ == "__main__":
    module = Policy()
    trainer = ts.Trainer(module, ts.TrainerArguments(train_batch_size=5, max_steps=7))
    trainer.train()
    assert trainer.global_steps_finished == 7
    assert abs(module.mean.compute().item() - 0.17) < 1e-4  # the mean of 0 to 34, over 100
