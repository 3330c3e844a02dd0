"""Wall times of exchanges between processes of this machine, with those of commit 24724a0 in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import trainstack as ts

ROUNDS = 30


def on_a_rank() -> dict[str, float]:
    """Medians of rank 0 in milliseconds."""
    torch.set_num_threads(1)
    stack = ts.build_trainer_backend("ddp")
    comm: Any = stack.open("cpu").comm

    def ring() -> None:
        rows = torch.empty(comm.size, 256, dtype=torch.uint8)
        dist.all_gather(list(rows.unbind()), torch.zeros(256, dtype=torch.uint8), group=comm._group)

    calls: dict[str, Callable[[], Any]] = {
        "all-gather of 256 bytes (sum, broadcast, check before)": ring,
        "sum": lambda: comm.sum([1.0], "a sum"),
        "broadcast of a text": lambda: comm.broadcast_object("text", "a text"),
        "gather of a number": lambda: comm.gather(1, "a number"),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            comm.check_place("a round")
            begin = time.perf_counter()
            call()
            times[name].append(1000 * (time.perf_counter() - begin))
    stack.close()
    return {name: median(found) for name, found in times.items()}


def table() -> list[str]:
    """Rows of markdown for 2, 4 and 8 processes."""
    by_size = {size: ts.launch(on_a_rank, nproc=size, timeout_s=300)[0] for size in (2, 4, 8)}
    rows = ["| ms, median of 30 | 2 processes | 4 | 8 |", "|---|---|---|---|"]
    rows += [f"| {name} | " + " | ".join(f"{by_size[n][name]:.2f}" for n in by_size) + " |" for name in by_size[2]]
    return rows
