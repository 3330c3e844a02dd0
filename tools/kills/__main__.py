"""Kill trainings at random moments, also during saves, and compare the results of the resumed ones.

    make kills                                   200 SIGKILLs
    python -m tools.kills --kills 12 --seed 3    fewer, at other moments

Every backend saves in the foreground and in the background. Processes are forks of a process that only imports torch.
The exit status is 1 if any bit differs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import trainstack as ts
from tools.kills.training import STEPS_PER_EPOCH, call_in
from trainstack.verifying.trials import TrialSetup, run_trials

BACKENDS = ("sp", "sp-amp", "ddp")
LATER = ("torch._dynamo", "torch.onnx", "torch.distributed.algorithms.join", "numpy.random")
"""Modules that torch imports with the first optimizer, in seconds."""
TIMEOUT_S = 120.0
HEAD = "backend  saving      kills  while saving  within an epoch  trainings  seconds  result"


def preloaded(*modules: str) -> Any:
    """A context that starts processes as forks of one with the imports of the tools and of `modules`."""
    os.environ["OMP_NUM_THREADS"] = "1"  # the server reads it when it imports torch
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.kills.stateful", "tools.kills.training", *LATER, *modules])
    return context


def shares(kills: int, parts: int) -> list[int]:
    """`kills` divided into `parts` numbers that differ by at most 1."""
    return [kills // parts + (part < kills % parts) for part in range(parts)]


def is_proved(report: ts.ResumeReport) -> bool:
    """Whether there are kills that count, and no bit differs."""
    return report.divergence is None and report.counting > 0 and not report.blind_to


def row(report: ts.ResumeReport, async_save: bool, seconds: float) -> str:
    """One line of the table."""
    kills = report.kills
    saving, trainings = sum(kill.while_saving for kill in kills), report.trainings
    within = sum(bool(kill.resumed_from % STEPS_PER_EPOCH) for kill in kills)
    return (
        f"{report.backend:<8} {'background' if async_save else 'foreground'}  {len(kills):>5}  {saving:>12}  "
        f"{within:>15}  {trainings:>9}  {seconds:>7.0f}  {'the same bits' if is_proved(report) else report.verdict}"
    )


def run(cases: Sequence[tuple[str, bool]], kills: int, seed: int, verbose: bool = False) -> bool:
    """Kill trainings of `cases`, pairs of backend and `async_save`; whether all ended with the same bits."""
    draw, folder, all_same = random.Random(seed), Path(tempfile.mkdtemp(prefix="trainstack-kills-")), True
    context, began = preloaded(), time.monotonic()
    print(HEAD, flush=True)
    for (backend, async_save), share in zip(cases, shares(kills, len(cases)), strict=True):
        if not share:
            continue
        start = time.monotonic()
        subject = TrialSetup(
            backend=backend,
            nproc=2 if backend == "ddp" else None,
            call_in=lambda place, async_save, backend=backend: call_in(place, backend, async_save),
            context=context,
            timeout_s=TIMEOUT_S,
            async_save=async_save,
            self_test=False,
            vary=False,
        )
        place = folder / f"{backend}-{async_save}"
        report = run_trials(subject, share, draw, place)
        print(report if verbose else row(report, async_save, time.monotonic() - start), flush=True)
        all_same &= is_proved(report)
        if is_proved(report):
            shutil.rmtree(place)
    if all_same:
        shutil.rmtree(folder)
    print(f"{kills} kills in {time.monotonic() - began:.0f} s: {'the same bits' if all_same else 'NOT THE SAME'}")
    return all_same


def main(arguments: list[str] | None = None) -> int:
    """Run the kills; returns the exit status."""
    parser = argparse.ArgumentParser(prog="tools.kills", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="kills of all backends together (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--verbose", action="store_true", help="print every kill")
    given = parser.parse_args(arguments)
    if given.kills < 1:
        parser.error(f"--kills {given.kills}: write 1 or more")
    cases = list(product(BACKENDS, (False, True)))
    return 0 if run(cases, given.kills, given.seed, given.verbose) else 1


if __name__ == "__main__":
    sys.exit(main())
