"""`python -m tools.bench record`: the time that the step log and repeated steps add to a training.

The row `raw` is a training without both. The row `again` repeats it, and shows the noise of the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from tools.bench.allocator import keep_freed_memory
from tools.bench.contender import Contender
from tools.bench.library import prepare_library
from tools.bench.measure import measure
from tools.bench.report import table, versions
from tools.bench.workloads import WORKLOADS

VARIANTS: dict[str, dict[str, Any]] = {
    "raw": {"record": "off"},
    "again": {"record": "off"},
    "record=steps": {"record": "steps"},
    "record=full": {"record": "full"},
    "verify_replay=0.01": {"record": "off", "verify_replay": 0.01},
    "verify_replay=0.1": {"record": "off", "verify_replay": 0.1},
}
"""The arguments of each row."""


def contenders() -> list[Contender]:
    """A training for each row."""
    return [
        Contender(name=name, rank=rank, against="raw", prepare=partial(prepare_library, progress="plain", **options))
        for rank, (name, options) in enumerate(VARIANTS.items())
    ]


def main(argv: Sequence[str]) -> int:
    """Print the tables; returns 1 if a row ended with other bits than the first."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench record", description=__doc__)
    parser.add_argument("--workload", action="append", choices=("W1", "W1-ready", "W2", "W3"), help="default: W1, W2")
    parser.add_argument("--rounds", type=int, default=15, help="default: 15")
    parser.add_argument("--steps", type=int, help="steps of a run (default: those of the workload)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    keep_freed_memory()
    print(", ".join(f"{name} {value}" for name, value in versions().items()))
    is_same = True
    for name in options.workload or ("W1", "W2"):
        task = WORKLOADS[name]()
        task = task if options.steps is None else task.cut(options.steps)
        outcomes = measure(task, contenders(), options.rounds)
        print(f"\n{table(task, outcomes)}", flush=True)
        is_same &= all(outcome.same_bits for outcome in outcomes.values())
    return 0 if is_same else 1
