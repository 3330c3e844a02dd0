"""The checkpointer that the trainer uses unless it is given another: directories on a file system."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainstack.checkpointing import began, leftovers, pointers, retention
from trainstack.checkpointing.abstract import AbstractCheckpointer
from trainstack.checkpointing.arguments import DefaultCheckpointerArguments
from trainstack.checkpointing.background import BackgroundWriter
from trainstack.checkpointing.buffers import HostBuffers
from trainstack.checkpointing.checkpoint import Checkpoint
from trainstack.checkpointing.committing import Payload, commit
from trainstack.checkpointing.directory import CheckpointInfo, has_prefix, is_checkpoint_directory, name_of, scan
from trainstack.checkpointing.monitoring import DEFAULT_MONITOR, Monitor
from trainstack.checkpointing.newest import of_prefix, of_run, other_names, read_newest
from trainstack.checkpointing.reading import read_checkpoint
from trainstack.checkpointing.writing import pack, write_model
from trainstack.errors import CheckpointDamagedError, CheckpointNotFoundError, ConfigurationError

_DEFAULT_DIRECTORY = "checkpoints"
_logger = logging.getLogger("trainstack")


class DefaultCheckpointer(AbstractCheckpointer):
    """Keeps each checkpoint as a directory that is complete or does not exist.

    Only one process of a training may save; any number may load. Building one touches no file.
    """

    def __init__(self, args: DefaultCheckpointerArguments | None = None) -> None:
        self.args = args or DefaultCheckpointerArguments()
        self._directories: dict[str, Path] = {}
        self._prepared: set[Path] = set()
        self._background, self._buffers = BackgroundWriter(), HostBuffers()
        self._loaded_from: Path | None = None
        self._missed = False

    @property
    def every_n_steps(self) -> int | float | None:
        """`args.every_n_steps`, or None when nothing is to be saved at all."""
        return self.args.every_n_steps if self.args.checkpoint else None

    @property
    def save_dir(self) -> Path:
        """Where checkpoints go; settled, as an absolute path, when it is first asked for."""
        return self._settle("save_dir", self.args.save_dir or _DEFAULT_DIRECTORY)

    @property
    def model_state_save_dir(self) -> Path:
        """Where model exports go."""
        return self._settle("model_state_save_dir", self.args.model_state_save_dir or self.save_dir)

    def prepare(self) -> None:
        """Clear what dead writers left, and delete the existing checkpoints if the arguments say so.

        Runs once, by itself before the first save. Only directories with an intact manifest, of kind
        "checkpoint" and with this `file_prefix`, are deleted.
        """
        if self._clear(self.save_dir) and self.args.delete_existing_checkpoints:
            self._delete_existing()

    def begin_run(self, *, resumed: bool) -> None:
        """Remember, when a run begins afresh or from another directory, which checkpoints are an earlier run's.

        They stay where they are and can be named, but are not "the newest" of this run, and it never deletes them: it
        may be interrupted before its first checkpoint, and must not go on from another run's.
        """
        elsewhere = self._loaded_from is not None and self._loaded_from.resolve() != self.save_dir.resolve()
        begins = self.args.checkpoint and (elsewhere or not resumed)
        earlier = of_prefix(self.save_dir, self.args.file_prefix) if begins else []
        if earlier:
            began.mark(self.save_dir, self.args.file_prefix, earlier[0].sequence)
            retention.after_save(self.save_dir, self.args, self._log)

    def last(self) -> CheckpointInfo | None:
        """The newest checkpoint of this run in `save_dir` whose files are there in their sizes, or None."""
        return retention.newest_of(of_run(self.save_dir, self.args.file_prefix))

    def best(self) -> CheckpointInfo | None:
        """The one with the best finite value of `args.monitor`, or None; read from manifests alone."""
        return retention.best_of(of_run(self.save_dir, self.args.file_prefix), self.args)

    def is_due(self, index: int, force: bool) -> bool:
        """Whether it is the turn of `index`, or out of turn but asked for, and saving is on at all."""
        return self.args.checkpoint and (force or index % self.args.epochs_between == 0)

    def save(self, checkpoint_state: Checkpoint, index: int, force: bool = False) -> str | None:
        """Write `checkpoint_state` if it is its turn, replacing one of the same name.

        The name is made of the prefix and the global step, or the index if the step is not known.
        Returns once everything is on the disk; with `async_save` once the state is copied, after waiting for the
        save before. A failure in the background is raised by `poll`, `finish`, or the next save or load.
        """
        if not self.is_due(index, force):
            return None
        self._wait_for_last()
        self.prepare()
        step = checkpoint_state.global_step
        number = f"{index:06d}" if step is None else f"{step:09d}"
        name = self._name(number)
        payload = pack(retention.keep_pin(checkpoint_state, self.save_dir / name, self.args.file_prefix))
        if not force:
            self._miss_monitor(checkpoint_state)
        if self.args.async_save:
            copy = payload.copied_into(self._buffers)
            self._background.start(f"saving {name}", lambda abandoned: self._commit(copy, name, abandoned))
        else:
            self._commit(payload, name)
        return str(self.save_dir / name)

    def _commit(self, payload: Payload, name: str, abandoned: threading.Event | None = None) -> None:
        """Write a checkpoint, and do what is to be done after each; in the background with `async_save`."""
        try:
            path = commit(payload, self.save_dir, name, abandoned)
            self._log(logging.INFO, f"saved {path}")
            retention.after_save(self.save_dir, self.args, self._log)
        except BaseException as error:
            if abandoned is not None:  # perhaps nobody asks any more
                self._log(logging.ERROR, f"saving {name} in the background failed: {error}")
            raise

    def _wait_for_last(self) -> None:
        """Wait for a save in the background, and say how long that took."""
        began, busy = time.perf_counter(), self._background.is_busy
        self._background.wait()
        if busy:
            self._log(logging.INFO, f"waited {time.perf_counter() - began:.2f} s for the save before")

    def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake` from the writing thread when a save in the background has failed."""
        self._background.wake = wake

    def poll(self) -> None:
        """Raise what a save in the background has failed with."""
        self._background.poll()

    def finish(self) -> None:
        """Wait until everything is on the disk, and give the memory for copies back."""
        try:
            self._background.wait()
        finally:
            self._buffers.release()

    def abandon(self) -> None:
        """Stop writing; the unfinished directory is deleted, or never read."""
        self._background.abandon()

    def save_model(self, model_state: dict[str, Any], index: int) -> str | None:
        """Write an export of `model_state`; `load` never takes it for a point to resume from."""
        if not self.args.checkpoint:
            return None
        self._wait_for_last()
        directory = self.model_state_save_dir
        self._clear(directory) if directory != self.save_dir else self.prepare()
        path = write_model(model_state, directory, self._name(f"model-{index:06d}"), {"index": index})
        self._log(logging.INFO, f"saved {path}")
        return str(path)

    def load(self, resume: bool | str | os.PathLike[str] | None = None) -> Checkpoint:
        """Return the state to continue from; see `AbstractCheckpointer.load`.

        The newest checkpoint is the one written last, whatever its step. When it is picked, damaged
        ones are logged as warnings and passed over; if all are damaged, that is an error, also for
        `"auto"`. One that is named is loaded or refused. Other checkpointers' prefixes do not count.

        Raises:
            CheckpointNotFoundError, CheckpointDamagedError: as described there.
            CheckpointMismatchError: a model export, a single file, or of a newer trainstack.
            ConfigurationError: `resume` is none of these, or `delete_existing_checkpoints` would
                delete what is to be loaded.
        """
        self._background.wait()
        if resume is None or resume is False:
            configured = self.args.load_dir or self.args.load_filename
            return self._load_configured(required=True) if configured else Checkpoint()
        if resume is True or resume in ("auto", "last"):
            return self._load_configured(required=resume != "auto")
        if resume == "best":
            return self._load_best(self._load_directory(), self.args.file_prefix, self.args.monitored)
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
        return self._load_newest(path, required=True) if _holds_many(path) else self._load_named(path)

    def _load_directory(self) -> Path:
        return self._settle("load_dir", self.args.load_dir) if self.args.load_dir else self.save_dir

    def _load_configured(self, required: bool) -> Checkpoint:
        args, directory = self.args, self._load_directory()
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
        self._loaded_from = path.parent
        self._log(logging.INFO, f"loaded {path}")
        return checkpoint

    def _miss_monitor(self, checkpoint: Checkpoint) -> None:
        """Say once that a checkpoint cannot be the best, where somebody asked for the best."""
        args, metrics = self.args, (checkpoint.metadata or {}).get("metrics", {})
        asked = args.keep_best or args.monitor != DEFAULT_MONITOR
        if asked and not self._missed and args.monitor not in metrics:
            self._missed = True
            self._log(
                logging.WARNING,
                f"{args.monitor!r} was not measured at global step {checkpoint.global_step}, so the checkpoint cannot "
                f"be the best. Measured there: {', '.join(sorted(metrics)) or 'nothing'}. Set monitor to one of "
                "those, or log it after each epoch.",
            )

    def _refuse_deleting(self, directory: Path) -> None:
        if self.args.delete_existing_checkpoints and directory.resolve() == self.save_dir.resolve():
            raise ConfigurationError(
                f"delete_existing_checkpoints=True would delete what is to be loaded from {directory}. "
                "Write delete_existing_checkpoints=False to resume, or resume=False to start afresh."
            )

    def _delete_existing(self) -> None:
        prefix = self.args.file_prefix
        for info in scan(self.save_dir).intact:
            ours = has_prefix(info.name, prefix) and has_prefix(name_of(info.path), prefix)
            if info.kind == "checkpoint" and ours and not info.path.is_symlink():
                leftovers.discard(info.path)
                self._log(logging.INFO, f"deleted {info.path}")

    def _clear(self, directory: Path) -> bool:
        """Clear `directory` of leftovers; return False if that was done before."""
        if directory in self._prepared:
            return False
        self._prepared.add(directory)
        leftovers.clear(directory)
        return True

    def _settle(self, field: str, value: str | os.PathLike[str]) -> Path:
        return self._directories.setdefault(field, Path(value).absolute())

    def _name(self, number: str) -> str:
        name = f"{self.args.file_prefix}-{number}"
        return f"{name}.{self.args.file_ext}" if self.args.file_ext else name

    def _warn_of_damage(self, error: CheckpointDamagedError) -> None:
        self._log(logging.WARNING, f"passing over a damaged checkpoint: {error}")

    def _log(self, level: int, message: str) -> None:
        if level >= self.args.level:
            _logger.log(level, message)


def _holds_many(path: Path) -> bool:
    return path.is_dir() and not is_checkpoint_directory(path)
