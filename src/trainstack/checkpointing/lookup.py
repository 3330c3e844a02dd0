"""Lookup of the checkpoint to resume from: newest, best or named."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainstack._files import real_path
from trainstack.checkpointing import filesystem
from trainstack.checkpointing.abstract import Checkpoint
from trainstack.checkpointing.arguments import DefaultCheckpointerArguments, Monitor
from trainstack.checkpointing.directory import (
    CheckpointInfo,
    Contents,
    has_prefix,
    is_checkpoint_directory,
    name_odd_entries,
    name_of,
    scan,
)
from trainstack.checkpointing.filesystem import atomic_write
from trainstack.checkpointing.reading import read_checkpoint
from trainstack.checkpointing.verification import (
    POINTER_FORMAT,
    PointerRule,
    checkpoints_of_run,
    damaged_begin,
    hint_of_pickles,
    of_run,
    pointer_of,
    read_beginning,
    rule_in,
    with_prefix,
)
from trainstack.errors import CheckpointDamagedError, CheckpointNotFoundError, ConfigurationError


def read_newest(
    directory: Path,
    prefix: str,
    log: Callable[[int, str], None],
    monitor: Monitor | None = None,
    run_id: str | None = None,
    read: Callable[[Path], Checkpoint] = read_checkpoint,
) -> tuple[Path, Checkpoint] | None:
    """Return the run's intact checkpoint that was written last, of any step, or None if there is none.

    Args:
        directory: the folder to search; it may be absent.
        prefix: only checkpoints with this `file_prefix`.
        log: called for each damaged checkpoint, before an older one is tried, and for each unusual entry.
        monitor: return the best checkpoint by this metric instead; None also if none has a value.
        run_id: of the run; None for the run to which the directory belongs.
        read: reads and verifies a checkpoint.

    Raises:
        CheckpointDamagedError: there are checkpoints, and all are damaged; or the entry for the last beginning of a run
            is damaged.
        CheckpointMismatchError: one was written by a newer trainstack, so it may be the newest.
    """

    def skipped(error: CheckpointDamagedError) -> None:
        log(logging.WARNING, f"skipping a damaged checkpoint: {error}")

    contents = scan(directory)
    name_odd_entries(contents, log)
    _refuse_unknown_run(contents, prefix)
    for path, mismatch in contents.newer.items():
        if has_prefix(name_of(path), prefix):
            raise mismatch
    broken = [error for path, error in contents.broken.items() if has_prefix(name_of(path), prefix)]
    candidates = of_run(contents, prefix, run_id)
    if monitor is not None:
        candidates = monitor.rank(candidates)
    for error in broken:
        skipped(error)
    if not candidates and (monitor is not None or not broken):
        return None
    for info in candidates:
        try:
            return info.path, read(info.path)
        except CheckpointDamagedError as error:
            skipped(error)
            broken.append(error)
    details = "\n".join(f"  - {error}" for error in broken)
    raise CheckpointDamagedError(
        f"every {'' if monitor is None else 'ranked '}checkpoint in {directory} is damaged:\n{details}\n"
        "Restore one from a backup, or set another save_dir for a new start."
    )


def _refuse_unknown_run(contents: Contents, prefix: str) -> None:
    error = damaged_begin(contents, prefix)
    if error is None:
        return
    newest: dict[str | None, CheckpointInfo] = {}
    for info in with_prefix(contents, prefix):
        newest.setdefault(info.run_id, info)
    runs = [f"  - run {run or 'unknown'}: its newest checkpoint is {info.path}" for run, info in newest.items()]
    raise CheckpointDamagedError(
        f"{error} It names the run that began here last, so the newest checkpoint may be one of another run. Runs with "
        "checkpoints here:\n"
        + ("\n".join(runs) or "  none")
        + "\nName a checkpoint, resume='...', to resume from it, or "
        "give this run another output_dir."
    )


# Only the rule of a pointer (which prefix, which metric) is used. The checkpoint is found again from the manifests, so
# that a stale, incomplete or missing pointer has no effect.


def refresh_pointers(
    directory: Path,
    args: DefaultCheckpointerArguments,
    last: CheckpointInfo | None,
    best: CheckpointInfo | None,
    say: Callable[[int, str], None],
) -> None:
    """Write both pointers for these checkpoints; a pointer without a checkpoint is deleted. A failure is logged."""
    for kind, info in (("last", last), ("best", best)):
        path = pointer_of(kind, directory, args.file_prefix)
        try:
            _set(path, None if info is None else _render(kind, info, args), say)
        except OSError as error:
            say(logging.WARNING, f"the pointer {path} could not be written: {error}")


def rule_at(path: Path, args: DefaultCheckpointerArguments) -> PointerRule | None:
    """The rule of the pointer at `path`; None if it is not one. The rule of `args` if it is torn or missing."""
    if path.is_dir():
        return None
    rule = rule_in(path)
    monitors = {"last": None, "best": args.monitored}
    kinds = {pointer_of(kind, path.parent, args.file_prefix): monitor for kind, monitor in monitors.items()}
    if rule is None and path in kinds and path.parent.is_dir():
        return PointerRule(file_prefix=args.file_prefix, monitor=kinds[path])
    return rule


def _set(path: Path, data: bytes | None, say: Callable[[int, str], None]) -> None:
    now = read_beginning(path) if path.is_file() else None
    if (now is None and os.path.lexists(path)) or (now and now.strip(b"\0") and POINTER_FORMAT.encode() not in now):
        say(logging.DEBUG, f"{path} is not a pointer of trainstack, so it is not replaced.")
    elif data is not None and now != data:
        atomic_write(path, data)
    elif data is None and now is not None:
        filesystem.remove_file(path)


def _render(kind: str, info: CheckpointInfo, args: DefaultCheckpointerArguments) -> bytes:
    body: dict[str, Any] = {
        "format": POINTER_FORMAT,
        "file_prefix": args.file_prefix,
        "checkpoint": info.path.name,
        "global_step": info.global_step,
    }
    if kind == "best":
        monitor = args.monitored
        body |= {"monitor": monitor.name, "mode": monitor.mode, "value": monitor.value_of(info)}
    return (json.dumps(body, indent=1) + "\n").encode()


class CheckpointFinder:
    """Finds the checkpoint that the arguments of a `DefaultCheckpointer` name.

    Args:
        args: of the checkpointer.
        load_dir: the folder to search if no name is given and the run has saved nothing in `save_dir` yet.
        save_dir: a checkpoint in this folder is refused if it would be deleted.
        log: takes a level of the logging module and a line.
        run_id: of the run that saves in `save_dir`; None for the run to which this directory belongs.
        read: reads and verifies a checkpoint.

    Attributes:
        found: the checkpoint that was loaded last; None before.
    """

    args: DefaultCheckpointerArguments
    found: Path | None

    def __init__(
        self,
        args: DefaultCheckpointerArguments,
        load_dir: Path,
        save_dir: Path,
        log: Callable[[int, str], None],
        run_id: str | None = None,
        read: Callable[[Path], Checkpoint] = read_checkpoint,
    ) -> None:
        self.args, self._load_dir, self._save_dir, self._log = args, load_dir, save_dir, log
        self._run_id, self._read = run_id, read
        self.found = None

    def _run_in(self, directory: Path) -> str | None:
        return self._run_id if directory.resolve() == self._save_dir.resolve() else None

    def load(self, resume: bool | str | os.PathLike[str] | None) -> Checkpoint:
        """The result of `DefaultCheckpointer.load`."""
        if resume is None or resume is False:
            configured = self.args.load_dir or self.args.load_filename
            return self._load_configured(required=True) if configured else Checkpoint()
        if resume is True or resume in ("auto", "last", "best"):
            monitor = self.args.monitored if resume == "best" else None
            if (found := self._load_own(monitor)) is not None:
                return found
            if monitor is not None:
                return self._load_best(self._load_dir, self.args.file_prefix, monitor)
            return self._load_configured(required=resume != "auto")
        if resume == "" or isinstance(resume, int):
            raise ConfigurationError(
                f"resume={resume!r}: write True, False, 'auto', 'last', 'best' or the path of a checkpoint."
            )
        path = Path(resume).absolute()
        rule = rule_at(path, self.args)
        if rule is not None:
            if rule.monitor is None:
                return self._load_newest(path.parent, required=True, prefix=rule.file_prefix)
            return self._load_best(path.parent, rule.file_prefix, rule.monitor)
        if not path.is_dir() or is_checkpoint_directory(path):
            return self._load_named(path)
        return self._load_newest(folder_at(path, self.args.file_prefix), required=True)

    def _load_own(self, monitor: Monitor | None) -> Checkpoint | None:
        """The newest or best checkpoint of a run that began from another directory; None if it has saved none."""
        elsewhere = (self._load_dir / self.args.load_filename).parent if self.args.load_filename else self._load_dir
        if real_path(elsewhere) == real_path(self._save_dir):
            return None
        self._check_not_deleting(self._save_dir)
        found = read_newest(self._save_dir, self.args.file_prefix, self._log, monitor, self._run_id, self._read)
        return None if found is None else self._loaded(*found)

    def _load_configured(self, required: bool) -> Checkpoint:
        args, directory = self.args, self._load_dir
        if not args.load_filename:
            return self._load_newest(directory, required)
        path = directory / args.load_filename
        return self._load_named(path) if required or path.exists() else Checkpoint()

    def _load_named(self, path: Path) -> Checkpoint:
        self._check_not_deleting(path.parent)
        return self._loaded(path, self._read(path))

    def _load_best(self, directory: Path, prefix: str, monitor: Monitor) -> Checkpoint:
        self._check_not_deleting(directory)
        run_id = self._run_in(directory)
        found = read_newest(directory, prefix, self._log, monitor, run_id, self._read)
        if found is not None:
            return self._loaded(*found)
        candidates = checkpoints_of_run(directory, prefix, run_id)
        if not candidates:
            return self._load_newest(directory, required=True, prefix=prefix)  # raises with the reason
        known = ", ".join(sorted({name for info in candidates for name in info.metrics})) or "none"
        raise CheckpointNotFoundError(
            f"none of the {len(candidates)} checkpoints in {directory} has a finite value of {monitor.name!r}, so none "
            f"is the best. Metrics in them: {known}. Set monitor to one of those, or write resume=True for the newest."
        )

    def _load_newest(self, directory: Path, required: bool, prefix: str | None = None) -> Checkpoint:
        self._check_not_deleting(directory)
        prefix = self.args.file_prefix if prefix is None else prefix
        run_id = self._run_in(directory)
        found = read_newest(directory, prefix, self._log, run_id=run_id, read=self._read)
        if found is not None:
            return self._loaded(*found)
        intact = [info for info in scan(directory).intact if info.kind == "checkpoint"]
        others = [info.name for info in intact if not has_prefix(info.name, prefix)]
        hint = f" There is {others[0]!r}: set file_prefix to match, or name it to load it." if others else ""
        earlier = [info for info in intact if has_prefix(info.name, prefix)]
        if earlier:
            why = "The last run there was a new start and was interrupted before its first checkpoint."
            if run_id is not None:
                why = "The checkpoints there belong to other runs."
            hint = f" {why} To resume from one of another run, name it: resume={str(earlier[0].path)!r}."
        usual = prefix == type(self.args)().file_prefix
        what = f"no checkpoint{'' if usual else f' with the file_prefix {prefix!r}'} in {directory}"
        if required:
            absent = "" if directory.is_dir() else ", which does not exist"
            raise CheckpointNotFoundError(
                f"{what}{absent}.{hint}{hint_of_pickles(directory)} For a new start when there is none, write "
                f"resume='auto'{' and leave load_dir unset' if self.args.load_dir else ''}."
            )
        self._log(logging.WARNING if others else logging.INFO, f"{what}: this is a new start.{hint}")
        return Checkpoint()

    def _loaded(self, path: Path, checkpoint: Checkpoint) -> Checkpoint:
        self.found = path
        self._log(logging.INFO, f"loaded {path}")
        return checkpoint

    def _check_not_deleting(self, directory: Path) -> None:
        if self.args.delete_existing_checkpoints and real_path(directory) == real_path(self._save_dir):
            raise ConfigurationError(
                f"delete_existing_checkpoints=True would delete the checkpoint to load from {directory}. "
                "Write delete_existing_checkpoints=False to resume, or resume=False to start over."
            )


def folder_at(path: Path, prefix: str) -> Path:
    """`path`, or the folder of checkpoints of a run with this `output_dir` if `path` itself contains none."""
    within = path / "checkpoints"
    return within if within.is_dir() and not with_prefix(scan(path), prefix) else path
