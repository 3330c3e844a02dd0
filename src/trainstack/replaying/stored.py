"""Comparison of the checkpoints of a run with those of its replay, after checking that they are intact."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainstack._files import read_small
from trainstack.checkpointing import CheckpointInfo
from trainstack.checkpointing.checksums import digest
from trainstack.checkpointing.difference import Difference, differences
from trainstack.checkpointing.manifest import FILE_NAME
from trainstack.checkpointing.reading import read_states
from trainstack.errors import CheckpointError
from trainstack.step_log import CheckpointNote
from trainstack.verifying.comparison import checkpoints_of


@dataclass(slots=True, kw_only=True)
class StoredStates:
    """The result of a comparison of checkpoints.

    Attributes:
        same: the steps whose checkpoints have the same bits.
        first: the first step whose checkpoints differ, with the first parameter that differs, or else the first place;
            None if none do.
        damaged: the damage of stored checkpoints, as text.
    """

    same: list[int] = field(default_factory=list)
    first: tuple[int, Difference] | None = None
    damaged: list[str] = field(default_factory=list)


def contradiction(info: CheckpointInfo, notes: Iterable[CheckpointNote]) -> str | None:
    """The reason why a stored checkpoint is not the one that the step log names, as text; None if it may be.

    Only the manifest is hashed, because it contains the hashes of all files.
    """
    known = {note.manifest for note in notes if note.step == info.global_step and note.name == info.name}
    known.discard(None)
    if known and digest(read_small(info.path / FILE_NAME)) not in known:
        return f"{info.name} is not the checkpoint that the step log names: its manifest has another hash"
    return None


def compare_checkpoints(
    stored: Sequence[CheckpointInfo], scratch: Path, notes: Sequence[CheckpointNote]
) -> StoredStates:
    """Compare the checkpoints of a replay in `scratch` with those of the run, in the order of steps."""
    found = StoredStates()
    made = {info.global_step: info for info in checkpoints_of(scratch)} if (scratch / "checkpoints").is_dir() else {}
    for info in stored:
        step = info.global_step or 0
        problem = contradiction(info, notes)
        if problem is not None:
            found.damaged.append(problem)
        if step not in made:
            continue
        try:
            rows = list(differences(read_states(info.path)[1], read_states(made[step].path)[1]))
        except CheckpointError as error:
            found.damaged.append(str(error))
            continue
        if not rows:
            found.same.append(step)
        elif found.first is None:
            found.first = (step, first_of(rows))
    return found


def first_of(rows: Sequence[Difference]) -> Difference:
    """The first parameter among differing places, or else the first tensor, or else the first place."""
    for choice in (_is_parameter, lambda row: row.elements is not None):
        chosen = next((row for row in rows if choice(row)), None)
        if chosen is not None:
            return chosen
    return rows[0]


def _is_parameter(row: Difference) -> bool:
    return row.elements is not None and row.where.startswith("module_interface_state")


def quantity_of(row: Difference) -> str:
    """The quantity of a step to which a differing place of its checkpoint belongs."""
    if "rng_state" in row.where.partition(".")[0]:
        return "random state"
    return "optimizer" if row.where.startswith(("module_interface_state", "trainer_state")) else "other state"
