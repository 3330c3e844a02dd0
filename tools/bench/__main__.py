"""`python -m tools.bench`: measure the workloads, print a table for each, and write the figures with `--json`.

`python -m tools.bench profile` divides the time of a step among its parts, `python -m tools.bench private` measures
private training, `python -m tools.bench order` the order of datasets of up to 1e12 samples, `python -m tools.bench
sharded` sharded checkpoints, `python -m tools.bench sharding-memory` the memory of processes that share a model, and
`python -m tools.bench load-memory` the memory of saving and loading. `python -m tools.bench record` measures the step
log and `verify_replay`, and `python -m tools.bench audit` lists the planted faults that the privacy audit finds.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when torch is imported

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tools.bench.allocator import keep_freed_memory
from tools.bench.checkpoints import measure_checkpoints
from tools.bench.contender import find_contenders
from tools.bench.measure import measure
from tools.bench.processes import WHOLE, measure_processes
from tools.bench.report import as_json, table, versions
from tools.bench.workloads import WORKLOADS

CHECKPOINT = "checkpoint"
"""A workload without training, which is printed and not written by `--json`."""

COMMANDS = {
    "audit": "tools.broken_privacy",
    "load-memory": "tools.bench.load_memory",
    "order": "tools.bench.order",
    "private": "tools.bench.private",
    "profile": "tools.bench.profile",
    "record": "tools.bench.record",
    "sharded": "tools.bench.sharded",
    "sharding-memory": "tools.bench.sharding_memory",
}
"""The module with `main(argv)` of each other measurement."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns 1 if two contenders with the same arithmetic ended with different bits."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        status: int = importlib.import_module(COMMANDS[argv[0]]).main(argv[1:])
        return status
    options = _parser().parse_args(argv)
    torch.set_num_threads(1)
    keep_freed_memory()
    contenders = [c for c in find_contenders() if not options.only or c.name in {"raw", "raw_clip", *options.only}]
    rounds = options.rounds or (3 if options.quick else 7)
    print(", ".join(f"{name} {value}" for name, value in versions().items()))
    results = {}
    for name in options.workload or (*WORKLOADS, *WHOLE, CHECKPOINT):
        if name == CHECKPOINT:
            print(f"\n{measure_checkpoints(rounds, 5 if options.quick else 50, _tell)}", flush=True)
            continue
        if name in WHOLE:
            print(f"\n{measure_processes(name, rounds, _tell)}", flush=True)
            continue
        task = WORKLOADS[name]()
        if options.quick:
            task = task.cut(max(8, task.steps // 5))
        outcomes = measure(task, contenders, rounds, _tell)
        results[name] = (task, outcomes)
        print(f"\n{table(task, outcomes)}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(results), indent=2) + "\n", encoding="utf-8")
    return 0 if all(o.same_bits for _, outcomes in results.values() for o in outcomes.values()) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    parser.add_argument(
        "--workload",
        action="append",
        choices=(*WORKLOADS, *WHOLE, CHECKPOINT),
        help="measure only this one; can be repeated",
    )
    parser.add_argument(
        "--only", action="append", metavar="CONTENDER", help="only this one, with raw and raw_clip; can be repeated"
    )
    parser.add_argument("--rounds", type=_at_least_one, help="rounds that count (default: 7, with --quick 3)")
    parser.add_argument("--quick", action="store_true", help="a fifth of the steps; accurate to 10 %%")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures there")
    return parser


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: write 1 or more rounds")
    return number


def _tell(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{line}\033[K", end="\r", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
