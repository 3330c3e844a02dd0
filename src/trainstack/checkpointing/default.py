"""The checkpointer that the trainer uses unless it is given another: directories on a file system."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from trainstack.checkpointing import began, leftovers
from trainstack.checkpointing.abstract import AbstractCheckpointer
from trainstack.checkpointing.arguments import DefaultCheckpointerArguments
from trainstack.checkpointing.checkpoint import Checkpoint
from trainstack.checkpointing.directory import has_prefix, is_checkpoint_directory, name_of, scan
from trainstack.checkpointing.newest import of_prefix, other_names, read_newest
from trainstack.checkpointing.reading import read_checkpoint
from trainstack.checkpointing.writing import write_checkpoint, write_model
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

    @property
    def every_n_steps(self) -> int | None:
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
        """Remember, when a run begins afresh, which checkpoints are an earlier run's.

        They stay where they are and can be named, but are not "the newest" of this run: it may be interrupted
        before its first checkpoint, and must not go on from another run's.
        """
        earlier = of_prefix(self.save_dir, self.args.file_prefix) if self.args.checkpoint and not resumed else []
        if earlier:
            began.mark(self.save_dir, self.args.file_prefix, earlier[0].sequence)

    def is_due(self, index: int, force: bool) -> bool:
        """Whether it is the turn of `index`, or out of turn but asked for, and saving is on at all."""
        return self.args.checkpoint and (force or index % self.args.period == 0)

    def save(self, checkpoint_state: Checkpoint, index: int, force: bool = False) -> str | None:
        """Write `checkpoint_state` if it is its turn, replacing one of the same name.

        The name is made of the prefix and the global step, or the index if the step is not known.
        Returns once everything is on the disk.
        """
        if not self.is_due(index, force):
            return None
        self.prepare()
        step = checkpoint_state.global_step
        number = f"{index:06d}" if step is None else f"{step:09d}"
        path = write_checkpoint(checkpoint_state, self.save_dir, self._name(number))
        self._log(logging.INFO, f"saved {path}")
        return str(path)

    def save_aside(self, checkpoint_state: Checkpoint, name: str) -> str | None:
        """Write `checkpoint_state` as `name`; it is loaded only if it is named."""
        if not self.args.checkpoint:
            return None
        self.prepare()
        return str(write_checkpoint(checkpoint_state, self.save_dir, name))

    def save_model(self, model_state: dict[str, Any], index: int) -> str | None:
        """Write an export of `model_state`; `load` never takes it for a point to resume from."""
        if not self.args.checkpoint:
            return None
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
        if resume is None or resume is False:
            configured = self.args.load_dir or self.args.load_filename
            return self._load_configured(required=True) if configured else Checkpoint()
        if resume is True or resume == "auto":
            return self._load_configured(required=resume is True)
        if resume == "" or isinstance(resume, int):
            raise ConfigurationError(f"resume={resume!r}: write True, False, 'auto' or the path of a checkpoint.")
        path = Path(resume).absolute()
        return self._load_newest(path, required=True) if _holds_many(path) else self._load_named(path)

    def _load_configured(self, required: bool) -> Checkpoint:
        args = self.args
        directory = self._settle("load_dir", args.load_dir) if args.load_dir else self.save_dir
        if not args.load_filename:
            return self._load_newest(directory, required)
        path = directory / args.load_filename
        return self._load_named(path) if required or path.exists() else Checkpoint()

    def _load_named(self, path: Path) -> Checkpoint:
        self._refuse_deleting(path.parent)
        checkpoint = read_checkpoint(path)
        self._log(logging.INFO, f"loaded {path}")
        return checkpoint

    def _load_newest(self, directory: Path, required: bool) -> Checkpoint:
        self._refuse_deleting(directory)
        after = began.read(directory, self.args.file_prefix)
        found = read_newest(directory, self.args.file_prefix, self._warn_of_damage, after)
        if found is not None:
            self._log(logging.INFO, f"loaded {found[0]}")
            return found[1]
        others = other_names(directory, self.args.file_prefix)
        hint = f" There is {others[0]!r}: set file_prefix to match, or name it to load it." if others else ""
        earlier = of_prefix(directory, self.args.file_prefix)
        if earlier:
            hint = (
                " The last run there began afresh and was interrupted before its first checkpoint. To go on from an "
                f"earlier run, name its checkpoint: resume={str(earlier[0].path)!r}."
            )
        usual = self.args.file_prefix == type(self.args)().file_prefix
        what = f"no checkpoint{'' if usual else f' with the file_prefix {self.args.file_prefix!r}'} in {directory}"
        if required:
            absent = "" if directory.is_dir() else ", which does not exist"
            raise CheckpointNotFoundError(
                f"{what}{absent}.{hint} To start afresh when there is none, write resume='auto'"
                f"{' and leave load_dir unset' if self.args.load_dir else ''}."
            )
        self._log(logging.WARNING if others else logging.INFO, f"{what}: starting afresh.{hint}")
        return Checkpoint()

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
