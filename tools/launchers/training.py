"""The training that every launcher starts: a small network with dropout on numbered samples.

    torchrun --nproc-per-node=2 -m tools.launchers.training --output runs/a

Variables TRAINING_* are the defaults of the options, because some launchers do not pass arguments. Each rank writes the
numbers of the samples of each step, and rank 0 writes the digest of the final weights.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainstack as ts
from trainstack.ranks import exchange

SAMPLES = 96


class Network(ts.ModuleInterface):
    """Two linear layers with dropout.

    Args:
        folder: for the files with the samples of the ranks.
        step_s: seconds of sleep in each step.
        prepare_s: seconds of sleep before the optimizers are made.
        lr: the initial learning rate.
    """

    def __init__(self, folder: Path, *, step_s: float = 0.0, prepare_s: float = 0.0, lr: float = 0.02) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)).double()
        self._folder, self._step_s, self._prepare_s = folder, step_s, prepare_s
        self._attempt, self._lr = "", lr

    def get_optimizers_schedulers(self, steps: int, epochs: int) -> tuple[list[Any], list[Any]]:
        """AdamW with a cosine schedule."""
        pause(self._folder, "preparing", self._prepare_s)
        optimizer = torch.optim.AdamW(self.parameters(), lr=self._lr)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps * epochs)]

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        """Samples with their numbers."""
        return DataLoader(dataset(), sampler=sampler(dataset()), batch_size=batch_size)

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        """The same samples."""
        return self.get_train_dataloader(sampler, batch_size)

    def on_train_begin(self, trainer: Any) -> None:
        """Exchange a name for this start of the run: the time of rank 0."""
        now = f"{time.time():.3f}"
        self._attempt = exchange("attempt", now)[0] if dist.is_initialized() else now

    def train_step(self, global_step: int, batch: Any, device: Any) -> Tensor:
        """The squared error."""
        inputs, targets, numbers = batch
        time.sleep(self._step_s)
        if self.micro_batch.samples:  # a borrowed batch has none
            with (self._folder / f"samples-{self._attempt}").open("a") as file:  # one write, from any rank
                file.write(json.dumps([global_step, numbers.tolist()]) + "\n")
        return nn.functional.mse_loss(self.layers(inputs), targets)

    def val_step(self, global_step: int, batch: Any, device: Any) -> Tensor:
        """The squared error, without dropout."""
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])


def dataset() -> TensorDataset:
    """`SAMPLES` rows of inputs, targets and numbers."""
    inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin(), torch.arange(SAMPLES))


def samples_of_steps(folder: Path) -> dict[int, list[int]]:
    """The samples of each step of a run, of all ranks together; for a repeated step those of its last repetition."""
    found: dict[int, list[int]] = {}
    for file in sorted(folder.glob("samples-*")):
        steps: dict[int, list[int]] = {}
        for line in file.read_text().splitlines():
            step, numbers = json.loads(line)
            steps.setdefault(step, []).extend(numbers)
        found |= {step: sorted(numbers) for step, numbers in steps.items()}
    return found


def pause(folder: Path, name: str, seconds: float) -> None:
    """Create the file `name`, and sleep."""
    if seconds:
        (folder / name).touch()
        time.sleep(seconds)


def digest(module: nn.Module) -> str:
    """The first 12 digits of a SHA-256 of all parameters."""
    hashed = hashlib.sha256()
    for parameter in module.parameters():
        hashed.update(parameter.detach().numpy().tobytes())
    return hashed.hexdigest()[:12]


def options(words: list[str] | None = None) -> argparse.Namespace:
    """The arguments of the command line, with TRAINING_* variables as defaults."""
    parser = argparse.ArgumentParser(prog="python -m tools.launchers.training", description=__doc__)

    def add(name: str, default: Any, help: str) -> None:
        variable = os.environ.get(f"TRAINING_{name.upper()}", default)
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=type(default), default=type(default)(variable), help=help
        )

    add("output", "runs/training", "the output_dir")
    add("epochs", 4, "epochs of 12 steps")
    add("step_s", 0.0, "seconds of sleep in each step")
    add("import_s", 0.0, "seconds of sleep before the trainer is made")
    add(
        "prepare_s",
        0.0,
        "seconds of sleep before the optimizers are made, after the trainer has installed its handlers",
    )
    add("exit_s", 0.0, "seconds that rank 0 sleeps at its exit")
    add("fails", "", "the SLURM_PROCID of a rank that fails before the rendezvous")
    add("backend", "auto", "the backend string")
    add("timeout_s", 15.0, "timeout_s of ddp")
    add("every", 12, "steps between two checkpoints")
    return parser.parse_args(words)


def main() -> None:
    """Train; rank 0 prints and writes the digest of the weights."""
    asked = options()
    folder = Path(asked.output)
    folder.mkdir(parents=True, exist_ok=True)
    pause(folder, "importing", asked.import_s)
    if asked.fails and asked.fails == os.environ.get("SLURM_PROCID"):
        raise RuntimeError("this rank fails before the rendezvous")
    ts.seed_everything(0)
    args = ts.TrainerArguments(
        backend=asked.backend,
        device="cpu",
        epochs=asked.epochs,
        train_batch_size=8,
        val_batch_size=8,
        output_dir=folder,
        resume="auto",
        checkpointer_args=ts.DefaultCheckpointerArguments(every_n_steps=asked.every),
        backend_options={} if asked.backend == "sp" else {"ddp": {"timeout_s": asked.timeout_s}},
        lease_timeout_s=5.0,
        progress="none",
    )
    trainer = ts.Trainer(Network(folder, step_s=asked.step_s, prepare_s=asked.prepare_s), args)
    if trainer.is_main_process:
        atexit.register(time.sleep, asked.exit_s)
    trainer.train()
    if trainer.is_main_process:
        text = f"{digest(trainer.module)} after {trainer.global_steps_finished} steps, {trainer.world.size} ranks"
        (folder / "digest").write_text(text)
        print(text, flush=True)
    trainer.close()


if __name__ == "__main__":
    main()
