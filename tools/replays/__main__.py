"""Replay 40 runs from every checkpoint, and find planted differences.

    python -m tools.replays                       all without a result
    python -m tools.replays --restart             all, from the beginning
    python -m tools.replays --only plants         only the planted differences; "runs" for the runs
    python -m tools.replays --seed 3              other moments of the kills

The results are written to build/replays.json after each run, so that an interrupted battery can be continued. The exit
status is 1 if a replay differs, changes the folder of its run, or does not find a difference at its step.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.kills.__main__ import preloaded
from tools.replays import plants, runs

STATE = Path(__file__).resolve().parents[2] / "build" / "replays.json"


class Results:
    """The results of one seed, in a file that is replaced atomically."""

    def __init__(self, path: Path, seed: int, *, restart: bool) -> None:
        self._path = path
        self.found: dict[str, Any] = {"seed": seed}
        if path.is_file() and not restart:
            kept = json.loads(path.read_text(encoding="utf-8"))
            self.found = kept if kept.get("seed") == seed else self.found

    def add(self, name: str, result: Any) -> None:
        """Write the result of `name`."""
        self.found[name] = result
        self._path.parent.mkdir(exist_ok=True)
        aside = self._path.with_suffix(".tmp")
        aside.write_text(json.dumps(self.found, indent=1), encoding="utf-8")
        aside.replace(self._path)


def replay_runs(results: Results, context: Any, seed: int) -> bool:
    """Replay all runs without a good result; whether all have the same bits."""
    good = True
    for number, case in enumerate(runs.cases()):
        name = f"run {number + 1}: {case.name}"
        if name not in results.found or results.found[name]["false_alarms"]:
            with tempfile.TemporaryDirectory(prefix="trainstack-replays-") as folder:
                outcome = runs.attempt(case, Path(folder), context, random.Random(seed * 1000 + number))
            results.add(name, {**asdict(outcome), "good": runs.is_good(outcome)})
        found = results.found[name]
        good &= found["good"]
        verdict = "same bits" if found["good"] else f"NOT THE SAME: {found['false_alarms'][:1]}"
        print(
            f"{name}: {found['replays']} replays, {found['steps']} steps, {found['kills']} kills: {verdict}", flush=True
        )
    return good


def find_plants(results: Results, context: Any) -> bool:
    """Search all planted differences, with both kinds of record; whether all are found."""
    good, listed = True, plants.plants()
    with tempfile.TemporaryDirectory(prefix="trainstack-replays-") as folder:
        recorded = {mode: plants.record_run(Path(folder), mode, context) for mode in ("full", "steps")}
        for number, plant in enumerate(listed):
            for mode, run in recorded.items():
                name = f"plant {number + 1}: {plant.name}, record={mode!r}"
                if results.found.get(name) != "found":
                    with tempfile.TemporaryDirectory(prefix="trainstack-plant-") as place:
                        report = plants.find(plant, run, Path(place), context)
                    results.add(name, plants.problem_of(plant, report, mode) or "found")
                good &= results.found[name] == "found"
                print(f"{name}: {results.found[name]}", flush=True)
    return good


def main(words: Sequence[str] | None = None) -> int:
    """Run the battery; returns the exit status."""
    parser = argparse.ArgumentParser(prog="tools.replays", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--restart", action="store_true", help="delete earlier results")
    parser.add_argument("--only", choices=("runs", "plants"), help="half of the battery")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    given = parser.parse_args(words)
    began, context = time.monotonic(), preloaded("tools.replays.runs")
    results = Results(STATE, given.seed, restart=given.restart)
    good = given.only == "runs" or find_plants(results, context)
    good &= given.only == "plants" or replay_runs(results, context, given.seed)
    totals = [found for name, found in results.found.items() if name.startswith("run ")]
    counts = {key: sum(found[key] for found in totals) for key in ("replays", "steps", "checkpoints", "kills")}
    print(f"{len(totals)} runs, {counts} in {time.monotonic() - began:.0f} s: {'good' if good else 'NOT GOOD'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
