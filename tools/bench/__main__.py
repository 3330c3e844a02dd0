"""`python -m tools.bench`: measure, print a table for each workload, and keep the figures if asked to.

`python -m tools.bench profile` says where the microseconds of a step go, `python -m tools.bench private` measures
private training, `python -m tools.bench order` the order of data sets of up to 1e12 samples, `python -m tools.bench
sharded` sharded checkpoints, `python -m tools.bench sharding-memory` the memory of processes that share a model, and
`python -m tools.bench load-memory` that of saving and loading. `python -m tools.bench record` measures the step log and
`verify_replay`, and `python -m tools.bench audit` lists the planted faults that the privacy audit finds.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when torch is imported

import argparse
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
"""A workload without training: printed, not part of the figures that --json keeps."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if two contenders that do the same arithmetic ended with different bits."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["private"]:
        from tools.bench.private import main as private

        return private(argv[1:])
    if argv[:1] == ["profile"]:
        from tools.bench.profile import main as profile

        return profile(argv[1:])
    if argv[:1] == ["order"]:
        from tools.bench.order import main as order

        return order(argv[1:])
    if argv[:1] == ["sharding-memory"]:
        from tools.bench.sharding_memory import main as sharding_memory

        return sharding_memory(argv[1:])
    if argv[:1] == ["load-memory"]:
        from tools.bench.load_memory import main as load_memory

        return load_memory(argv[1:])
    if argv[:1] == ["record"]:
        from tools.bench.record import main as record

        return record(argv[1:])
    if argv[:1] == ["sharded"]:
        from tools.bench.sharded import main as sharded

        return sharded(argv[1:])
    if argv[:1] == ["audit"]:
        from tools.broken_privacy import main as audit

        return audit(argv[1:])
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
        help="measure only this one; may be given several times",
    )
    parser.add_argument(
        "--only", action="append", metavar="CONTENDER", help="only this one, with raw and raw_clip; several times"
    )
    parser.add_argument("--rounds", type=_at_least_one, help="rounds that count (default: 7, with --quick 3)")
    parser.add_argument("--quick", action="store_true", help="a fifth of the steps; trust it to 10 %%")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures there")
    return parser


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} rounds measure nothing; give at least 1")
    return number


def _tell(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{line}\033[K", end="\r", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
