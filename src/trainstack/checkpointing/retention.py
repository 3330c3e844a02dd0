"""Deletion of checkpoints that need not be kept.

All decisions use the manifests on the disk, so they do not depend on the processes that wrote them, or on interruptions
of the training.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from trainstack.checkpointing import temp_dirs
from trainstack.checkpointing.abstract import Checkpoint
from trainstack.checkpointing.arguments import DefaultCheckpointerArguments
from trainstack.checkpointing.directory import CheckpointInfo, Contents, has_its_files, read_entry, version_of
from trainstack.checkpointing.lookup import refresh_pointers
from trainstack.checkpointing.manifest import FILE_NAME as MANIFEST
from trainstack.checkpointing.verification import checkpoints_of_run, of_run, read_back

LogFn = Callable[[int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The rule for the checkpoints that a directory keeps.

    Attributes:
        directory: the directory of checkpoints.
        args: the number of checkpoints to keep.
        say: takes a level of the logging module and a line.
        verify_owner: raises if this process may no longer write to the directory.
    """

    directory: Path
    args: DefaultCheckpointerArguments
    say: LogFn
    verify_owner: Callable[[], None]

    @property
    def reads_back(self) -> bool:
        """Whether checkpoints may have to be read from the disk, which takes as long as writing them."""
        return self.args.keep_last is not None and self.args.verify == "read_back"

    def apply(self, contents: Contents) -> None:
        """Update the pointers, and delete the checkpoints in `contents` that need not be kept.

        A failure is logged and does not raise, because the new checkpoint is safe.

        Raises:
            LeaseError: another process has acquired the directory. Nothing that it needs is deleted.
        """
        try:
            run = of_run(contents, self.args.file_prefix)
            doomed = self.to_delete(run)
            self.verify_owner()
            deleted = set(doomed)
            kept = [info for info in run if info not in deleted]
            refresh_pointers(self.directory, self.args, newest_of(kept), best_of(kept, self.args), self.say)
        except OSError as error:
            self.say(
                logging.WARNING, f"{self.directory} could not be read, so no older checkpoint was deleted: {error}"
            )
            return
        for info in doomed:
            try:
                self.verify_owner()
                temp_dirs.discard_dir(info.path)
                _verified.pop(info.path, None)
                self.say(logging.INFO, f"deleted {info.path}")
            except OSError as error:
                self.say(logging.WARNING, f"{info.path} is no longer needed and could not be deleted: {error}")

    def to_delete(self, run: list[CheckpointInfo]) -> list[CheckpointInfo]:
        """The checkpoints of `run` to delete: neither among the newest nor among the best.

        Only intact ones count as kept, so an intact one always remains. Pinned, renamed, linked or damaged ones are
        never deleted.
        """
        if self.args.keep_last is None:
            return []
        ours = [info for info in run if not info.pinned and info.path.name == info.name and not info.path.is_symlink()]
        doomed = self._beyond(ours, has_its_files)
        if doomed and self.reads_back:  # reading all bytes is slow, so only if something is to be deleted
            doomed = self._beyond(ours, self._is_intact)
        return [info for info in doomed if has_its_files(info) and info not in _damaged]

    def _beyond(self, ours: list[CheckpointInfo], counts: Callable[[CheckpointInfo], bool]) -> list[CheckpointInfo]:
        args = self.args
        kept = {*_first(args.keep_last or 0, ours, counts), *_first(args.keep_best, args.monitored.rank(ours), counts)}
        return [info for info in ours if info not in kept]

    def _is_intact(self, info: CheckpointInfo) -> bool:
        problem = verify_once(info.path)
        if problem is not None and info not in _damaged:
            _damaged.add(info)
            self.say(logging.WARNING, f"a checkpoint is damaged, so an older one is kept in its place: {problem}")
        return problem is None


_verified: dict[Path, tuple[tuple[int, ...], str | None]] = {}
"""Inode, size and times of the manifests of checkpoints that were read, and the damage that was found."""

_damaged: set[CheckpointInfo] = set()
"""Checkpoints with a warning, so that each is warned of once."""


def verify_once(path: Path) -> str | None:
    """The damage of the checkpoint at `path`, or None. Reads it from the disk, once in a process."""
    try:
        mark = version_of(os.stat(path / MANIFEST))
    except OSError as error:
        return str(error)
    known = _verified.get(path)
    if known is None or known[0] != mark:
        known = _verified[path] = mark, read_back(path)
    return known[1]


def note_verified(path: Path, problem: str | None) -> None:
    """Record for `verify_once` the result of another reading of the checkpoint at `path`."""
    with suppress(OSError):
        _verified[path] = version_of(os.stat(path / MANIFEST)), problem


def newest_of(infos: Iterable[CheckpointInfo]) -> CheckpointInfo | None:
    """The first of `infos`, which are newest first, whose files exist."""
    return next(iter(_first(1, infos, has_its_files)), None)


def best_of(infos: Iterable[CheckpointInfo], args: DefaultCheckpointerArguments) -> CheckpointInfo | None:
    """The best of `infos` whose files exist; None if no value is finite."""
    return next(iter(_first(1, args.monitored.rank(infos), has_its_files)), None)


def preserve_pin(checkpoint: Checkpoint, path: Path, prefix: str) -> Checkpoint:
    """`checkpoint`, pinned if it replaces a pinned one of the same run at `path`, that is, of the same step."""
    before = read_entry(path)
    if not isinstance(before, CheckpointInfo) or not before.pinned:
        return checkpoint
    if before not in checkpoints_of_run(path.parent, prefix):
        return checkpoint
    return dataclasses.replace(checkpoint, metadata={**(checkpoint.metadata or {}), "pinned": True})


def _first(
    count: int, infos: Iterable[CheckpointInfo], counts: Callable[[CheckpointInfo], bool]
) -> list[CheckpointInfo]:
    return list(islice((info for info in infos if counts(info)), count))
