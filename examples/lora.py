"""Fine-tune a network with low-rank adapters (LoRA): the base is frozen, and the adapters alone are trained and saved.

    python examples/lora.py

The base is trained on scikit-learn's digits. Then the images are turned by 90 degrees, and the adapters learn them
from 200 labelled images. For models of the Hub, `peft` adds the adapters: see docs/recipes/hugging-face.md.

If the command was interrupted, start it again: both trainings continue from their newest checkpoints.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from trainstack import (
    DefaultCheckpointerArguments,
    SupervisedModule,
    Trainer,
    TrainerArguments,
    export_model,
    read_model,
    seed_everything,
)

TRAINING, TURNED = 1437, 200  # images for the base, and for the adapters; the other 360 are for validation


class LoRALinear(nn.Module):
    """A frozen linear layer plus a trained product of two small matrices (Hu et al. 2021).

    Args:
        base: the layer, with weights of shape (out, in).
        rank: of the matrices, (rank, in) and (out, rank).
        scale: of their product.
    """

    def __init__(self, base, rank=4, scale=2.0):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))  # so the first outputs are those of the base

    def forward(self, inputs):
        return self.base(inputs) + self.scale * inputs @ self.down.T @ self.up.T


def add_adapters(model, rank):
    """Replace each linear layer of a sequential model by one with an adapter."""
    return nn.Sequential(*(LoRALinear(part, rank) if isinstance(part, nn.Linear) else part for part in model))


def adapters_of(model):
    """The trained tensors by name."""
    return {name: tensor.detach() for name, tensor in model.named_parameters() if tensor.requires_grad}


class Digits(SupervisedModule):
    """Any network on the digits, with its accuracy."""

    def on_end_val_epoch(self, global_step, results, key="default"):
        self.log("val/accuracy", (results["outputs"].argmax(dim=1) == results["targets"]).float().mean())


def fit(model, train, val, epochs, lr, output_dir, device):
    """Train the parameters of `model` that are not frozen; returns the accuracy on `val`."""
    module = Digits(model, nn.CrossEntropyLoss(), "adamw", train, val, optimizer_kwargs={"lr": lr})
    args = TrainerArguments(
        epochs=epochs,
        train_batch_size=50,
        val_batch_size=360,
        output_dir=output_dir,
        device=device,
        resume="auto",
        checkpointer_args=DefaultCheckpointerArguments(keep_frozen=False),  # no copies of the base
    )
    trainer = Trainer(module, args)
    trainer.train()
    model.eval().cpu()
    return trainer.history.get_latest_metric("val/accuracy")


@torch.no_grad()
def accuracy(model, data):
    """The share of correct answers."""
    images, labels = data.tensors
    return (model.eval()(images).argmax(dim=1) == labels).float().mean().item()


def main():
    """Train the base, then the adapters; save the adapters and load them into a new network."""
    parser = argparse.ArgumentParser(description="Fine-tune with low-rank adapters.")
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=30, help="of the adapters (default: 30)")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/lora"))
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ... (default: auto)")
    given = parser.parse_args()
    seed_everything(0)
    digits: Any = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order] / 16  # (1797, 8, 8), from 0 to 1
    labels, turned = torch.tensor(digits.target)[order], images.rot90(1, (1, 2))
    held_out = TensorDataset(turned[TRAINING:], labels[TRAINING:])

    base = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    upright = TensorDataset(images[:TRAINING], labels[:TRAINING]), TensorDataset(images[TRAINING:], labels[TRAINING:])
    fit(base, *upright, 10, 3e-3, given.output_dir / "base", given.device)
    before = accuracy(base, held_out)

    model = add_adapters(base, given.rank)
    few = TensorDataset(turned[:TURNED], labels[:TURNED])
    after = fit(model, few, held_out, given.epochs, 1e-2, given.output_dir / "turned", given.device)
    adapters = adapters_of(model)
    export_model(adapters, given.output_dir / "adapters", overwrite=True)

    trained, frozen = (sum(t.numel() for t in tensors) for tensors in (adapters.values(), base.parameters()))
    print(f"adapters  {trained} parameters are trained and saved, {frozen} are frozen")
    print(f"turned    {before:.1%} correct before, {after:.1%} after")
    loaded = add_adapters(base, given.rank)
    loaded.load_state_dict(read_model(given.output_dir / "adapters"), strict=False)
    print(f"loaded    {accuracy(loaded, held_out):.1%} with the saved adapters in a new network")


if __name__ == "__main__":
    main()
