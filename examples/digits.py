"""Train a small convolutional network on scikit-learn's 1797 handwritten digits. Copy this file and change it.

    python examples/digits.py --backend sp-bf16 --epochs 8
    python examples/digits.py --backend sp-bf16 --epochs 8 --resume

Interrupt the first command at any moment (Ctrl-C, kill -9, a power cut). The second continues from the newest
checkpoint and ends with the weights of a run without an interruption, bit for bit.
"""

import argparse
import hashlib
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trainstack import DefaultCheckpointerArguments, ModuleInterface, Trainer, TrainerArguments, seed_everything


class ShiftedDigits(Dataset):
    """Images that move by up to one pixel, in another direction in each epoch."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        right, down = torch.randint(0, 3, (2,)).tolist()
        padded = F.pad(self.images[index], (1, 1, 1, 1))
        return padded[:, down : down + 8, right : right + 8], self.labels[index]


class Digits(ModuleInterface):
    """The whole task: model, data, optimizer, and the steps for a batch."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            *(nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.ReLU()),
            *(nn.Conv2d(16, 32, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Dropout(0.25), nn.Linear(32 * 4 * 4, 10)),
        )
        data: Any = load_digits()
        images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16  # (1797, 1, 8, 8), 0 to 1
        labels = torch.tensor(data.target)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))  # the same split every time
        train, val = order[:1437], order[1437:]
        self.train_data = ShiftedDigits(images[train], labels[train])
        self.val_data = TensorDataset(images[val], labels[val])

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(self.train_data, batch_size=batch_size, sampler=sampler(self.train_data))

    def get_val_dataloaders(self, sampler, batch_size):
        return DataLoader(self.val_data, batch_size=batch_size, sampler=sampler(self.val_data))

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        steps = self.plan.total_steps  # exact; estimated_global_steps_per_epoch is an upper bound
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps)]

    def train_step(self, global_step, batch, device):
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def val_step(self, global_step, batch, device):
        images, labels = batch
        scores = self.model(images)
        return F.cross_entropy(scores, labels), scores.argmax(dim=1) == labels

    def on_end_val_epoch(self, global_step, losses, correct, key="default"):
        self.log("val/accuracy", correct.float().mean())


def fingerprint(module):
    """The first 16 digits of a SHA-256 over all bits of the weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def train(backend, epochs, output_dir, resume=False, **options):
    """Train once; returns the trainer, which has the trained `module` and the `history`."""
    seed_everything(0)
    args = TrainerArguments(
        backend=backend,
        epochs=epochs,
        train_batch_size=64,
        val_batch_size=360,
        output_dir=output_dir,
        resume=resume,
        overwrite=not resume,  # of an earlier try in the same folder
        log_every=5,
        checkpointer_args=DefaultCheckpointerArguments(every_n_steps=10),
        **options,
    )
    trainer = Trainer(Digits(), args)
    trainer.train()
    return trainer


def main():
    """Train with the options of the command line."""
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
    parser.add_argument("--backend", default="sp", help="how to train: sp, sp-bf16, sp-amp (default: sp)")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/digits"))
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ... (default: auto)")
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint in the output folder"
    )
    given = parser.parse_args()
    trainer = train(given.backend, given.epochs, given.output_dir, given.resume, device=given.device)
    print(f"validation accuracy {trainer.history.get_latest_metric('val/accuracy'):.1%}")
    print(f"weights {fingerprint(trainer.module)}")


if __name__ == "__main__":
    main()
