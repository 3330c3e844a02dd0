"""Finding the checkpoint to go on from: the newest, the best, or the one that is named."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from trainstack.checkpointing import pointers
from trainstack.checkpointing.arguments import DefaultCheckpointerArguments
from trainstack.checkpointing.checkpoint import Checkpoint
from trainstack.checkpointing.directory import has_its_files, is_checkpoint_directory
from trainstack.checkpointing.monitoring import Monitor
from trainstack.checkpointing.newest import of_prefix, of_run, other_names, read_newest
from trainstack.checkpointing.reading import read_checkpoint
from trainstack.errors import CheckpointDamagedError, CheckpointNotFoundError, ConfigurationError


class Finder:
    """Looks where the arguments of a `DefaultCheckpointer` say.

    Args:
        args: of the checkpointer.
        load_dir: where to look for what is not named, if the run has saved nothing in `save_dir` yet.
        save_dir: what is in here must not be about to be deleted.
        log: takes a level of the logging module and a line.

    Attributes:
        found_in: the directory of the checkpoint that was loaded last; None before.
    """

    def __init__(
        self, args: DefaultCheckpointerArguments, load_dir: Path, save_dir: Path, log: Callable[[int, str], None]
    ) -> None:
        self.args, self._load_dir, self._save_dir, self._log = args, load_dir, save_dir, log
        self.found_in: Path | None = None

    def load(self, resume: bool | str | os.PathLike[str] | None) -> Checkpoint:
        """What `DefaultCheckpointer.load` returns."""
        if resume is None or resume is False:
            configured = self.args.load_dir or self.args.load_filename
            return self._load_configured(required=True) if configured else Checkpoint()
        if resume is True or resume in ("auto", "last", "best"):
            monitor = self.args.monitored if resume == "best" else None
            found = self._load_own(monitor)
            if found is not None:
                return found
            if monitor is not None:
                return self._load_best(self._load_dir, self.args.file_prefix, monitor)
            return self._load_configured(required=resume != "auto")
        if resume == "" or isinstance(resume, int):
            raise ConfigurationError(
                f"resume={resume!r}: write True, False, 'auto', 'last', 'best' or the path of a checkpoint."
            )
        path = Path(resume).absolute()
        rule = pointers.rule_at(path, self.args)
        if rule is not None:
            directory, prefix = path.parent, rule.file_prefix
            return (
                self._load_newest(directory, required=True, prefix=prefix)
                if rule.monitor is None
                else self._load_best(directory, prefix, rule.monitor)
            )
        if not path.is_dir() or is_checkpoint_directory(path):
            return self._load_named(path)
        return self._load_newest(folder_at(path, self.args.file_prefix), required=True)

    def _load_own(self, monitor: Monitor | None) -> Checkpoint | None:
        """The newest or best that a run which began from another directory has saved itself; None if there is none."""
        elsewhere = (self._load_dir / self.args.load_filename).parent if self.args.load_filename else self._load_dir
        if elsewhere.resolve() == self._save_dir.resolve():
            return None
        self._refuse_deleting(self._save_dir)
        found = read_newest(self._save_dir, self.args.file_prefix, self._warn_of_damage, monitor)
        return None if found is None else self._loaded(*found)

    def _load_configured(self, required: bool) -> Checkpoint:
        args, directory = self.args, self._load_dir
        if not args.load_filename:
            return self._load_newest(directory, required)
        path = directory / args.load_filename
        return self._load_named(path) if required or path.exists() else Checkpoint()

    def _load_named(self, path: Path) -> Checkpoint:
        self._refuse_deleting(path.parent)
        return self._loaded(path, read_checkpoint(path))

    def _load_best(self, directory: Path, prefix: str, monitor: Monitor) -> Checkpoint:
        self._refuse_deleting(directory)
        found = read_newest(directory, prefix, self._warn_of_damage, monitor)
        if found is not None:
            return self._loaded(*found)
        candidates = of_run(directory, prefix)
        if not candidates:
            return self._load_newest(directory, required=True, prefix=prefix)  # which says why there is none
        known = ", ".join(sorted({name for info in candidates for name in info.metrics})) or "none"
        raise CheckpointNotFoundError(
            f"none of the {len(candidates)} checkpoints in {directory} has a finite value of {monitor.name!r}, so none "
            f"is the best. Metrics in them: {known}. Set monitor to one of those, or write resume=True for the newest."
        )

    def _load_newest(self, directory: Path, required: bool, prefix: str | None = None) -> Checkpoint:
        self._refuse_deleting(directory)
        prefix = self.args.file_prefix if prefix is None else prefix
        found = read_newest(directory, prefix, self._warn_of_damage)
        if found is not None:
            return self._loaded(*found)
        others = other_names(directory, prefix)
        hint = f" There is {others[0]!r}: set file_prefix to match, or name it to load it." if others else ""
        earlier = of_prefix(directory, prefix)
        if earlier:
            hint = (
                " The last run there began afresh and was interrupted before its first checkpoint. To go on from an "
                f"earlier run, name its checkpoint: resume={str(earlier[0].path)!r}."
            )
        usual = prefix == type(self.args)().file_prefix
        what = f"no checkpoint{'' if usual else f' with the file_prefix {prefix!r}'} in {directory}"
        if required:
            absent = "" if directory.is_dir() else ", which does not exist"
            raise CheckpointNotFoundError(
                f"{what}{absent}.{hint} To start afresh when there is none, write resume='auto'"
                f"{' and leave load_dir unset' if self.args.load_dir else ''}."
            )
        self._log(logging.WARNING if others else logging.INFO, f"{what}: starting afresh.{hint}")
        return Checkpoint()

    def _loaded(self, path: Path, checkpoint: Checkpoint) -> Checkpoint:
        self.found_in = path.parent
        self._log(logging.INFO, f"loaded {path}")
        return checkpoint

    def _refuse_deleting(self, directory: Path) -> None:
        if self.args.delete_existing_checkpoints and directory.resolve() == self._save_dir.resolve():
            raise ConfigurationError(
                f"delete_existing_checkpoints=True would delete what is to be loaded from {directory}. "
                "Write delete_existing_checkpoints=False to resume, or resume=False to start over."
            )

    def _warn_of_damage(self, error: CheckpointDamagedError) -> None:
        self._log(logging.WARNING, f"passing over a damaged checkpoint: {error}")


def folder_at(path: Path, prefix: str) -> Path:
    """`path`, or where a run with this `output_dir` keeps its checkpoints, if there are none in `path` itself."""
    within = path / "checkpoints"
    return within if within.is_dir() and not of_prefix(path, prefix) else path


def follow(path: Path) -> Path:
    """`path`, or the checkpoint that it stands for if it is a file `last` or `best`.

    Raises:
        CheckpointNotFoundError: it is, and there is no such checkpoint any more.
    """
    rule = pointers.rule_in(path)
    if rule is None:
        return path
    run = of_run(path.parent, rule.file_prefix)
    found = next(filter(has_its_files, run if rule.monitor is None else rule.monitor.rank(run)), None)
    if found is None:
        which = "newest" if rule.monitor is None else f"best by {rule.monitor.name!r}"
        raise CheckpointNotFoundError(
            f"{path} stands for the {which} of the checkpoints beside it, and there is none. Name another checkpoint."
        )
    return found.path
