"""The packages that are measured, and the random sample."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

from tools.mutants.changes import Change, changes_of

PACKAGES: Mapping[str, str] = {
    "src/trainstack/trainer/run": "the loop: steps, updates, ends, stop requests, failures",
    "src/trainstack/trainer/core": "the plan of a run, the order of samples, weighting, random states",
    "src/trainstack/trainer/data": "the batches of each step on each rank, also after a resume",
    "src/trainstack/trainer/resume": "the state that a checkpoint holds and a resume restores",
    "src/trainstack/trainer/schedulers": "learning rates, also after a resume",
    "src/trainstack/trainer/evaluation": "metrics and losses over all samples of all ranks",
    "src/trainstack/checkpointing/*.py": "commit, damage, leases and retention of checkpoints",
    "src/trainstack/checkpointing/integrity": "signatures, lineage and scrubbing",
    "src/trainstack/checkpointing/sharded": "checkpoints in parts",
    "src/trainstack/backends/*.py": "the verbs of a step: backward, clipping, precision, DDP, FSDP",
    "src/trainstack/backends/processes": "collectives, rendezvous and failures of other ranks",
    "src/trainstack/backends/dp": "the private step, its accounting and its ledger",
}
"""Code that holds a promise of the README: exact resume, checkpoint integrity, private training, several processes.

Reports, progress bars, trackers, the command line and ports of other libraries are not in the list: a mistake there is
visible, and changes no result.
"""


def files_of(root: Path, packages: Mapping[str, str], only: str = "") -> list[str]:
    """The source files of the packages, relative to `root`; with `only`, those whose path contains it."""
    found = set()
    for package in packages:
        if package.endswith(".py"):
            found.update(root.glob(package))
        else:
            found.update((root / package).rglob("*.py"))
    paths = sorted(path.relative_to(root).as_posix() for path in found)
    return [path for path in paths if only in path]


def sample(root: Path, files: list[str], seed: int, count: int) -> tuple[list[Change], int]:
    """`count` changes at random, each with the same probability, and the number of all. More extend the same sample."""
    changes = [change for path in files for change in changes_of(root, path)]
    order = random.Random(seed).sample(range(len(changes)), len(changes))
    return [changes[index] for index in order[:count]], len(changes)
