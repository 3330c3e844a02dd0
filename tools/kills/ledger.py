"""Kill private runs that share the ledger of one dataset, and compare its sum with the released steps.

    python -m tools.kills.ledger                        40 SIGKILLs
    python -m tools.kills.ledger --kills 4 --seed 3     fewer, at other moments

Several runs train at the same time: some resume a killed run, some begin in a copy of another run's folder, some begin
in a new folder. Each process records every step of its optimizer in a separate file: the step is released then. The
exit status is 1 if the ledger has fewer steps than were released, or more than 16 additional ones for each kill, or if
a statement on the disk is below the ledger.
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
from pathlib import Path
from typing import Any, NamedTuple

import trainstack as ts
from tools.kills.__main__ import LATER
from tools.kills.private import DELTA, train
from trainstack.backends.dp import SpendLedger, epsilon_of
from trainstack.backends.dp.ledger import BLOCK

TOGETHER = 2
"""The number of runs that train at the same time."""
TIMEOUT_S = 120.0


class Result(NamedTuple):
    """The numbers of recorded and released steps, and the problems."""

    kills: int
    runs: int
    folders: int
    released: int
    recorded: int
    problems: list[str]


def run(place: Path, kills: int, seed: int) -> Result:
    """Kill `kills` trainings in folders of `place`, and compare after each kill."""
    draw, ledger, killed, folders = random.Random(seed), place / "dataset.ledger", 0, [place / "run-0"]
    os.environ["OMP_NUM_THREADS"] = "1"  # the server reads it when it imports torch
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.kills.private", *LATER])
    problems: list[str] = []
    while killed < kills:
        chosen = _choose(draw, place, folders, min(TOGETHER, kills - killed))
        truths = [place / f"truth-{killed + number}" for number in range(len(chosen))]
        children = [
            context.Process(target=train, args=(str(folder), str(ledger), str(truth)))
            for folder, truth in zip(chosen, truths, strict=True)
        ]
        for child in children:
            child.start()
        for child, truth in zip(children, truths, strict=True):
            _wait_for(truth, draw.randrange(1, 60), child)
            time.sleep(draw.uniform(0.0, 0.01))
            child.kill()
            child.join()
            killed += 1
        released, recorded = _released(place), sum(SpendLedger(ledger).runs().values())
        if not released <= recorded <= released + BLOCK * killed:
            problems.append(f"after {killed} kills: {released} released, {recorded} recorded")
        problems += _below(ledger, chosen)
    runs = SpendLedger(ledger).runs()
    return Result(killed, len(runs), len(folders), _released(place), sum(runs.values()), problems)


def _choose(draw: random.Random, place: Path, folders: list[Path], count: int) -> list[Path]:
    """Different folders for the next runs: of killed runs, copies of them, or new ones."""
    chosen: list[Path] = []
    while len(chosen) < count:
        kind, folder = draw.choice(["resumed", "resumed", "copy", "new"]), draw.choice(folders)
        if kind != "resumed":
            made = place / f"run-{len(folders)}"
            if kind == "copy" and folder.exists() and folder not in chosen:
                shutil.copytree(folder, made)
            folders.append(made)
            folder = made
        if folder not in chosen:
            chosen.append(folder)
    return chosen


def _wait_for(truth: Path, steps: int, child: Any) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while (truth.stat().st_size if truth.exists() else 0) < steps:
        if not child.is_alive() or time.monotonic() > deadline:
            raise SystemExit(f"the training of {truth.name} makes no steps")
        time.sleep(0.0005)


def _released(place: Path) -> int:
    return sum(file.stat().st_size for file in place.glob("truth-*"))


def _below(ledger: Path, folders: list[Path]) -> list[str]:
    """Statements of the last killed runs with a smaller epsilon than the ledger."""
    book, found = SpendLedger(ledger), []
    for folder in folders:
        stated = ts.PrivacyStatement.from_json((folder / "privacy_statement.json").read_text())
        spent = epsilon_of(book.spent(stated.run), DELTA, "rdp")
        if stated.epsilon is None or stated.epsilon < spent:
            found.append(f"{folder.name} states {stated.epsilon}, the ledger has {spent}")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the battery; returns the exit status."""
    parser = argparse.ArgumentParser(prog="tools.kills.ledger", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    given = parser.parse_args(arguments)
    place, begin = Path(tempfile.mkdtemp(prefix="trainstack-ledger-")), time.monotonic()
    found = run(place, given.kills, given.seed)
    over = found.recorded - found.released
    print(
        f"{found.kills} kills, {found.runs} runs in {found.folders} folders: {found.released} steps released, "
        f"{found.recorded} recorded, {over / found.kills:.1f} too many per kill; {time.monotonic() - begin:.0f} s"
    )
    print("\n".join(found.problems) or "never below the released steps")
    if not found.problems:
        shutil.rmtree(place)
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
