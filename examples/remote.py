"""A run whose checkpoints, logs and report are in an object store. Copy this file and change it.

    python examples/remote.py s3://bucket/runs/line
    python examples/remote.py memory://bucket/line

Start the command again, on this machine or on another one, with more epochs: it continues where the run was. The
second command needs no server; its store ends with the process.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainstack import DefaultCheckpointerArguments, SupervisedModule, Trainer, TrainerArguments, seed_everything


def main() -> None:
    """Train at the address."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", help="where the run is kept")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--local-dir", help="for the local copy; by default a folder in the cache of the user")
    given = parser.parse_args()

    seed_everything(0)
    inputs = torch.randn(512, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    args = TrainerArguments(
        epochs=given.epochs,
        train_batch_size=32,
        output_dir=given.address,
        local_dir=given.local_dir,
        resume="auto",
        checkpointer_args=DefaultCheckpointerArguments(keep_last=2),
    )
    Trainer(SupervisedModule(nn.Linear(4, 1), nn.MSELoss(), torch.optim.SGD, data), args).train()


if __name__ == "__main__":
    main()
