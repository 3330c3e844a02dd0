"""Step logs that are written without a training."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from trainstack.step_log import ENTRY, Start, log_path
from trainstack.step_log.blocks import read_blocks
from trainstack.step_log.format import Flag, Kind, pack_details, to_json
from trainstack.trainer.recording.log_file import LogFile


def append(
    run: Path,
    *blocks: tuple[Kind, bytes],
    rank: int = 0,
    resumed: int = 0,
    size: int = 1,
    head: str | None = None,
) -> str:
    """A segment that begins after step `resumed` with these blocks; returns the chain, in hexadecimal digits."""
    file = LogFile(log_path(run, rank))
    start = Start(
        number=file.segments,
        run_id="run",
        rank=rank,
        world_size=size,
        backend="sp",
        resumed_step=resumed,
        mode="steps",
        parameters=["w"],
        generators=["torch"],
        resumed_head=head,
        cut=file.cut,
    )
    with closing(file):
        file.append((Kind.START, to_json(asdict(start))), *blocks)
    return file.chain.hex()


def steps(first: int, last: int, **changes: Any) -> np.ndarray[Any, Any]:
    """Entries of the steps from `first` to `last`; `changes` replace columns."""
    entries = np.zeros(last - first + 1, ENTRY)
    entries["step"] = np.arange(first, last + 1)
    entries["flags"] = Flag.NORM | Flag.SAMPLES
    entries["loss"] = 1 / entries["step"]
    entries["norm"] = 2 / entries["step"]
    entries["samples"] = entries["step"] * 7919
    entries["rates"] = 11
    for name, value in changes.items():
        entries[name] = value
    return entries


def write(run: Path, *spans: tuple[int, int], details: tuple[int, ...] = (), **start: Any) -> str:
    """A segment with the steps from the first to the last of each of `spans`, and details of some; as `append`."""
    blocks = list[tuple[Kind, bytes]]()
    for first, last in spans:
        blocks.append((Kind.STEPS, steps(first, last).tobytes()))
        within = (step for step in details if first <= step <= last)
        blocks += ((Kind.DETAILS, pack_details(step, step + 100, [step + 200])) for step in within)
    return append(run, *blocks, **start)


def block_ends(path: Path) -> list[int]:
    """Where each block ends in the file."""
    return [block.end for block in read_blocks(path)]
