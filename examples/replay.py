"""Train, replay the recorded steps, and let a replay find a change of the code.

    python examples/replay.py

It takes some seconds: each replay starts a new process.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from trainstack import (
    DefaultCheckpointerArguments,
    SupervisedModule,
    Trainer,
    TrainerArguments,
    replay,
    seed_everything,
)


class NoisyPoints(Dataset):
    """Points with new noise in each epoch, and their sums."""

    def __init__(self, scale):
        self.points = torch.randn(320, 8, generator=torch.Generator().manual_seed(0))
        self.scale = scale

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        point = self.points[index]
        return point + self.scale * torch.randn(8), point.sum(0, keepdim=True)


def make_module(scale=0.1):
    """A small network with dropout; a replay calls this in its own process."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    return SupervisedModule(model, nn.MSELoss(), "adamw", NoisyPoints(scale))


def make_edited_module():
    """The same with an edited augmentation."""
    return make_module(scale=0.11)


def main():
    """Train, and replay twice."""
    parser = argparse.ArgumentParser(description="Train, and replay the recorded steps.")
    parser.add_argument("--epochs", type=int, default=4, help="of 20 steps each")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/replay"), help="the folder of the run")
    given = parser.parse_args()
    args = TrainerArguments(
        epochs=given.epochs,
        train_batch_size=16,
        device="cpu",
        record="full",  # so that a difference is found at its step, and named
        output_dir=given.output_dir,
        resume="auto",
        checkpointer_args=DefaultCheckpointerArguments(every_n_steps=10, keep_last=None),
        writers=[],
        progress="none",
    )
    seed_everything(args.seed)
    Trainer(make_module(), args).train()

    print("the same code:")
    replay(make_module, given.output_dir, from_step=11)
    print("another augmentation:")
    replay(make_edited_module, given.output_dir, from_step=11)


if __name__ == "__main__":
    main()
