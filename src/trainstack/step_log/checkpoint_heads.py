"""Comparison of the step logs of a run with the heads that its checkpoints have recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainstack.checkpointing.directory import list_checkpoints, read_manifest
from trainstack.checkpointing.manifest import decode_plain
from trainstack.errors import CheckpointError
from trainstack.step_log.format import FOLDER
from trainstack.step_log.reading import read_step_log

KEY = FOLDER
"""The key of the heads of the step logs in a checkpoint's metadata: for each rank the chain, in hexadecimal digits,
after the last block before the checkpoint; None for a rank without a log."""


def heads_in(metadata: Any) -> list[str | None]:
    """The heads of the step logs by rank in the metadata of a checkpoint; empty without this entry."""
    heads = metadata.get(KEY) if isinstance(metadata, dict) else None
    return [head if isinstance(head, str) else None for head in heads] if isinstance(heads, list) else []


def contradicting_checkpoints(run: Path, checkpoints: Path | None = None) -> list[str]:
    """The checkpoints that have recorded blocks which the step logs of a run lack, as sentences.

    A log that was truncated or written again contradicts the checkpoints of the run in this way.

    Args:
        run: the folder of the run.
        checkpoints: the folder of its checkpoints, if that is elsewhere.
    """
    folder = run / "checkpoints" if checkpoints is None else checkpoints
    known = dict[int, set[str]]()
    found = list[str]()
    for info in list_checkpoints(folder) if folder.is_dir() else ():
        if info.kind != "checkpoint":
            continue
        for rank, head in enumerate(heads_in(decode_plain(read_manifest(info.path).metadata))):
            if rank not in known:
                known[rank] = _heads(run, rank)
            if head is not None and head not in known[rank]:
                found.append(
                    f"the step log of rank {rank} lacks blocks that it had when checkpoint {info.name} (global step "
                    f"{info.global_step}) was taken: it was changed or cut since"
                )
    return found


def _heads(run: Path, rank: int) -> set[str]:
    try:
        return set(read_step_log(run, rank).heads)
    except CheckpointError:
        return set()
