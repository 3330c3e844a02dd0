"""`python -m tools.bench order`: seconds, memory and throughput of the order of the training data, by its length."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from time import process_time

import torch

from tools.bench.allocator import memory
from trainstack.trainer.core.order import DataOrder, RankSlice
from trainstack.trainer.core.shuffling import LARGEST_IN_MEMORY, ORDER_VERSION

LENGTHS = (10**6, 10**7, 10**9, 10**12)
LARGEST_TENSOR = 10**7
"""`torch.randperm` is measured up to here. For larger lengths it takes 8 bytes and about 60 ns per sample."""
BATCH, BATCHES = 256, 3000
RESUMED = 0.5
"""The position of a resume, as a share of the epoch."""


def order_of(length: int, version: int) -> DataOrder:
    """The order of rank 0 of 1, in batches of 256."""
    return DataOrder(length=length, global_batch=BATCH, micro_batch=BATCH, version=version)


def measure(length: int, version: int, rounds: int) -> dict[str, float]:
    """CPU seconds to the first batch of an epoch and after a resume, MB, and CPU microseconds of a batch.

    The time of a batch includes its share of the work for the whole epoch.
    """
    order = order_of(length, version)
    middle = int(length * RESUMED) // BATCH * BATCH
    start = _seconds(lambda: order.local_batches(0), rounds)
    return {
        "start": start,
        "resume": _seconds(lambda: order.local_batches(0, middle), rounds),
        "MB": _peak(length, version),
        "us": median(_per_batch(order) for _ in range(rounds)) + start * BATCH / length * 1e6,
    }


def _seconds(begin: Callable[[], Iterator[RankSlice]], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        began = process_time()
        next(begin())
        taken.append(process_time() - began)
    return median(taken)


def _per_batch(order: DataOrder) -> float:
    """CPU microseconds of a batch after the first. An order in memory only slices."""
    batches = order.local_batches(0)
    next(batches)
    began = process_time()
    count = sum(1 for _ in islice(batches, BATCHES))
    return (process_time() - began) / count * 1e6


def _peak(length: int, version: int) -> float:
    """The largest growth of the resident memory of a new process in MB, in the start of an epoch and 100 batches."""
    command = [sys.executable, "-m", "tools.bench.order", "--peak", str(length), str(version)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    return float(printed.stdout)


def _print_peak(length: int, version: int) -> None:
    for _ in order_of(2, version).local_batches(0):  # loads modules, which are not memory of the order
        torch.randperm(2)
    before = memory("VmRSS")
    for _ in islice(order_of(length, version).local_batches(0), 100):
        pass
    print(max(0.0, memory("VmHWM") - before))


def report(rounds: int) -> str:
    """The table for docs/performance.md."""
    lines = [
        "| samples | order | first batch, CPU s | after a resume, CPU s | memory, MB | batch of 256, CPU us |",
        "|---|---|---|---|---|---|",
    ]
    for length in LENGTHS:
        for version in range(ORDER_VERSION + 1):
            if (length <= LARGEST_IN_MEMORY and version) or (length > LARGEST_TENSOR and not version):
                continue
            found = measure(length, version, rounds)
            name = "keyed" if version else "`torch.randperm`"
            figures = f"{found['start']:.4f} | {found['resume']:.4f} | {found['MB']:.1f} | {found['us']:.1f}"
            lines.append(f"| 1e{len(str(length)) - 1} | {name} | {figures} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench order", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peak", nargs=2, type=int, metavar=("SAMPLES", "VERSION"), help="print the MB of one order")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.peak is not None:
        _print_peak(*options.peak)
    else:
        print(report(options.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
