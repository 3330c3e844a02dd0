"""Finding and reading the newest intact checkpoint of a directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainstack.checkpointing import began
from trainstack.checkpointing.checkpoint import Checkpoint
from trainstack.checkpointing.directory import CheckpointInfo, has_prefix, name_of, scan
from trainstack.checkpointing.monitoring import Monitor
from trainstack.checkpointing.reading import read_checkpoint
from trainstack.errors import CheckpointDamagedError


def read_newest(
    directory: Path,
    prefix: str,
    skipped: Callable[[CheckpointDamagedError], None],
    monitor: Monitor | None = None,
) -> tuple[Path, Checkpoint] | None:
    """Return the run's intact checkpoint that was written last, whatever its step, or None if there is none.

    Args:
        directory: where to look; it may be absent.
        prefix: only checkpoints that a checkpointer with this `file_prefix` names.
        skipped: called with the error of each damaged checkpoint, before an older one is tried.
        monitor: return the best by this instead; None also if none has a value of it.

    Raises:
        CheckpointDamagedError: there are checkpoints, and all are damaged.
        CheckpointMismatchError: one was written by a newer trainstack, so it may be the newest.
    """
    contents = scan(directory)
    for path, mismatch in contents.newer.items():
        if has_prefix(name_of(path), prefix):
            raise mismatch
    broken = [error for path, error in contents.broken.items() if has_prefix(name_of(path), prefix)]
    candidates = of_run(directory, prefix)
    if monitor is not None:
        candidates = monitor.rank(candidates)
    for error in broken:
        skipped(error)
    if not candidates and (monitor is not None or not broken):
        return None
    for info in candidates:
        try:
            return info.path, read_checkpoint(info.path)
        except CheckpointDamagedError as error:
            skipped(error)
            broken.append(error)
    details = "\n".join(f"  - {error}" for error in broken)
    raise CheckpointDamagedError(
        f"every {'' if monitor is None else 'ranked '}checkpoint in {directory} is damaged:\n{details}\n"
        "Restore one from a backup, or set another save_dir to start afresh."
    )


def of_prefix(directory: Path, prefix: str) -> list[CheckpointInfo]:
    """Return the checkpoints in `directory` with this prefix whose manifest is intact, newest first."""
    intact = scan(directory).intact
    return [info for info in intact if info.kind == "checkpoint" and has_prefix(info.name, prefix)]


def of_run(directory: Path, prefix: str, unreadable: int = -1) -> list[CheckpointInfo]:
    """Return those of `of_prefix` that no earlier run has written; `unreadable` as for `began.read`."""
    after = began.read(directory, prefix, unreadable)
    return [info for info in of_prefix(directory, prefix) if info.sequence > after]


def other_names(directory: Path, prefix: str) -> list[str]:
    """Return the names of the checkpoints in `directory` that belong to other prefixes, newest first."""
    intact = scan(directory).intact
    return [info.name for info in intact if info.kind == "checkpoint" and not has_prefix(info.name, prefix)]
