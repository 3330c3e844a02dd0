"""Train a GAN on scikit-learn's handwritten digits: two networks, updated in turns. Copy this file and change it.

    python examples/gan.py

`train_step` is a generator function. Each `yield loss, optimizer` makes one backward pass and one update, and the code
after it uses the new weights: first the discriminator is updated, then the generator against the new discriminator.

If the command was interrupted, start it again: it continues from the newest checkpoint.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.data import DataLoader, TensorDataset

from trainstack import DefaultCheckpointerArguments, ModuleInterface, Trainer, TrainerArguments, seed_everything

NOISE = 32
SHADES = " .:-=+*#%@"  # from -1 to 1


def make_generator():
    """Noise (n, NOISE) to images (n, 64) with values from -1 to 1."""
    return nn.Sequential(
        *(nn.Linear(NOISE, 128), nn.BatchNorm1d(128), nn.ReLU()),
        *(nn.Linear(128, 256), nn.BatchNorm1d(256), nn.ReLU()),
        *(nn.Linear(256, 64), nn.Tanh()),
    )


def make_discriminator():
    """Images (n, 64) to scores (n, 1): high if they seem real."""
    return nn.Sequential(
        *(nn.Linear(64, 256), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
        *(nn.Linear(256, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
        nn.Linear(128, 1),
    )


class Gan(ModuleInterface):
    """Both networks, their optimizers, and a step with two updates."""

    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = make_generator(), make_discriminator()
        data: Any = load_digits()
        self.data = TensorDataset(torch.tensor(data.data, dtype=torch.float32) / 8 - 1)  # pixels are 0 to 16

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(self.data, batch_size=batch_size, sampler=sampler(self.data))

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        networks = (self.discriminator, self.generator)
        return [torch.optim.Adam(network.parameters(), lr=5e-4, betas=(0.5, 0.999)) for network in networks], []

    def train_step(self, global_step, batch, device):
        (images,) = batch
        fakes = self.generator(torch.randn(len(images), NOISE, device=device))

        real, fake = self.discriminator(images), self.discriminator(fakes.detach())
        loss_d = bce(real, torch.full_like(real, 0.9)) + bce(fake, torch.zeros_like(fake))
        yield loss_d, 0  # the optimizer of the discriminator

        score = self.discriminator(fakes)
        loss_g = bce(score, torch.ones_like(score))
        yield loss_g, 1  # the optimizer of the generator

        return {"loss": loss_d + loss_g, "d": loss_d, "g": loss_g}

    def on_end_train_epoch(self, global_step, outputs):
        self.log("train/discriminator", outputs["d"].mean())
        self.log("train/generator", outputs["g"].mean())

    @torch.no_grad()
    def draw(self, count, seed=0):
        """Made-up digits as text, side by side."""
        device = next(self.generator.parameters()).device
        noise = torch.randn(count, NOISE, generator=torch.Generator().manual_seed(seed)).to(device)
        shades = ((self.generator.eval()(noise) + 1) / 2 * (len(SHADES) - 1)).round().int().view(count, 8, 8)
        rows = shades.transpose(0, 1).tolist()  # 8 rows of all digits
        return "\n".join("  ".join("".join(SHADES[s] * 2 for s in digit) for digit in row) for row in rows)


def main():
    """Train with the options of the command line, and print some made-up digits."""
    parser = argparse.ArgumentParser(description="Train a GAN on handwritten digits.")
    parser.add_argument("--backend", default="sp", help="sp, sp-bf16, ddp, ... (default: sp)")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/gan"))
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ... (default: auto)")
    given = parser.parse_args()
    seed_everything(0)
    args = TrainerArguments(
        backend=given.backend,
        epochs=given.epochs,
        train_batch_size=64,
        clip_grads=False,
        output_dir=given.output_dir,
        device=given.device,
        resume="auto",
        checkpointer_args=DefaultCheckpointerArguments(every_n_epochs=5),
    )
    module = Gan()
    trainer = Trainer(module, args)
    trainer.train()
    trainer.print(module.draw(6))


if __name__ == "__main__":
    main()
