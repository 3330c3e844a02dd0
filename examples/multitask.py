"""Two tasks, two data sets, two optimizers, one network. Copy this file and change it.

    python examples/multitask.py
    python examples/multitask.py --hidden-weight 0

Only 50 of scikit-learn's handwritten digits have a label here. In the others half of the pixels are hidden, and the
second task is to predict them. That needs no labels, and it trains the layers that both tasks share. The second command
trains without this task, for comparison.

Muon updates the weight matrices of the shared layers, AdamW all other parameters. If a command was interrupted, start
it again: it continues with both optimizers at the same samples.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from trainstack import DefaultCheckpointerArguments, ModuleInterface, Trainer, TrainerArguments, seed_everything

LABELLED, TRAINING = 50, 1437  # the other 360 of the 1797 images are for validation


class Pairs(Dataset):
    """An image without a label together with one that has a label, so that a batch is half and half."""

    def __init__(self, images, labels, unlabelled):
        self.images, self.labels, self.unlabelled = images, labels, unlabelled

    def __len__(self):
        return len(self.unlabelled)

    def __getitem__(self, index):
        # Random numbers drawn here are the sample's own: the same after a resume, and over any number of processes.
        labelled, kept = torch.randint(len(self.images), ()), torch.rand(64) < 0.5
        whole = self.unlabelled[index]
        return {"image": self.images[labelled], "digit": self.labels[labelled], "hidden": whole * kept, "whole": whole}


class Columns(Dataset):
    """Tensors of equal length by name."""

    def __init__(self, **columns):
        self.columns = columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index):
        return {name: column[index] for name, column in self.columns.items()}


class TwoTasks(ModuleInterface):
    """Predicts the digit and the hidden pixels."""

    def __init__(self, hidden_weight):
        super().__init__()
        self.hidden_weight = hidden_weight
        self.shared = nn.Sequential(
            *(nn.Linear(64, 128), nn.ReLU()),
            *(nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.2)),
        )
        self.digit, self.whole = nn.Linear(128, 10), nn.Linear(128, 64)
        data: Any = load_digits()
        generator = torch.Generator().manual_seed(0)  # the same split every time
        images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
        order = torch.randperm(len(images), generator=generator)
        labelled, unlabelled, val = order[:LABELLED], order[LABELLED:TRAINING], order[TRAINING:]
        kept = torch.rand(len(val), 64, generator=generator) < 0.5
        self.train_data = Pairs(images[labelled], labels[labelled], images[unlabelled])
        self.val_digits = Columns(image=images[val], digit=labels[val])
        self.val_pixels = Columns(hidden=images[val] * kept, whole=images[val])

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(self.train_data, batch_size, sampler=sampler(self.train_data))

    def get_val_dataloaders(self, sampler, batch_size):
        """A loader for each task: both are evaluated, under their names."""
        tasks = {"digits": self.val_digits, "pixels": self.val_pixels}
        return {name: DataLoader(data, batch_size, sampler=sampler(data)) for name, data in tasks.items()}

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        matrices = [p for p in self.shared.parameters() if p.ndim == 2]
        rest = [p for p in self.parameters() if not any(p is matrix for matrix in matrices)]
        muon, adamw = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=3e-3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR
        return [muon, adamw], [cosine(optimizer, self.plan.total_steps) for optimizer in (muon, adamw)]

    def digit_loss(self, batch):
        scores = self.digit(self.shared(batch["image"]))
        return F.cross_entropy(scores, batch["digit"]), scores.argmax(dim=1) == batch["digit"]

    def pixel_loss(self, batch):
        return F.mse_loss(self.whole(self.shared(batch["hidden"])), batch["whole"])

    def train_step(self, global_step, batch, device):
        digits, pixels = self.digit_loss(batch)[0], self.pixel_loss(batch)
        self.log("train/digits", digits)  # read from the device at log points alone
        self.log("train/pixels", pixels)
        return digits + self.hidden_weight * pixels

    def val_step(self, global_step, batch, device):
        """Runs for both loaders; the items of a batch show its loader."""
        return self.digit_loss(batch) if "digit" in batch else self.pixel_loss(batch)

    def on_end_val_epoch(self, global_step, losses, correct=None, key="default"):
        if correct is not None:  # the loader of the digits
            self.log("val/digits/accuracy", correct.float().mean())


def main():
    """Train with the options of the command line."""
    parser = argparse.ArgumentParser(description="Train one network on two tasks, with two optimizers.")
    parser.add_argument("--backend", default="sp", help="sp, sp-bf16, ddp, ... (default: sp)")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--hidden-weight", type=float, default=3.0, help="of the second task's loss (default: 3)")
    parser.add_argument("--output-dir", type=Path, help="default: runs/multitask-WEIGHT")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ... (default: auto)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    seed_everything(given.seed)
    args = TrainerArguments(
        backend=given.backend,
        epochs=given.epochs,
        train_batch_size=64,
        val_batch_size=360,
        output_dir=given.output_dir or f"runs/multitask-{given.hidden_weight:g}",
        device=given.device,
        seed=given.seed,
        resume="auto",
        checkpointer_args=DefaultCheckpointerArguments(keep_last=2),
    )
    trainer = Trainer(TwoTasks(given.hidden_weight), args)
    trainer.train()
    accuracy, error = (trainer.history.get_latest_metric(f"val/{name}") for name in ("digits/accuracy", "pixels/loss"))
    trainer.print(f"digits: {accuracy:.1%} right")
    trainer.print(f"pixels: off by {error**0.5:.3f}, where 0 is black and 1 is white")


if __name__ == "__main__":
    main()
