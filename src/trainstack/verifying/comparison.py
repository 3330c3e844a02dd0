"""Comparison of the checkpoints of two trainings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainstack.checkpointing import CheckpointInfo, list_checkpoints
from trainstack.checkpointing.difference import Difference, differences
from trainstack.checkpointing.reading import read_states


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The place where two trainings diverge.

    Attributes:
        difference: the first tensor that differs at the end with the size of the difference, or else the first value.
        same_at: the last global step whose checkpoints agree in every bit; 0 if none do.
        diverged_at: the first later step whose checkpoints differ.
    """

    difference: str
    same_at: int
    diverged_at: int


def checkpoints_of(place: Path) -> list[CheckpointInfo]:
    """The checkpoints of a training in `place`, oldest first."""
    return [info for info in list_checkpoints(place / "checkpoints") if info.kind == "checkpoint"]


def compare(one: Path, other: Path) -> Divergence | None:
    """Compare the last checkpoints of two trainings; None if every bit agrees."""
    mine, theirs = checkpoints_of(one), checkpoints_of(other)
    found = _between(mine[-1], theirs[-1])
    if not found:
        return None
    first = next((row for row in found if row.elements is not None), found[0])
    more = f"; {len(found) - 1} more differ" if len(found) > 1 else ""
    same_at, left = 0, {info.global_step: info for info in theirs}
    for info in mine[:-1]:
        if info.global_step in left and _between(info, left[info.global_step]):
            return Divergence(difference=f"{first}{more}", same_at=same_at, diverged_at=info.global_step or 0)
        same_at = info.global_step or 0 if info.global_step in left else same_at
    return Divergence(difference=f"{first}{more}", same_at=same_at, diverged_at=mine[-1].global_step or 0)


def _between(one: CheckpointInfo, other: CheckpointInfo) -> list[Difference]:
    return list(differences(read_states(one.path)[1], read_states(other.path)[1]))
