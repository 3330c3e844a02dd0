"""`RunDirectory` selects the folder of a run's files, and raises an error if it holds another run."""

from __future__ import annotations

import os
import re
import secrets
import uuid
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainstack._files import is_address, keep_private, library_error, make_directories
from trainstack.checkpointing import (
    AbstractCheckpointer,
    CheckpointInfo,
    DefaultCheckpointer,
    DefaultCheckpointerArguments,
)
from trainstack.checkpointing.filesystem import make_directory, sync_directory
from trainstack.checkpointing.lease_file import is_held_here
from trainstack.errors import CheckpointNotFoundError, ConfigurationError
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.core.changes import Change
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.run_files import RunFiles
from trainstack.trainer.run_record import FILE_NAME, RunRecord, describe_run, read_record
from trainstack.trainer.tracking.resume_log import append_resume

if TYPE_CHECKING:
    from trainstack.checkpointing.remote.mirror import Mirror

DEFAULT_ROOT = "runs"
"""Folder of the runs without `output_dir`, in the current folder when the trainer is made."""

_finished: Counter[tuple[str, str, str]] = Counter()
"""The number of runs of a script and module that this process has trained to their end."""


class RunDirectory:
    """The folder of one run: its selection, its record, and protection of other runs' files. Paths are absolute.

    The main process calls `choose` and `claim`. All processes get the result of `choose` and call `settle`.
    Nothing is written before `claim`.

    Args:
        args: arguments of the run.
        module: module of the run.
        checkpointer: checkpointer of the run; a `DefaultCheckpointer` saves below the folder, unless its arguments have
            another one.
        private: whether the run has a privacy layer.

    Attributes:
        saved_paths: paths of checkpoints that are completely on disk, for the event `CHECKPOINT_SAVED`.
        config: further keys of the file of arguments; the command line adds the module.
        set_in_code: names of arguments of the trainer that the file of arguments cannot have.
        resume_from: the earlier run whose weights `choose` has found for a new one; None to follow the arguments.
        mirror: uploads the folder, if `output_dir` is an address; used on the main process.
    """

    def __init__(
        self, args: TrainerArguments, module: object, checkpointer: AbstractCheckpointer, *, private: bool = False
    ) -> None:
        self._module, self._checkpointer, self._private = module, checkpointer, private
        self._path: Path | None = None
        self.saved_paths: deque[Path] = deque()
        self.config: Mapping[str, Any] = {}
        self.set_in_code: Sequence[str] = ()
        self.resume_from: Path | None = None
        self.mirror: Mirror | None = None
        self._is_claimed = self._is_written = False
        chosen = args.writer_args.log_dir if args.writer_args else None
        try:
            self._base = _base_of(args)
            self._log_dir = Path(chosen).absolute() if chosen else None
            if is_address(args.output_dir):
                self.mirror = self._make_mirror(args)
                self.settle(self.mirror.folder)
            elif args.output_dir is not None:
                self.settle(Path(args.output_dir).absolute())
        except FileNotFoundError as error:
            raise ConfigurationError(
                "the current folder does not exist any more, so relative paths are invalid. Change to a folder that "
                "exists, or write absolute paths: output_dir, and if they are given save_dir, load_dir, "
                "model_state_save_dir and tb_log_dir."
            ) from error
        self._record = describe_run(module, self._base)

    def _make_mirror(self, args: TrainerArguments) -> Mirror:
        from trainstack.checkpointing.remote.fetching import local_copy_of
        from trainstack.checkpointing.remote.mirror import Mirror
        from trainstack.checkpointing.remote.store import require_store

        address, log = str(args.output_dir), RunLogger(args.log_level)
        require_store(address)
        if self._private and not is_address(getattr(args.differential_privacy_args, "ledger", None)):
            raise ConfigurationError(
                f"output_dir={address!r} with a privacy layer: a ledger in the folder of the run would be lost with "
                "the machine, including the privacy spent since the last upload. Write a local output_dir, or "
                "DifferentialPrivacyArguments(ledger='scheme://...') with a store of register_ledger_store."
            )
        folder = Path(args.local_dir or local_copy_of(address)).absolute()
        own = self._checkpointer
        rules = own.args if isinstance(own, DefaultCheckpointer) else DefaultCheckpointerArguments()
        return Mirror(address, folder, rules, FILE_NAME, log.log)

    @property
    def shown(self) -> str:
        """The folder in a form for messages: its address, if it has one."""
        return shortest(self.path) if self.mirror is None else self.mirror.store.address

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
                "run is prepared. Use trainer.output_dir in on_train_begin or later, or write output_dir='...'."
            )
        return self._path

    @property
    def is_claimed(self) -> bool:
        """Whether this run writes into the folder; known on the main process."""
        return self._is_claimed

    @property
    def log_dir(self) -> Path:
        """The folder of writers and the report."""
        return self._log_dir or self.path

    @property
    def logs_elsewhere(self) -> bool:
        """Whether `log_dir` is outside of the folder."""
        return self._files.logs_elsewhere

    @property
    def run_id(self) -> str | None:
        """The id of the run that has claimed the folder; None before."""
        return self._record.run_id or None

    def copy_logs(self, target: Path) -> None:
        """Copy the files of writers and the report into the folder `target`."""
        self._files.copy_logs(target)

    @property
    def _files(self) -> RunFiles:
        return RunFiles(self.path, self.log_dir, self._checkpointer)

    @property
    def earlier_records(self) -> int:
        """The number of records in the history before the run began."""
        return self._record.earlier_records

    def settle(self, path: Path) -> None:
        """Set the folder of the run to `path`, on this process."""
        self._path = path
        if isinstance(self._checkpointer, DefaultCheckpointer):
            self._checkpointer.place(path)

    def unsettle(self) -> None:
        """Reset the folder, so that `choose` chooses again."""
        self._path = self.resume_from = None

    def look_for_recorded_run(self) -> None:
        """Restrict the checkpointer to checkpoints of the run whose record is in the folder, if there is one."""
        if isinstance(self._checkpointer, DefaultCheckpointer):
            record = read_record(self.path)
            self._checkpointer.known_run = None if record is None else record.run_id or None

    # --- choosing ------------------------------------------------------------------------------------------

    def choose(self, args: TrainerArguments, say: Callable[[str], None], taken: Collection[Path] = ()) -> str:
        """Choose the folder of a run with these arguments; nothing is created or written.

        Args:
            args: arguments of the run.
            say: called with a message for the user.
            taken: folders that other processes own.

        Returns:
            The absolute path of the folder.

        Raises:
            CheckpointNotFoundError: the arguments resume the newest run, and there is none.
        """
        if self._path is not None:
            return str(self._path)
        root, resume = self._base / DEFAULT_ROOT, args.resume
        if args.fast_dev_run:
            return str(root / "fast_dev_run")
        record = self._describe()
        with library_error(root):
            known_runs = [entry for entry in _records_in(root) if entry[1].made_by == record.made_by]
        for folder, other in known_runs:
            if other.folder != folder.name and resume is not False:
                say(
                    f"{shortest(folder)} is a copy of the run {other.folder!r}, or that run was renamed, so it is "
                    f"ignored. To continue it write resume={shortest(folder)!r}."
                )
        mine = [
            (folder, other)
            for folder, other in known_runs
            if other.folder == folder.name and folder not in taken and not is_held_here(folder)
        ]
        unfinished = [folder for folder, other in mine if not other.finished and other.number == record.number]
        if isinstance(resume, bool) or resume in ("auto", "last", "best"):
            known = self._newest(resume, [folder for folder, _ in mine], unfinished or self._done_before(mine), args)
        else:
            known = _run_around(Path(resume).absolute()) if args.resume_mode == "full" else None
        if known is not None and args.resume_mode == "full":
            say(f"this run continues the run in {shortest(known)}.")
            return str(known)
        if known is not None and self._saved_in(known):  # a new run starts with its weights
            self.resume_from = known / "checkpoints" / "best" if resume == "best" else known
        if resume is False and unfinished and (newest := self._saved_in(unfinished[0])):
            say(
                f"the run in {shortest(unfinished[0])} is not finished (global step {newest[0].global_step}). This run "
                "starts in another folder. To continue that run write TrainerArguments(resume='auto')."
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
                f"{self._base / DEFAULT_ROOT} has a checkpoint. Write the folder of a run, resume='runs/...', or "
                "resume='auto' to start a new run if there is none."
            )
        return known

    def _done_before(self, mine: list[tuple[Path, RunRecord]]) -> list[Path]:
        """Return the finished run with this number, if a later run of the script, such as a fold, is unfinished."""
        number = self._describe().number
        goes_on = any(other.number > number and not other.finished for _, other in mine)
        return [folder for folder, other in mine if goes_on and other.number == number]

    def _describe(self) -> RunRecord:
        one = describe_run(self._module, self._base)
        return replace(one, number=_finished[one.made_by])

    def _new_name(self, record: RunRecord) -> str:
        """Return a readable name that sorts by time, and is unique for runs that start in the same second."""
        # 40 characters keep the path short; 3 random bytes make a collision within a second improbable.
        name = re.sub(r"[^A-Za-z0-9]+", "", type(self._module).__name__)[:40] or "run"
        date, time = record.began[:19].split("T")  # up to the seconds
        return f"{date}_{time.replace(':', '')}_{name}_{secrets.token_hex(3)}"

    def may_note(self, args: TrainerArguments) -> bool:
        """Whether the report may record that a start ended before its first step; never in another run's report."""
        if self._path is None or args.output_dir is None or self._is_claimed:
            return self._is_claimed
        known = read_record(self.path)
        if self._files.find_log_of_others(None if known is None else known.run_id) is not None:
            return False
        return args.resume is not False or not self._find_traces(args)

    # --- claiming ------------------------------------------------------------------------------------------

    def claim(self, args: TrainerArguments, *, continues: bool, earlier_records: int = 0) -> None:
        """Take the folder for this run, before anything is written; later calls have no effect.

        Args:
            args: arguments of the run.
            continues: whether a checkpoint in the folder was loaded, so that this run continues it.
            earlier_records: number of records in the history.

        Raises:
            ConfigurationError: the folder holds another run.
            CheckpointNotFoundError: the run there has saved checkpoints, and none is found.
            CheckpointError: the folder cannot be written.
        """
        if not (self._is_claimed or args.fast_dev_run):
            with library_error(self.path):
                self._claim(args, continues, earlier_records)

    def _claim(self, args: TrainerArguments, continues: bool, earlier_records: int) -> None:
        folder, record, found = self.path, self._describe(), read_record(self.path)
        run_id, known = "" if found is None else found.run_id, found if continues else None
        if continues and isinstance(self._checkpointer, DefaultCheckpointer):
            run_id = self._checkpointer.run_id or run_id
        if isinstance(self._checkpointer, DefaultCheckpointer):
            self._checkpointer.on_commit = self.note_save
        self._refuse_logs_of_others(run_id)
        if not continues:
            self._make_room(args, record, found)
            if args.overwrite and self.mirror is not None:
                self.mirror.clear()
            run_id = self._begin_anew()
        self.protect(args)
        self._make_folders(is_new=args.output_dir is None and known is None and not folder.exists())
        beside = _records_in(folder.parent) if folder.parent == self._base / DEFAULT_ROOT else []
        order = 1 + max((other.order for _, other in beside), default=0)
        new = replace(record, order=order, earlier_records=earlier_records)
        self._record = replace(known or new, folder=folder.name, run_id=run_id, saved=continues)
        self._is_claimed, self._is_written = True, known == self._record

    def _begin_anew(self) -> str:
        """Start a new run, and return its id."""
        if isinstance(self._checkpointer, DefaultCheckpointer):
            self._checkpointer.begin_anew()
            return self._checkpointer.run_id or ""
        return uuid.uuid4().hex

    def _refuse_logs_of_others(self, run_id: str) -> None:
        log = self._files.find_log_of_others(run_id)
        if log is not None:
            raise ConfigurationError(
                f"tb_log_dir={shortest(self.log_dir)!r} already holds logs ({shortest(log)}) of a run other than that "
                f"in {shortest(self.path)}, and this run would replace them. Write writer_args with "
                f"tb_log_dir={_beside(self.log_dir)!r}, or move the logs away."
            )

    def note_save(self, path: str | os.PathLike[str] | None) -> None:
        """Record that the checkpoint `path` is on disk, so that the run never restarts if no checkpoint is found."""
        if path is not None:
            self.saved_paths.append(Path(path))
        if self.mirror is not None:
            self.mirror.start()
        if self._is_claimed and not self._record.saved:
            with suppress(OSError):  # for example a full disk; the next save tries again
                self._set(replace(self._record, saved=True))

    def begin(self, args: TrainerArguments) -> None:
        """Record in the claimed folder that training begins, and write its arguments."""
        if self._is_claimed:
            with library_error(self.path):
                self._files.write_config(args, self.config, self.set_in_code)
                self._set(replace(self._record, finished=False))
                if self.mirror is not None:
                    self.mirror.start()

    def note_changes(self, global_step: int, changes: list[Change]) -> None:
        """Add the changes since the resumed checkpoint to `resumes.jsonl`, and clear the list."""
        if self._is_claimed and changes:
            with library_error(self.path):
                append_resume(self.path, global_step, changes)
            changes.clear()

    def end(self, *, finished: bool) -> None:
        """Record the end of training; `finished` is True if the run is complete."""
        if self._is_claimed and finished and not self._record.finished:
            _finished[self._record.made_by] += 1
            with suppress(OSError):  # for example a full disk; the trained weights are saved already
                self._set(replace(self._record, finished=True))

    def _set(self, record: RunRecord) -> None:
        if record != self._record or not self._is_written:
            self._files.write_record(record)
            self._record, self._is_written = record, True

    def protect(self, args: TrainerArguments) -> None:
        """Make all files in the folders of the run readable only for its user, if `args` require it."""
        if args.private_files is True or (args.private_files == "auto" and self._private):
            with library_error(self.path):
                for one in (self.path, self.log_dir, *self._checkpoint_places()):
                    keep_private(one)

    def _make_folders(self, *, is_new: bool) -> None:
        folder = self.path
        if is_new:
            make_directories(folder.parent)
            make_directory(folder)  # fails if another run has created it since
            sync_directory(folder.parent)
        else:
            make_directories(folder)
        make_directories(self.log_dir)

    def _make_room(self, args: TrainerArguments, record: RunRecord, known: RunRecord | None) -> None:
        """Check that no files of another run are in the folder, or delete them with `overwrite`."""
        traces = self._find_traces(args)
        if not traces:
            return
        saved = self._saved_in(self.path)
        is_same = known is not None and not known.finished and known.identity == record.identity
        restarts = args.resume is not False and args.resume_mode == "full" and is_same and not saved
        if restarts and known is not None and known.saved:
            raise self._error_of_lost_checkpoints(args)
        # A start that was refused before its first step has left nothing but its record, so nothing is lost.
        restarts |= is_same and known is not None and not known.saved and traces == [self.path / FILE_NAME]
        if not (args.overwrite or restarts):
            can_continue = bool(saved) or (known is not None and is_same and not known.saved)
            raise self._refusal(args, traces, is_run=bool(saved) or known is not None, can_continue=can_continue)
        self._files.delete(None if known is None else known.run_id or None)

    def _find_traces(self, args: TrainerArguments) -> list[Path]:
        return self._files.find(with_checkpoints=not args.checkpointer_args.delete_existing_checkpoints)

    def _refusal(
        self, args: TrainerArguments, traces: list[Path], *, is_run: bool, can_continue: bool
    ) -> ConfigurationError:
        """Return the error with the alternatives that are possible here."""
        is_run = is_run or any(path.parent not in (self.path, self.log_dir) for path in traces)
        what = "that run" if is_run else f"{', '.join(path.name for path in traces)}, even if you wrote it,"
        ways = [self._another_folder(args), f"overwrite=True, without resume, to delete {what} and start again"]
        if can_continue and args.resume is False:
            ways.insert(0, "resume='auto' to continue that run")
        nothing = "" if can_continue else ", without a checkpoint to resume from"
        name, first = f"output_dir={self.shown!r}", shortest(traces[0])
        advice = f"Write one of these in TrainerArguments: {'; '.join(ways)}."
        if not is_run:
            return ConfigurationError(f"{name} holds a file that a run would replace ({first}). {advice}")
        return ConfigurationError(
            f"{name} holds a run already ({first}){nothing}, and a new run never replaces the files of another. "
            f"{advice}{self._epsilon_advice()}"
        )

    def _epsilon_advice(self) -> str:
        if not (self.log_dir / "privacy_statement.json").exists():
            return ""
        return (
            " That run was private: also after overwrite=True, the epsilon of that run stays spent and adds up to that "
            "of new runs on the same data."
        )

    def _error_of_lost_checkpoints(self, args: TrainerArguments) -> CheckpointNotFoundError:
        ways = [self._another_folder(args)]
        if isinstance(self._checkpointer, DefaultCheckpointer):
            where = f"{shortest(self._checkpointer.save_dir)} has none of them now"
            ways.insert(0, "checkpointer_args with the save_dir that contains them")
        else:
            where = "the checkpointer finds none of them now"
        if args.output_dir is not None:
            ways.append("overwrite=True, without resume, to delete the run and start again")
        return CheckpointNotFoundError(
            f"the run in {shortest(self.path)} has saved checkpoints, and {where}. A start at step 0 would delete the "
            "logs of the run. If a disk is not mounted or the folder was moved, restore it and start again. "
            f"Otherwise write one of these in TrainerArguments: {'; '.join(ways)}."
        )

    def _another_folder(self, args: TrainerArguments) -> str:
        if args.output_dir is None:
            return "resume=False for a new folder in 'runs'"
        other = _beside(self.path) if self.mirror is None else f"{self.mirror.store.address}-2"
        return f"output_dir={other!r} for another folder, or none for a new folder in 'runs'"

    def _checkpoint_places(self) -> list[Path]:
        one = self._checkpointer
        return [one.save_dir, one.model_state_save_dir] if isinstance(one, DefaultCheckpointer) else []

    def _saved_in(self, folder: Path) -> list[CheckpointInfo]:
        """Return the checkpoints of the run in `folder`, newest first."""
        one, record = self._checkpointer, read_record(folder)
        run_id = None if record is None else record.run_id or None
        return one.checkpoints_below(folder, run_id) if isinstance(one, DefaultCheckpointer) else []


def _records_in(root: Path) -> list[tuple[Path, RunRecord]]:
    """Return the runs in the folders of `root`, newest first; folders without an intact record are ignored."""
    folders = root.iterdir() if root.is_dir() else ()
    found = [(folder, record) for folder in folders if (record := read_record(folder)) is not None]
    return sorted(found, key=lambda entry: (entry[1].order, entry[0].name), reverse=True)


def _base_of(args: TrainerArguments) -> Path:
    """Return the current folder; if it does not exist any more, the given one."""
    with suppress(FileNotFoundError):
        return Path.cwd()
    if args.output_dir is None:
        raise FileNotFoundError
    return Path(args.output_dir)


def _run_around(path: Path) -> Path | None:
    """Return the folder of the run that contains `path` or is `path`: a checkpoint, a pointer or a folder of these."""
    return next((one for one in (path, *list(path.parents)[:2]) if read_record(one) is not None), None)


def _beside(folder: Path) -> str:
    number = 2
    while (other := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    return shortest(other)


def shortest(path: str | os.PathLike[str]) -> str:
    """Return `path` in a form for messages: relative to the current folder if that is shorter."""
    full = os.fspath(path)
    try:
        relative = os.path.relpath(full)
    except (OSError, ValueError):  # the current folder does not exist any more, or is on another drive
        return full
    return relative if len(relative) < len(full) else full
