"""Run the batteries that are too long for `make test`, one after the other, and continue where the last run ended.

    make test-long                       all that have not passed yet
    make test-long ARGS="--restart"      all, from the beginning
    make test-long ARGS="--list"         the batteries and their results
    make test-long ARGS="contract-2"     those whose names begin with this

Each battery is one command. Its output is in build/test-long/NAME.log, its result in build/test-long.json. Batteries
that have passed on this commit are not run again. The exit status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
STATE = "build/test-long.json"

SEEDS = (1, 2, 3, 4, 5)
EXAMPLES = 2000
CASES = 3000


class Battery(NamedTuple):
    """One command and its environment."""

    name: str
    arguments: Sequence[str]
    environment: dict[str, str] = {}  # noqa: RUF012 - no code changes it


def batteries() -> list[Battery]:
    """All batteries in the order in which they run."""
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    found = [Battery("long", (*pytest, "--long", "-m", "long", "tests"))]
    for seed in SEEDS:
        environment = {"TEST_SEED": str(seed)}
        found.append(Battery(f"contract-{seed}", (*pytest, "tests/contract"), environment))
        found.append(Battery(f"distributed-{seed}", (*pytest, "-m", "distributed", "tests"), environment))
        found.append(Battery(f"hostile-{seed}", ("-m", "tools.hostile_checkpoints", "--seed", str(seed))))
        found.append(Battery(f"kills-{seed}", ("-m", "tools.kills", "--seed", str(seed))))
        found.append(Battery(f"ledger-{seed}", ("-m", "tools.kills.ledger", "--seed", str(seed))))
        found.append(Battery(f"campaign-{seed}", ("-m", "tools.kills.campaign", "--seed", str(seed))))
        random_cases = ("-m", "tools.differential", "--seed", str(seed))
        found.append(Battery(f"differential-{seed}", (*random_cases, "--cases", str(CASES))))
        for size in ("2", "3"):
            ranks = (*random_cases, "--cases", str(CASES // 10), "--ranks", size)
            found.append(Battery(f"differential-{size}-ranks-{seed}", ranks))
        found.append(Battery(f"differential-workers-{seed}", (*random_cases, "--cases", str(CASES // 10), "--workers")))
        found.append(
            Battery(
                f"examples-{seed}",
                (*pytest, "-m", "hypothesis", f"--hypothesis-seed={seed}", "tests"),
                {**environment, "TEST_EXAMPLES": str(EXAMPLES)},
            )
        )
        found.append(Battery(f"all-{seed}", (*pytest, "--fast", "tests"), environment))
    found.append(Battery("replays", ("-m", "tools.replays")))
    found.append(Battery("field-scripts", ("-m", "tools.field_scripts")))
    found.append(Battery("breaks", ("-m", "tools.kills.breaks")))
    found.append(Battery("attacks", ("-m", "tools.attacks")))
    return found


class Record:
    """The results of a commit, in a file that is replaced atomically."""

    def __init__(self, root: Path, commit: str) -> None:
        self._path, self._commit = root / STATE, commit
        self.results: dict[str, dict[str, Any]] = {}
        if self._path.is_file():
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            if kept["commit"] == commit:
                self.results = kept["results"]

    def passed(self, name: str) -> bool:
        """Whether the battery need not run again."""
        return self.results.get(name, {}).get("status") == 0

    def add(self, name: str, status: int, seconds: float) -> None:
        """Write the result of a battery."""
        self.results[name] = {"status": status, "seconds": round(seconds)}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".tmp")
        new.write_text(json.dumps({"commit": self._commit, "results": self.results}, indent=1), encoding="utf-8")
        new.replace(self._path)

    def line(self, name: str) -> str:
        """The result of a battery in words."""
        result = self.results.get(name)
        if result is None:
            return f"{name:<16} not run"
        ended = "passed" if result["status"] == 0 else f"FAILED with exit status {result['status']}"
        return f"{name:<16} {ended} in {result['seconds']} s"


def run(battery: Battery, log: Path) -> int:
    """Run one battery with its output in `log`; returns the exit status."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **battery.environment}
    with log.open("w", encoding="utf-8") as output:
        command = [sys.executable, *battery.arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode


def commit_of(root: Path) -> str:
    """The commit that is checked out, with "+changes" if there are uncommitted changes."""
    git = ("git", "-C", str(root))
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    changed = subprocess.run([*git, "diff", "HEAD", "--quiet"], check=False).returncode
    return head + ("+changes" if changed else "")


def main(argv: Sequence[str] | None = None, root: Path = ROOT, known: Sequence[Battery] | None = None) -> int:
    """Run the batteries that have not passed; returns the exit status."""
    parser = argparse.ArgumentParser(prog="tools.long_tests", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="beginnings of names (default: all batteries)")
    parser.add_argument("--restart", action="store_true", help="delete the results and begin again")
    parser.add_argument("--list", action="store_true", help="print the batteries and their results, and run none")
    given = parser.parse_args(argv)
    chosen = [
        battery
        for battery in (batteries() if known is None else known)
        if not given.names or battery.name.startswith(tuple(given.names))
    ]
    if not chosen:
        parser.error(f"no battery has a name that begins with {' or '.join(given.names)}; --list prints the names")
    if given.restart:
        (root / STATE).unlink(missing_ok=True)
    record = Record(root, commit_of(ROOT))
    for battery in chosen:
        if not given.list and not record.passed(battery.name):
            began = time.monotonic()
            status = run(battery, root / "build" / "test-long" / f"{battery.name}.log")
            record.add(battery.name, status, time.monotonic() - began)
        print(record.line(battery.name), flush=True)
    return int(not given.list and not all(record.passed(battery.name) for battery in chosen))


if __name__ == "__main__":
    sys.exit(main())
