"""A module written for PyMarlin, in the shape of its CIFAR example, on digits. Only the lines marked `was:` differ.

    python examples/ported/pymarlin_cifar.py
    torchrun --nproc-per-node=2 examples/ported/pymarlin_cifar.py ddp

docs/coming-from/pymarlin.md goes through the differences. The data is scikit-learn's 1797 images of 8 x 8.
"""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset, random_split

from trainstack import (  # was: from pymarlin import ModuleInterface; from pymarlin.core import trainer, ...
    DefaultCheckpointerArguments,
    ModuleInterface,
    Trainer,
    TrainerArguments,
    seed_everything,
)

CONFIG = {"tr": {"epochs": 4, "train_batch_size": 32, "val_batch_size": 360}}  # was: CustomArgParser().parse()


class DigitsData:  # was: a DataProcessor and a DataInterface, which hold nothing that a trainer needs
    """The images, normalised, in two parts."""

    def __init__(self):
        data = load_digits()
        images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1  # (1797, 1, 8, 8), -1 to 1
        dataset = TensorDataset(images, torch.tensor(data.target))
        self.train_ds, self.val_ds = random_split(dataset, [1437, 360], torch.Generator().manual_seed(0))

    def get_train_dataset(self):
        return self.train_ds

    def get_val_dataset(self):
        return self.val_ds


class Net(nn.Module):
    """Two convolutions and two layers."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 3, padding=1)
        self.fc1 = nn.Linear(16 * 2 * 2, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = F.relu(self.fc1(x.view(-1, 16 * 2 * 2)))
        return self.fc2(x)


class DigitsModule(ModuleInterface):
    """The training recipe: not a line of it has changed."""

    def __init__(self, data_interface):
        super().__init__()
        self.data_interface = data_interface
        self.net = Net()
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int):
        return [self.optimizer], []

    def get_train_dataloader(self, sampler: type, batch_size: int):
        dataset = self.data_interface.get_train_dataset()
        return DataLoader(dataset, batch_size=batch_size, sampler=sampler(dataset))

    def get_val_dataloaders(self, sampler: type, batch_size: int):
        dataset = self.data_interface.get_val_dataset()
        return DataLoader(dataset, batch_size=batch_size, sampler=sampler(dataset))

    def train_step(self, global_step: int, batch, device):
        inputs, labels = batch
        inputs = inputs.to(device)
        labels = labels.to(device)
        return self.criterion(self.net(inputs), labels)

    def val_step(self, global_step: int, batch, device):
        images, labels = batch
        images = images.to(device)
        labels = labels.to(device)
        _, predicted = torch.max(self.net(images), 1)
        return predicted, labels

    def on_end_val_epoch(self, global_step: int, *val_step_collated_outputs, key="default"):
        predicted, labels = val_step_collated_outputs
        accuracy = 100 * (predicted == labels).sum().item() / labels.size(0)
        self.log("val/accuracy", accuracy)  # was: global_stats.update("val/accuracy", accuracy)


def main(backend="sp"):
    """Train; returns the trainer."""
    seed_everything(0)
    module = DigitsModule(DigitsData())
    args = TrainerArguments(
        **CONFIG["tr"],
        backend=backend,
        checkpointer_args=DefaultCheckpointerArguments(checkpoint=False),
        output_dir="runs/pymarlin",
    )
    trainer = Trainer(module=module, args=args)
    trainer.train()
    return trainer


if __name__ == "__main__":
    trained = main(*sys.argv[1:])
    trained.print(f"validation accuracy {trained.history.get_latest_metric('val/accuracy'):.1f} %")
    trained.close()  # leaves the group of processes
