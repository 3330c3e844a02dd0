"""Distil a large network into a small one: the student learns from the teacher's scores. Copy this file and change it.

    python examples/distillation.py

Three trainings on scikit-learn's handwritten digits: a teacher on 1437 images with labels, a small student on 100 of
them, and the same student on all images with the teacher's scores instead of labels. The first two need no new class,
and the third changes one step.

If the command was interrupted, start it again: it continues from the newest checkpoint.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from trainstack import SupervisedModule, Trainer, TrainerArguments, callbacks, export_model, seed_everything

LABELLED, TRAINING = 100, 1437  # the other 360 of the 1797 images are for validation


class Accuracy:
    """The share of correct answers. Metrics of torchmetrics can be used in its place."""

    def reset(self):
        self.right = self.all = 0

    def update(self, outputs, targets):
        self.right += int((outputs.argmax(dim=1) == targets).sum())
        self.all += len(targets)

    def compute(self):
        return self.right / self.all


def make_teacher():
    """A convolutional network, (n, 64) -> (n, 10)."""
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1)),
        *(
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(1024, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        ),
    )


def make_student():
    """A small dense network, (n, 64) -> (n, 10)."""
    return nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))


def supervised(model, train_data, val_data, kind=SupervisedModule, **more):
    """The module for `model`, with the settings of all three trainings."""
    return kind(
        model,
        nn.CrossEntropyLoss(),
        "adamw",
        train_data,
        val_data,
        optimizer_kwargs={"lr": 3e-3},
        scheduler="warmup_cosine",
        scheduler_kwargs={"warmup": 0.1},
        metrics={"accuracy": Accuracy()},
        **more,
    )


class Distilled(SupervisedModule):
    """A student that is taught by a frozen teacher.

    Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network", 2015.
    """

    temperature = 3.0

    def __init__(self, *args, teacher, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher.requires_grad_(False).eval()  # its dropout stays off

    def train_step(self, global_step, batch, device):
        images, _ = batch
        with torch.no_grad():
            wanted = F.log_softmax(self.teacher(images) / self.temperature, dim=1)
        scores = self.model(images)
        given = F.log_softmax(scores / self.temperature, dim=1)
        # The square keeps the gradient's size the same at every temperature.
        return F.kl_div(given, wanted, reduction="batchmean", log_target=True) * self.temperature**2


def train(name, make_module, given, epochs):
    """Train once; returns the model with its best weights."""
    seed_everything(0)
    module = make_module()
    args = TrainerArguments(
        backend=given.backend,
        epochs=epochs,
        train_batch_size=50,
        val_batch_size=360,
        output_dir=given.output_dir / name,
        device=given.device,
        resume="auto",
        writers=["csv"],  # no line for each epoch
        progress="none",
    )
    trainer = Trainer(module, args, callbacks=[callbacks.BestCheckpoint("val/accuracy")])
    trainer.train()
    accuracy = trainer.validate().metrics["val/accuracy"]
    trainer.print(f"{name:<15} {sum(p.numel() for p in module.model.parameters()):>7,} weights  {accuracy:.1%} right")
    return module.model


def main():
    """Train with the options of the command line."""
    parser = argparse.ArgumentParser(description="Distil a network that reads digits into one of a tenth its size.")
    parser.add_argument("--backend", default="sp", help="sp, sp-bf16, ddp, ... (default: sp)")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/distillation"))
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ... (default: auto)")
    given = parser.parse_args()

    data: Any = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))  # the same split every time
    everything, few, val = (
        TensorDataset(images[rows], labels[rows]) for rows in (order[:TRAINING], order[:LABELLED], order[TRAINING:])
    )

    teacher = train("teacher", lambda: supervised(make_teacher(), everything, val), given, given.epochs)
    same_steps = given.epochs * TRAINING // LABELLED  # few images make short epochs
    train("student alone", lambda: supervised(make_student(), few, val), given, same_steps)
    student = train(
        "student taught",
        lambda: supervised(make_student(), everything, val, Distilled, teacher=teacher),
        given,
        given.epochs,
    )
    print(f"The student alone: {export_model(student, given.output_dir / 'student')}")


if __name__ == "__main__":
    main()
