"""`RunDirectory` decides in which folder a run keeps its files, and refuses one that holds another run."""

from __future__ import annotations

import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trainstack._files import keep_private, library_error, make_directories
from trainstack.checkpointing import AbstractCheckpointer, CheckpointInfo, DefaultCheckpointer
from trainstack.checkpointing.filesystem import make_directory, remove_file, remove_tree, sync_directory
from trainstack.checkpointing.lease_file import is_held_here
from trainstack.errors import CheckpointNotFoundError, ConfigurationError
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.run_record import FILE_NAME, RunRecord, describe_run, read_record
from trainstack.trainer.tracking.writers.tensorboard import event_files

DEFAULT_ROOT = "runs"
"""Where runs without `output_dir` get their folders, in the folder that is current when the trainer is made."""

RUN_JSON = "run.json"

LOG_FILES = (
    "metrics.csv",
    "metrics.jsonl",
    RUN_JSON,
    "report.html",
    "privacy_statement.txt",
    "privacy_statement.json",
    "mlflow-run.json",
    "trackio-run.json",
    "wandb-run.json",
)
"""Files of writers and the report in the folder of the logs. A privacy ledger is never deleted."""

_finished: Counter[tuple[str, str, str]] = Counter()
"""How many runs of a script and module this process has trained to their end."""


class RunDirectory:
    """The folder of one run: how it is chosen, recorded and refused. Paths are absolute from the beginning.

    The main process calls `choose` and `claim`. All processes get the result of `choose` and call `settle`.
    Nothing is written before `claim`.

    Args:
        args: of the run.
        module: of the run.
        checkpointer: of the run; a `DefaultCheckpointer` saves below the folder, unless its arguments say where.
        private: whether the run has a privacy layer.

    Attributes:
        resume_from: the earlier run whose weights `choose` has found for a new one; None to go by the arguments.
    """

    def __init__(
        self, args: TrainerArguments, module: object, checkpointer: AbstractCheckpointer, *, private: bool = False
    ) -> None:
        self._module, self._checkpointer, self._private = module, checkpointer, private
        with library_error(Path()):  # the current folder may be gone
            self._base = Path.cwd()
        self._path: Path | None = None
        self.resume_from: Path | None = None
        chosen = args.writer_args.tb_log_dir if args.writer_args else None
        self._log_dir = Path(chosen).absolute() if chosen else None
        self._is_claimed = self._is_written = False
        self._record = describe_run(module, self._base, 0)
        if args.output_dir is not None:
            self.settle(Path(args.output_dir).absolute())

    @property
    def is_settled(self) -> bool:
        """Whether the folder is known."""
        return self._path is not None

    @property
    def path(self) -> Path:
        """The folder.

        Raises:
            ConfigurationError: it is not chosen yet.
        """
        if self._path is None:
            raise ConfigurationError(
                "the folder of the run is not chosen yet: with output_dir=None the main process chooses it when the "
                "run is made. Ask for trainer.output_dir in on_train_begin or later, or write output_dir='...'."
            )
        return self._path

    @property
    def is_claimed(self) -> bool:
        """Whether this run writes into the folder; known on the main process."""
        return self._is_claimed

    @property
    def log_dir(self) -> Path:
        """Where writers and the report write."""
        return self._log_dir or self.path

    @property
    def earlier_records(self) -> int:
        """How many records the history had before the run began."""
        return self._record.earlier_records

    def settle(self, path: Path) -> None:
        """Let `path` be the folder of the run, on this process."""
        self._path = path
        if isinstance(self._checkpointer, DefaultCheckpointer):
            self._checkpointer.place(path)

    # --- choosing ------------------------------------------------------------------------------------------

    def choose(self, args: TrainerArguments, say: Callable[[str], None]) -> str:
        """The folder of a run with these arguments; nothing is made or written.

        Args:
            args: of the run.
            say: takes a sentence for the user.

        Raises:
            CheckpointNotFoundError: the newest run is asked for, and there is none.
        """
        if self._path is not None:
            return str(self._path)
        root, resume = self._base / DEFAULT_ROOT, args.resume
        if args.fast_dev_run:
            return str(root / "fast_dev_run")
        with library_error(root):
            found = _records_in(root)
        record = self._describe()
        mine = [
            (folder, other) for folder, other in found if other.made_by == record.made_by and not is_held_here(folder)
        ]
        unfinished = [folder for folder, other in mine if not other.finished and other.number == record.number]
        if isinstance(resume, bool) or resume in ("auto", "last", "best"):
            known = self._newest(resume, [folder for folder, _ in mine], unfinished or self._done_before(mine), args)
        else:
            known = _run_around(Path(resume).absolute()) if args.resume_mode == "full" else None
        if known is not None and args.resume_mode == "full":
            say(f"this run continues that in {shortest(known)}.")
            return str(known)
        if known is not None and self._saved_in(known):  # its weights begin a new run
            self.resume_from = known / "checkpoints" / "best" if resume == "best" else known
        if resume is False and unfinished and (newest := self._saved_in(unfinished[0])):
            say(
                f"the run in {shortest(unfinished[0])} is not finished (global step {newest[0].global_step}). This run "
                "begins in another folder. To continue that one write TrainerArguments(resume='auto')."
            )
        return str(root / self._new_name(record))

    def _newest(
        self, resume: bool | str | os.PathLike[str], mine: list[Path], unfinished: list[Path], args: TrainerArguments
    ) -> Path | None:
        if resume == "auto":
            return next(iter(unfinished), None)
        if resume is False:
            return None
        known = next((folder for folder in mine if self._saved_in(folder)), None)
        elsewhere = args.checkpointer_args.load_dir or args.checkpointer_args.load_filename
        if known is None and not elsewhere and isinstance(self._checkpointer, DefaultCheckpointer):
            raise CheckpointNotFoundError(
                f"resume={resume!r}: no run of this script and of {type(self._module).__name__} in "
                f"{self._base / DEFAULT_ROOT} has a checkpoint. Name the folder of a run, resume='runs/...', or write "
                "resume='auto' to begin anew where there is none."
            )
        return known

    def _done_before(self, mine: list[tuple[Path, RunRecord]]) -> list[Path]:
        """The finished run with the number of this one, if a later run of the script, such as a fold, is unfinished."""
        number = self._describe().number
        goes_on = any(other.number > number and not other.finished for _, other in mine)
        return [folder for folder, other in mine if goes_on and other.number == number]

    def _describe(self) -> RunRecord:
        one = describe_run(self._module, self._base, 0)
        return replace(one, number=_finished[one.made_by])

    def _new_name(self, record: RunRecord) -> str:
        """A readable name that sorts by time, and is unique among runs that begin in the same second."""
        name = re.sub(r"[^A-Za-z0-9]+", "", type(self._module).__name__)[:40] or "run"
        date, time = record.began[:19].split("T")
        return f"{date}_{time.replace(':', '')}_{name}_{secrets.token_hex(3)}"

    def may_note(self, args: TrainerArguments) -> bool:
        """Whether the report may say that a start ended before its first step; never in the report of another run."""
        if self._path is None or args.output_dir is None or self._is_claimed:
            return self._is_claimed
        if args.resume is not False:
            return True
        return not self._traces(args)

    # --- claiming ------------------------------------------------------------------------------------------

    def claim(self, args: TrainerArguments, *, continues: bool, earlier_records: int = 0) -> None:
        """Make the folder this run's, before anything is written; once.

        Args:
            args: of the run.
            continues: whether a checkpoint in the folder was loaded, so that this run continues it.
            earlier_records: how many records the history has.

        Raises:
            ConfigurationError: the folder holds another run.
            CheckpointError: the folder cannot be written.
        """
        if not (self._is_claimed or args.fast_dev_run):
            with library_error(self.path):
                self._claim(args, continues, earlier_records)

    def _claim(self, args: TrainerArguments, continues: bool, earlier_records: int) -> None:
        folder, record = self.path, self._describe()
        known = read_record(folder)
        if not continues:
            if traces := self._traces(args):
                restarts = not self._saved_in(folder) and _restarts(args, record, known)
                self._make_room(args, traces[0], restarts=restarts)
            known = None
        self.protect(args)
        self._make_folders(is_new=args.output_dir is None and known is None and not folder.exists())
        beside = _records_in(folder.parent) if folder.parent == self._base / DEFAULT_ROOT else []
        order = 1 + max((other.order for _, other in beside), default=0)
        self._record = known or replace(record, order=order, earlier_records=earlier_records)
        self._is_claimed, self._is_written = True, known is not None

    def begin(self) -> None:
        """A training begins in the folder that is claimed: record it as not finished."""
        if self._is_claimed:
            with library_error(self.path):
                self._set(replace(self._record, finished=False))

    def end(self, *, finished: bool) -> None:
        """The training has ended; `finished` if it came to its end."""
        if self._is_claimed and finished and not self._record.finished:
            _finished[self._record.made_by] += 1
            with suppress(OSError):  # a disk that is full; the run is trained all the same
                self._set(replace(self._record, finished=True))

    def _set(self, record: RunRecord) -> None:
        if record != self._record or not self._is_written:
            self._record = record
            record.write(self.path)
            self._is_written = True

    def protect(self, args: TrainerArguments) -> None:
        """Make all files below the folders of the run readable for its user only, if `args` say so."""
        if args.private_files is True or (args.private_files == "auto" and self._private):
            with library_error(self.path):
                for one in (self.path, self.log_dir, *self._checkpoint_places()):
                    keep_private(one)

    def _make_folders(self, *, is_new: bool) -> None:
        folder = self.path
        if is_new:
            make_directories(folder.parent)
            make_directory(folder)  # fails if another run has just made it
            sync_directory(folder.parent)
        else:
            make_directories(folder)

    def _make_room(self, args: TrainerArguments, trace: Path, *, restarts: bool) -> None:
        if not (args.overwrite or restarts):
            name, other = self._argument_of(trace)
            ways = [other, "overwrite=True, without resume, to delete that run and start again"]
            if args.resume is False:
                ways.insert(0, "resume='auto' to continue that run")
            nothing = ", without a checkpoint that could be resumed"
            if args.resume is False or self._saved_in(self.path):
                nothing = ""
            raise ConfigurationError(
                f"{name} holds a run already ({shortest(trace)}){nothing}, and a new run "
                f"never replaces the files of another. Write one of these in TrainerArguments: {'; '.join(ways)}."
            )
        self._delete_run()

    def _argument_of(self, trace: Path) -> tuple[str, str]:
        """The argument that has led to `trace`, and another value for it."""
        if trace.is_relative_to(self.path):
            other = f"output_dir={_beside(self.path)!r} for another folder, or none for a new folder in 'runs'"
            return f"output_dir={shortest(self.path)!r}", other
        if trace.is_relative_to(self.log_dir):
            return f"tb_log_dir={shortest(self.log_dir)!r}", f"writer_args with tb_log_dir={_beside(self.log_dir)!r}"
        name = "save_dir" if trace.parent == self._checkpoint_places()[0] else "model_state_save_dir"
        return f"{name}={shortest(trace.parent)!r}", f"checkpointer_args with {name}={_beside(trace.parent)!r}"

    def _checkpoint_places(self) -> list[Path]:
        one = self._checkpointer
        return [one.save_dir, one.model_state_save_dir] if isinstance(one, DefaultCheckpointer) else []

    def _saved_in(self, folder: Path) -> list[CheckpointInfo]:
        """The checkpoints of the run in `folder`, newest first."""
        one = self._checkpointer
        return one.checkpoints_below(folder) if isinstance(one, DefaultCheckpointer) else []

    def _traces(self, args: TrainerArguments) -> list[Path]:
        """Files of an earlier run in the folders of this one."""
        record = [self.path / FILE_NAME]
        logs = [
            self.log_dir / name for name in LOG_FILES if name != RUN_JSON
        ]  # a start that ended early may have written it
        events = event_files(self.log_dir / "tensorboard")
        found = [path for path in [*record, *logs] if path.is_file()] + events
        checkpointer = self._checkpointer
        if isinstance(checkpointer, DefaultCheckpointer) and checkpointer.args.checkpoint:
            found += [] if args.checkpointer_args.delete_existing_checkpoints else checkpointer.written_by_runs()
        return found

    def _delete_run(self) -> None:
        """Delete only files that a run writes; the record last, so that an interrupted deletion is found."""
        if isinstance(self._checkpointer, DefaultCheckpointer):
            self._checkpointer.delete_run()
        for path in event_files(self.log_dir / "tensorboard"):
            remove_file(path)
        for name in LOG_FILES:
            if (self.log_dir / name).is_file():
                remove_file(self.log_dir / name)
        if (self.path / "best" / "MANIFEST.json").is_file():
            remove_tree(self.path / "best")  # of the callback BestCheckpoint
        if (self.path / FILE_NAME).is_file():
            remove_file(self.path / FILE_NAME)


def _restarts(args: TrainerArguments, record: RunRecord, known: RunRecord | None) -> bool:
    """Whether this start repeats a start of the same run that ended before its first checkpoint."""
    goes_on = args.resume is not False and args.resume_mode == "full"
    return goes_on and known is not None and not known.finished and known.identity == record.identity


def _records_in(root: Path) -> list[tuple[Path, RunRecord]]:
    """The runs in the folders of `root`, newest first; folders without an intact record are left out."""
    found = list(_iterate_records(root))
    return sorted(found, key=lambda entry: (entry[1].order, entry[0].name), reverse=True)


def _iterate_records(root: Path) -> Iterator[tuple[Path, RunRecord]]:
    if root.is_dir():
        for folder in root.iterdir():
            record = read_record(folder)
            if record is not None:
                yield folder, record


def _run_around(path: Path) -> Path | None:
    """The folder of the run that contains `path`, or is `path`: a checkpoint, a pointer or a folder of these."""
    return next((one for one in (path, *list(path.parents)[:2]) if read_record(one) is not None), None)


def _beside(folder: Path) -> str:
    number = 2
    while (other := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    return shortest(other)


def shortest(path: str | os.PathLike[str]) -> str:
    """`path` for people: relative to the current folder where that is shorter."""
    full = os.fspath(path)
    try:
        relative = os.path.relpath(full)
    except (OSError, ValueError):  # the current folder is gone, or on another drive
        return full
    return relative if len(relative) < len(full) else full
