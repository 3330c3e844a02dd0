"""Deletion of checkpoints that need not be kept.

Everything is derived from the manifests on the disk, so it does not matter which process wrote them, or how often
the training was interrupted in between.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

from trainstack.checkpointing import temp_dirs
from trainstack.checkpointing.abstract import Checkpoint
from trainstack.checkpointing.arguments import DefaultCheckpointerArguments
from trainstack.checkpointing.directory import CheckpointInfo, has_its_files, info_of, read_manifest
from trainstack.checkpointing.lookup import checkpoints_of_run, refresh_pointers
from trainstack.errors import CheckpointDamagedError, CheckpointMismatchError

LogFn = Callable[[int, str], None]


def apply_retention(directory: Path, args: DefaultCheckpointerArguments, say: LogFn) -> None:
    """Set the pointers of `directory`, and delete the checkpoints that `args` does not want to keep.

    A failure is said and is no error: the checkpoint that was just written is safe.

    Args:
        directory: where checkpoints were saved; the newest is durable.
        args: which are to be kept.
        say: takes a level of the logging module and a line.
    """
    try:
        doomed = to_delete(directory, args)
        kept = [info for info in checkpoints_of_run(directory, args.file_prefix) if info not in doomed]
        refresh_pointers(directory, args, newest_of(kept), best_of(kept, args), say)
    except OSError as error:
        say(logging.WARNING, f"{directory} could not be read, so no older checkpoint was deleted: {error}")
        return
    for info in doomed:
        try:
            temp_dirs.discard_dir(info.path)
            say(logging.INFO, f"deleted {info.path}")
        except OSError as error:
            say(logging.WARNING, f"{info.path} is no longer needed and could not be deleted: {error}")


def to_delete(directory: Path, args: DefaultCheckpointerArguments) -> list[CheckpointInfo]:
    """The checkpoints to delete: neither among the newest nor among the best.

    Only intact ones count as kept, so an intact one always remains. Never among them: those of an earlier run (nor
    any, while it cannot be told which those are), of other prefixes, pinned, renamed, linked or damaged ones, and
    model exports.
    """
    if args.keep_last is None:
        return []
    run = checkpoints_of_run(directory, args.file_prefix, unreadable=sys.maxsize)
    ours = [info for info in run if not info.pinned and info.path.name == info.name and not info.path.is_symlink()]
    kept = [*_first(args.keep_last, ours), *_first(args.keep_best, args.monitored.rank(ours))]
    return [info for info in ours if info not in kept and has_its_files(info)]


def newest_of(infos: Iterable[CheckpointInfo]) -> CheckpointInfo | None:
    """The first of `infos`, which are newest first, whose files are there."""
    return next(iter(_first(1, infos)), None)


def best_of(infos: Iterable[CheckpointInfo], args: DefaultCheckpointerArguments) -> CheckpointInfo | None:
    """The best of `infos` whose files are there; None if no value is finite."""
    return next(iter(_first(1, args.monitored.rank(infos))), None)


def preserve_pin(checkpoint: Checkpoint, path: Path, prefix: str) -> Checkpoint:
    """`checkpoint`, pinned if it replaces a pinned one of the same run at `path`: the same step, saved again."""
    try:
        before = info_of(path, read_manifest(path))
    except (OSError, CheckpointDamagedError, CheckpointMismatchError):
        return checkpoint
    if not before.pinned or before not in checkpoints_of_run(path.parent, prefix):
        return checkpoint
    return dataclasses.replace(checkpoint, metadata={**(checkpoint.metadata or {}), "pinned": True})


def _first(count: int, infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    return list(islice((info for info in infos if has_its_files(info)), count))
