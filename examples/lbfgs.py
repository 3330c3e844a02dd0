"""Fit a logistic regression by L-BFGS, and compare it with a plain loop. Copy this file and change it.

    python examples/lbfgs.py

L-BFGS evaluates the loss several times a step, by a closure. The trainer makes the closure from `train_step`, so the
optimizer needs no special code. The data are scikit-learn's: 30 measurements of 569 tumours, benign or malignant.

If the command was interrupted, start it again: checkpoints hold the optimizer's past gradients too.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

from trainstack import ModuleInterface, Trainer, TrainerArguments, seed_everything

TRAINING = 400  # records; the others are for validation


def load():
    """Training and validation data: measurements (n, 30) with mean 0 and deviation 1, and labels (n, 1)."""
    data: Any = load_breast_cancer()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    inputs = torch.tensor(data.data, dtype=torch.float64)[order]
    inputs = (inputs - inputs[:TRAINING].mean(0)) / inputs[:TRAINING].std(0)
    labels = torch.tensor(data.target, dtype=torch.float64)[order, None]
    return [TensorDataset(inputs[part], labels[part]) for part in (slice(TRAINING), slice(TRAINING, None))]


def make_model():
    """A linear model in float64 that begins with zeros."""
    model = nn.Linear(30, 1, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def make_optimizer(model):
    """L-BFGS with a line search."""
    return torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")


def loss_of(model, inputs, labels):
    """The logistic loss with a penalty on large weights."""
    return binary_cross_entropy_with_logits(model(inputs), labels) + 1e-3 * model.weight.square().sum()


class LogisticRegression(ModuleInterface):
    """The whole training set is one batch."""

    def __init__(self):
        super().__init__()
        self.model = make_model()
        self.train_data, self.val_data = load()

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(self.train_data, batch_size=batch_size)

    def get_val_dataloaders(self, sampler, batch_size):
        return DataLoader(self.val_data, batch_size=batch_size)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return make_optimizer(self.model), None

    def train_step(self, global_step, batch, device):
        return loss_of(self.model, *batch)

    def val_step(self, global_step, batch, device):
        inputs, labels = batch
        scores = self.model(inputs)
        return {"loss": binary_cross_entropy_with_logits(scores, labels), "correct": (scores > 0) == labels.bool()}

    def on_end_val_epoch(self, global_step, results, key="default"):
        self.log("val/accuracy", results["correct"].double().mean())


def plain_loop(steps):
    """The same training without the library; returns the model."""
    model, (data, _) = make_model(), load()
    optimizer = make_optimizer(model)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, *data.tensors)
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return model


def main():
    """Train with the options of the command line, and compare."""
    parser = argparse.ArgumentParser(description="Fit a logistic regression by L-BFGS.")
    parser.add_argument("--epochs", type=int, default=8, help="steps: the whole data set is one batch (default: 8)")
    parser.add_argument("--micro-batch", type=int, help="records that fit into memory (default: all)")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/lbfgs"))
    given = parser.parse_args()
    seed_everything(0)
    args = TrainerArguments(
        epochs=given.epochs,
        train_batch_size=TRAINING,
        gpu_batch_size_limit=given.micro_batch,
        clip_grads=False,  # a line search needs the gradient of its loss
        device="cpu",  # float64
        output_dir=given.output_dir,
        resume="auto",
    )
    module = LogisticRegression()
    Trainer(module, args).train()
    plain = plain_loop(given.epochs)
    print("the same bits as a plain loop:", torch.equal(module.model.weight, plain.weight))
    print(f"largest difference: {(module.model.weight - plain.weight).abs().max().item():.1e}")


if __name__ == "__main__":
    main()
