"""Kill trainings at random moments, saves included, and compare what the resumed ones end with.

    make kills                                   200 SIGKILLs
    python -m tools.kills --kills 12 --seed 3    fewer, at other moments

Every backend saves in the foreground and in the background. Saving takes a good share of the time, so that many kills fall into
it. Processes are forks of one that has imported torch and does nothing else. Exit code 1 if any bit differs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import random
import shutil
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainstack as ts
from trainstack.verifying.proving import Subject, prove

BACKENDS = ("sp", "sp-amp", "ddp")
SAMPLES, WIDTH = 400, 384
TIMEOUT_S = 120.0
HEAD = "backend  saving      kills  while saving  within an epoch  trainings  seconds  result"


class Heavy(ts.ModuleInterface):
    """Little to compute and much to save: 300,000 parameters with the state of Adam, dropout and a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, WIDTH),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.ReLU(),
            nn.Linear(2 * WIDTH, 2),
        )
        inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
        self.data = TensorDataset(inputs, (inputs.sum(1) > 0).long())

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> tuple[Any, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        steps = estimated_global_steps_per_epoch * epochs
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)]

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.data, sampler=sampler(self.data), batch_size=batch_size)

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.data, sampler=sampler(self.data), batch_size=batch_size)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


def call_in(place: Path, backend: str, async_save: bool) -> bytes:
    """A training of `Heavy` in `place`, for `Subject`: 3 epochs of 25 steps, saved after every third step."""
    args = ts.TrainerArguments(
        epochs=3,
        train_batch_size=16,
        val_batch_size=100,
        backend=backend,
        device="cpu",
        log_every=10,
        resume="auto",
        output_dir=str(place),
        checkpointer_args=ts.DefaultCheckpointerArguments(every_n_steps=3, keep_last=3, async_save=async_save),
        writers=[],
        progress="none",
    )
    return pickle.dumps((Heavy, (args,)))


def preloaded() -> Any:
    """Starts processes as forks of one that has imported everything."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported there
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "trainstack.verifying.child", "tools.kills"])
    return context


def shares(kills: int, parts: int) -> list[int]:
    """`kills` cut into `parts` of nearly the same size."""
    return [kills // parts + (part < kills % parts) for part in range(parts)]


def row(report: ts.ResumeReport, async_save: bool, seconds: float) -> str:
    """One line of the table."""
    kills = report.kills
    saving, trainings = sum(kill.while_saving for kill in kills), len({kill.training for kill in kills})
    within = sum(bool(kill.resumed_from % (SAMPLES // 16)) for kill in kills)
    return (
        f"{report.backend:<8} {'background' if async_save else 'foreground'}  {len(kills):>5}  {saving:>12}  "
        f"{within:>15}  {trainings:>9}  {seconds:>7.0f}  {'the same bits' if report.same else report.verdict}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Run all of it; the exit code."""
    parser = argparse.ArgumentParser(prog="tools.kills", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="over all backends together; 200 by default")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--verbose", action="store_true", help="print every kill")
    given = parser.parse_args(arguments)
    if given.kills < 1:
        parser.error(f"--kills {given.kills}: write 1 or more")
    draw, folder, all_same = random.Random(given.seed), Path(tempfile.mkdtemp(prefix="trainstack-kills-")), True
    context, began = preloaded(), time.monotonic()
    cases = list(product(BACKENDS, (False, True)))
    print(HEAD, flush=True)
    for (backend, async_save), kills in zip(cases, shares(given.kills, len(cases)), strict=True):
        if not kills:
            continue
        start = time.monotonic()
        subject = Subject(
            backend=backend,
            nproc=2 if backend == "ddp" else None,
            call_in=lambda place, backend=backend, async_save=async_save: call_in(place, backend, async_save),
            context=context,
            timeout_s=TIMEOUT_S,
        )
        place = folder / f"{backend}-{async_save}"
        report = prove(subject, kills, draw, place)
        print(report if given.verbose else row(report, async_save, time.monotonic() - start), flush=True)
        all_same &= report.same
        if report.same:
            shutil.rmtree(place)
    if all_same:
        shutil.rmtree(folder)
    print(f"{given.kills} kills in {time.monotonic() - began:.0f} s: {'the same bits' if all_same else 'NOT THE SAME'}")
    return 0 if all_same else 1


if __name__ == "__main__":
    sys.exit(main())
