"""`DefaultCheckpointer` stores checkpoints as directories in a file system."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainstack._files import is_address, is_inside, real_path
from trainstack.checkpointing import retention, temp_dirs
from trainstack.checkpointing.abstract import AbstractCheckpointer, Checkpoint
from trainstack.checkpointing.arguments import DEFAULT_MONITOR, DefaultCheckpointerArguments, has_separator
from trainstack.checkpointing.async_writer import BackgroundWriter, HostBuffers
from trainstack.checkpointing.directory import (
    CheckpointInfo,
    Contents,
    beginnings,
    has_prefix,
    name_of,
    read_entry,
    read_manifest,
    scan,
)
from trainstack.checkpointing.integrity.scrubbing import BackgroundScrub
from trainstack.checkpointing.lease import Lease
from trainstack.checkpointing.lookup import CheckpointFinder, folder_at, refresh_pointers, rule_at
from trainstack.checkpointing.reading import read_checkpoint, read_deferred
from trainstack.checkpointing.retention import Retention
from trainstack.checkpointing.sharded.commit import Ranks, ShardedDirectory, report_part, together, wait_for_parts
from trainstack.checkpointing.sharded.parts import Layout, pack_rows
from trainstack.checkpointing.verification import checkpoints_of_run, newest_entry, with_prefix
from trainstack.checkpointing.writing import Payload, Signer, commit, pack, payload_of, write_begin, write_model
from trainstack.errors import CheckpointError, CheckpointNotFoundError
from trainstack.ranks import global_rank

_logger = logging.getLogger("trainstack")


LARGE = 64 << 20
"""Checkpoints with more bytes are read back in a thread, so that the training need not wait for the disk."""


class DefaultCheckpointer(AbstractCheckpointer):
    """Stores each checkpoint as a directory that is complete or does not exist.

    Only one process of a training may save; any number may load. The constructor touches no file.

    Attributes:
        lease: the right to write into the directories; None if it was not taken.
        known_run: the id of the run that `load` should continue in `save_dir`; None for the run that began or saved
            there last.
        loaded_from: the directory of the loaded checkpoint; None if none was loaded from a directory.
        on_commit: called with the path of a checkpoint that is safe; with `async_save` from another thread.
    """

    args: DefaultCheckpointerArguments

    def __init__(self, args: DefaultCheckpointerArguments | None = None) -> None:
        self.args = args or DefaultCheckpointerArguments()
        self._directories: dict[str, Path] = {}
        self._base: Path | None = None
        self._prepared: set[Path] = set()
        self._background, self._buffers = BackgroundWriter(), HostBuffers()
        self.lease: Lease | None = None
        self.known_run: str | None = None
        self.on_commit: Callable[[Path], None] = lambda path: None
        self._is_new = False
        self._run_id: str | None = None
        self.loaded_from: Path | None = None
        self._loaded_run: str | None = None
        self._asked: bool | str | os.PathLike[str] | None = None
        self._loaded_at: int | None = None  # the newest number of this prefix when the checkpoint was chosen
        self._run_level = "INFO"
        self._missed = False
        self._last_save_s: float | None = None
        self._signer: Signer | None = None
        every_s = self.args.scrub_every_s
        self._scrub = None if every_s is None else BackgroundScrub(every_s, self._log, retention.note_verified)

    def begin_trainer(self, *, log_level: str, resume: bool | str | os.PathLike[str]) -> None:
        """Called when a trainer is made with these arguments. Its `log_level` is the default of the checkpointer's.

        Raises:
            CheckpointNotFoundError: `resume` is a path with a separator that does not exist. Only the main process
                checks it, because only that one loads.
        """
        self._run_level = log_level
        self._run_id = self._loaded_run = self._loaded_at = self.known_run = None
        self._is_new = False
        if isinstance(resume, bool) or is_address(resume) or not has_separator(os.fspath(resume)):
            return
        if type(self).load is not DefaultCheckpointer.load or global_rank() != 0:
            return
        path = Path(resume).absolute()
        if not path.exists() and rule_at(path, self.args) is None:
            raise CheckpointNotFoundError(
                f"resume={os.fspath(resume)!r}: {path} does not exist. Write the path of a checkpoint or of a run, "
                "or write resume='auto' for the newest checkpoint of this run, if there is one."
            )

    @property
    def every_n_steps(self) -> int | float | None:
        """`args.every_n_steps`, or None if nothing is saved."""
        return self.args.every_n_steps if self.args.checkpoint else None

    @property
    def every_n_seconds(self) -> float | None:
        """`args.every_n_seconds`, or None if nothing is saved."""
        return self.args.every_n_seconds if self.args.checkpoint else None

    @property
    def keeps_best_by(self) -> tuple[str, str] | None:
        """`args.monitor` and its direction, if `args.keep_best` requests the best checkpoints."""
        monitor = self.args.monitored
        keeps = self.args.checkpoint and self.args.keep_best and self.args.keep_last is not None
        return (monitor.name, monitor.mode) if keeps else None

    @property
    def keeps_frozen(self) -> bool:
        """`args.keep_frozen`."""
        return self.args.keep_frozen

    @property
    def is_sharded(self) -> bool:
        """`args.sharded`, unless a subclass overrides `save`, which has to get whole tensors."""
        return self.args.sharded and type(self).save is DefaultCheckpointer.save

    @property
    def asks_for_best(self) -> bool:
        """Whether the arguments request the best checkpoints explicitly; one is kept by "val/loss" by default."""
        return self.args.keep_best > 1 or self.args.monitor != DEFAULT_MONITOR

    def place(self, folder: Path) -> None:
        """Save in `checkpoints` below `folder`, the folder of the run, unless the arguments name another directory."""
        if folder != self._base:
            self._base, self._directories = folder, {}
        _ = self.save_dir, self.model_state_save_dir  # resolve them before user code changes the current directory

    @property
    def save_dir(self) -> Path:
        """The directory of checkpoints, as an absolute path. It is fixed at the first use."""
        default = "checkpoints" if self._base is None else self._base / "checkpoints"
        return self._resolve_directory("save_dir", self.args.save_dir or default)

    @property
    def model_state_save_dir(self) -> Path:
        """The directory of model exports."""
        return self._resolve_directory("model_state_save_dir", self.args.model_state_save_dir or self.save_dir)

    def prepare(self) -> None:
        """Delete leftovers of ended writers, and existing checkpoints if the arguments request it.

        It runs once, automatically before the first save. It deletes only directories with an intact manifest, of the
        kind "checkpoint" and with this `file_prefix`.
        """
        self._loaded_at = None  # later entries are written by this run
        if not self._clear(self.save_dir) or not self.args.delete_existing_checkpoints:
            return
        prefix = self.args.file_prefix
        for info in scan(self.save_dir).intact:
            ours = has_prefix(info.name, prefix) and has_prefix(name_of(info.path), prefix)
            if info.kind == "checkpoint" and ours and not info.path.is_symlink():
                temp_dirs.discard_dir(info.path)
                self._log(logging.INFO, f"deleted {info.path}")

    @property
    def run_id(self) -> str | None:
        """The id of the run whose checkpoints are written; None until a run has begun in `save_dir`."""
        if self._run_id is None and self.loaded_own:
            self._run_id = self._loaded_run
        elif self._run_id is None:
            newest = newest_entry(scan(self.save_dir), self.args.file_prefix)
            self._run_id = None if newest is None else newest.run_id
        return self._run_id

    def begin_anew(self) -> None:
        """Assign the following saves to a new run."""
        self._run_id, self._is_new = uuid.uuid4().hex, True

    def begin_run(self, *, resumed: bool) -> None:
        """Record the id of this run in the directory if it begins newly or from another directory.

        Checkpoints of earlier runs remain and can be named, but are not "the newest" of this run, which never deletes
        them. The record is written now because the run may be interrupted before its first checkpoint, and must then
        not resume from a checkpoint of another run. A warning names earlier checkpoints.

        Raises:
            CheckpointError: another process has written into `save_dir` since the checkpoint was chosen.
        """
        self._background.wait()  # an abandoned save may still delete older checkpoints
        if not self.args.checkpoint:
            return
        _ = self.signer  # a wrong key has to raise before the first step
        contents, prefix = scan(self.save_dir), self.args.file_prefix
        earlier, newest = with_prefix(contents, prefix), newest_entry(contents, prefix)
        if self._loaded_at is not None and newest is not None and newest.sequence > self._loaded_at:
            raise CheckpointError(
                f"another run has written {newest.path} since this one chose its checkpoint. Start again with "
                "resume='auto', which resumes from the newest checkpoint."
            )
        current = None if newest is None else newest.run_id
        elsewhere = self.loaded_from is not None and real_path(self.loaded_from) != real_path(self.save_dir)
        continues = resumed and not elsewhere
        if self._run_id is None and continues:
            self._run_id = self._loaded_run
        elif self._run_id is None and not resumed and newest in contents.begun and self._asked == "auto":
            self._run_id = current  # the same run, which was killed before its first checkpoint
        if self._run_id is None and not continues:
            self.begin_anew()
        begins, self._is_new = self._is_new, False
        if self.lease is not None:
            self.lease.set_run_id(self._run_id)
        if self._run_id is not None and self._run_id != current:
            begin = write_begin(self.save_dir, prefix, self._run_id, self.lease, contents.highest + 1)
            contents = contents.including(begin)
        self._loaded_at = None
        self._retention.apply(contents)
        if earlier and begins and not self.args.delete_existing_checkpoints:  # deleted ones are logged by name
            self._warn_of_earlier_run(earlier)

    def _warn_of_earlier_run(self, earlier: list[CheckpointInfo]) -> None:
        count = "a checkpoint" if len(earlier) == 1 else f"{len(earlier)} checkpoints"
        self._log(
            logging.WARNING,
            f"{self.save_dir} has {count} of an earlier run. This run neither resumes from there nor replaces any. "
            f"To resume from the newest write resume={str(earlier[0].path)!r}; to keep runs apart give this another "
            "output_dir, or another save_dir if that is set.",
        )

    @property
    def signer(self) -> Signer | None:
        """Signs checkpoints and exports with `args.sign_key`, which is read once; None without a key.

        Raises:
            MissingExtraError: `cryptography` is not installed.
            ConfigurationError: the file contains no Ed25519 key.
        """
        if self._signer is None and self.args.sign_key is not None:
            from trainstack.checkpointing.integrity.signing import checkpoint_signer

            self._signer = checkpoint_signer(self.args.sign_key)
        return self._signer

    @property
    def _retention(self) -> Retention:
        verify = (lambda: None) if self.lease is None else self.lease.verify
        return Retention(directory=self.save_dir, args=self.args, say=self._log, verify_owner=verify)

    @property
    def loaded_own(self) -> bool:
        """Whether the loaded checkpoint is in the directory of this run, so that the run there continues."""
        return self.loaded_from is not None and real_path(self.loaded_from) == real_path(self.save_dir)

    def checkpoints_below(self, folder: Path, run_id: str | None) -> list[CheckpointInfo]:
        """The checkpoints of a run with the folder `folder`, newest first."""
        place = Path(self.args.save_dir or folder / "checkpoints").absolute()
        return checkpoints_of_run(place, self.args.file_prefix, run_id)

    def written_by_runs(self, folder: Path) -> list[Path]:
        """The checkpoints and exports inside `folder` that were written by runs with this `file_prefix`."""
        places = [place for place in self._places if is_inside(place, folder)]
        return sorted(path for place in places for path in self._written(place))

    def delete_run(self, folder: Path, run_id: str | None) -> None:
        """Delete the checkpoints and exports of the run `run_id`, and last its beginnings, so that a kill leaves a
        trace.

        Inside `folder`, the folder of the run, those without a readable id are deleted too; all if `run_id` is None.
        """
        for place in self._places:
            inside = is_inside(place, folder)
            for path, owner in [*self._written(place).items(), *beginnings(scan(place), self.args.file_prefix).items()]:
                if (run_id is not None and owner == run_id) or (inside and (run_id is None or owner is None)):
                    temp_dirs.discard_dir(path)
        refresh_pointers(self.save_dir, self.args, self.last(), self.best(), self._log)

    @property
    def _places(self) -> list[Path]:
        return list(dict.fromkeys((self.save_dir, self.model_state_save_dir)))

    def _written(self, place: Path) -> dict[Path, str | None]:
        """The checkpoints and exports in `place` of runs with this `file_prefix`, and their run ids."""
        prefix = re.escape(self.args.file_prefix)
        pattern = re.compile(rf"({prefix}-(model-)?\d+(\..+)?|exception-\d+)")
        contents = scan(place)
        found: dict[Path, str | None] = {info.path: info.run_id for info in contents.intact}
        found |= dict.fromkeys([*contents.broken, *contents.newer])
        return {
            path: owner for path, owner in found.items() if pattern.fullmatch(name_of(path)) and not path.is_symlink()
        }

    def last(self) -> CheckpointInfo | None:
        """The newest checkpoint of this run in `save_dir` whose files exist with the right sizes, or None."""
        return retention.newest_of(checkpoints_of_run(self.save_dir, self.args.file_prefix))

    def best(self) -> CheckpointInfo | None:
        """The checkpoint with the best finite value of `args.monitor`, or None. Only manifests are read."""
        return retention.best_of(checkpoints_of_run(self.save_dir, self.args.file_prefix), self.args)

    def is_due(self, index: int, force: bool) -> bool:
        """Whether saving is enabled and a save with `index` is due or forced."""
        return self.args.checkpoint and (force or index % self.args.epochs_between == 0)

    def save(self, checkpoint_state: Checkpoint, index: int, force: bool = False) -> str | None:
        """Write `checkpoint_state` if a save is due, replacing a checkpoint of the same name.

        The name consists of the prefix and the global step, or the index if the step is not known. It returns when
        everything is on the disk; with `async_save` when the state is copied, after waiting for the previous save. A
        thread reads back a large checkpoint, and deletes older ones afterwards. `poll`, `finish`, or the next save or
        load raises a failure in the background.
        """
        if not self.is_due(index, force):
            return None
        started = time.monotonic()
        self._wait_for_last()
        name, checkpoint = self._named(checkpoint_state, index)
        payload = replace(pack(checkpoint), sign=self.signer)
        self._warn_missing_monitor(checkpoint_state, force)
        if self.args.async_save:
            copy = payload.copy_into(self._buffers)

            def write(abandoned: threading.Event) -> None:
                with self._logging_failure(name):
                    self._retention.apply(self._commit(copy, name, abandoned))
                self._last_save_s = time.monotonic() - started

            self._background.start(f"saving {name}", write)
        else:
            self._retain(self._commit(payload, name), name, payload.size)
        return str(self.save_dir / name)

    def _named(self, checkpoint_state: Checkpoint, index: int) -> tuple[str, Checkpoint]:
        """The name of the next checkpoint, and its state with the id of the run. It prepares the directory."""
        self.prepare()
        step, run_id = checkpoint_state.global_step, self.run_id
        name = self._free_name(f"{index:06d}" if step is None else f"{step:09d}", run_id)
        checkpoint = replace(checkpoint_state, run_id=run_id)
        return name, retention.preserve_pin(checkpoint, self.save_dir / name, self.args.file_prefix)

    def _retain(self, contents: Contents, name: str, size: int) -> None:
        """Delete checkpoints that need not be kept; in the background if that reads much."""
        if size > LARGE and self._retention.reads_back:
            self._background.start(f"verifying {name}", lambda _: self._retention.apply(contents))
        else:
            self._retention.apply(contents)

    def save_sharded(self, checkpoint_state: Checkpoint, index: int, force: bool, ranks: Ranks) -> str | None:
        """`save` for a call on all ranks, each of which writes its rows of the sharded tensors.

        Either all parts become one checkpoint, or nothing does, and all ranks raise. With `async_save` each rank copies
        its rows and writes them in a thread; the main process commits after all have written theirs.

        Args:
            checkpoint_state: the state of this rank.
            index: as for `save`.
            force: as for `save`.
            ranks: the communication between the ranks.
        """
        if not self.is_due(index, force):
            return None
        started = time.monotonic()
        payload, layout = together(ranks, lambda: self._pack_rows(checkpoint_state, ranks))
        opened: list[tuple[ShardedDirectory, Payload]] = []

        def begin() -> list[str]:
            name, checkpoint = self._named(checkpoint_state, index)
            self._warn_missing_monitor(checkpoint_state, force)
            directory = ShardedDirectory(self.save_dir, name, payload.size * ranks.size)
            facts = replace(payload_of(checkpoint, payload.parts, payload.texts), sign=self.signer)
            opened.append((directory, facts))
            return [name, str(directory.path)]

        try:
            name, temporary = ranks.on_main(begin, "beginning a checkpoint")
        except BaseException:
            for directory, _ in opened:  # the other ranks have not got its name
                directory.discard()
            raise

        def write(abandoned: threading.Event) -> Contents | None:
            failure = report_part(ranks, Path(temporary), payload.parts, abandoned)
            return self._commit_parts(*opened.pop(), layout, ranks, abandoned, failure) if opened else None

        if not self.args.async_save:
            self._write_sharded(write, name, payload.size * ranks.size, ranks)
            return str(self.save_dir / name)

        def write_aside(abandoned: threading.Event) -> None:
            with self._logging_failure(name):
                contents = write(abandoned)
                self._last_save_s = time.monotonic() - started
                if contents is not None:
                    self._retention.apply(contents)

        self._background.start(f"saving {name}", write_aside)
        return str(self.save_dir / name)

    def _pack_rows(self, checkpoint: Checkpoint, ranks: Ranks) -> tuple[Payload, Layout]:
        """The data that this rank writes, copied if it is written in the background. It waits for the previous save."""
        self._wait_for_last()
        payload, layout = pack_rows(checkpoint, ranks.rank, ranks.size)
        return (payload.copy_into(self._buffers) if self.args.async_save else payload), layout

    def _write_sharded(
        self, write: Callable[[threading.Event], Contents | None], name: str, size: int, ranks: Ranks
    ) -> None:
        """Write the parts of all ranks now. The others wait for the main process, which commits."""

        def commit() -> None:
            contents = write(threading.Event())
            assert contents is not None
            self._retain(contents, name, size)

        if ranks.rank != 0:
            write(threading.Event())
        ranks.on_main(commit, "saving a checkpoint")

    def _commit_parts(
        self,
        directory: ShardedDirectory,
        payload: Payload,
        layout: Layout,
        ranks: Ranks,
        abandoned: threading.Event,
        failure: Exception | None,
    ) -> Contents:
        """Commit the parts of all ranks, on the main process, or discard them after a failure of any part."""
        try:
            if failure is not None:
                raise failure
            reports = wait_for_parts(ranks, directory.path, abandoned)
            contents = scan(self.save_dir)
            path = directory.commit(payload, reports, layout, contents.highest + 1, self.lease)
        finally:
            directory.discard()
        return self._note_commit(path, contents)

    @contextmanager
    def _logging_failure(self, name: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._log(logging.ERROR, f"saving {name} in the background failed: {error}")  # `poll` may never be called
            raise

    def _commit(self, payload: Payload, name: str, abandoned: threading.Event | None = None) -> Contents:
        """Write a checkpoint. Returns the contents of the directory afterwards."""
        contents = scan(self.save_dir)  # once for each save, because it reads all manifests
        path = commit(payload, self.save_dir, name, abandoned, self.lease, contents.highest + 1)
        return self._note_commit(path, contents)

    def _note_commit(self, path: Path, before: Contents) -> Contents:
        """Report a checkpoint that is safe, and begin to scrub an older one if one is due."""
        self._log(logging.INFO, f"saved {path}")
        self.on_commit(path)
        contents = before.including(path)
        if self._scrub is not None:
            self._scrub.start(self.save_dir, contents.intact)
        return contents

    def _wait_for_last(self) -> None:
        """Wait for a save in the background, and log the time."""
        started, busy = time.perf_counter(), self._background.is_busy
        self._background.wait()
        if busy:
            self._log(logging.INFO, f"waited {time.perf_counter() - started:.2f} s for the save before")

    def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake` from the writing thread when a save in the background has ended."""
        self._background.wake = wake

    @property
    def last_save_s(self) -> float | None:
        """Seconds of the last save with `async_save` until it was on the disk; None before the first one."""
        return self._last_save_s

    def poll(self) -> None:
        """Raise the error of a failed save in the background."""
        self._background.poll()

    def finish(self) -> None:
        """Wait until everything is on the disk, and release the memory of copies."""
        try:
            self._background.wait()
        finally:
            self._buffers.release()
            if self._scrub is not None:
                self._scrub.stop()

    def abandon(self) -> None:
        """Stop writing. The unfinished directory is deleted, or is never read."""
        self._background.abandon()
        if self._scrub is not None:
            self._scrub.stop()

    def save_aside(self, checkpoint_state: Checkpoint, name: str) -> str | None:
        """Write `checkpoint_state` as `name`. It is loaded only by its name."""
        if not self.args.checkpoint:
            return None
        self._wait_for_last()
        self.prepare()
        payload = replace(pack(replace(checkpoint_state, run_id=self.run_id)), sign=self.signer)
        return str(commit(payload, self.save_dir, name, lease=self.lease))

    def save_model(
        self,
        model_state: dict[str, Any],
        index: int,
        *,
        plan: dict[str, Any] | None = None,
        global_step: int | None = None,
        metadata: dict[str, Any] | None = None,
        lineage: dict[str, Any] | None = None,
    ) -> str | None:
        """Write an export of `model_state`. `load` never resumes from it.

        The name consists of the prefix and the global step, or the index if the step is not known. An existing export
        of other weights or of another run with this name is not replaced: the new one gets a number at the end.
        """
        if not self.args.checkpoint:
            return None
        self._wait_for_last()
        directory = self.model_state_save_dir
        self._clear(directory) if directory != self.save_dir else self.prepare()
        about = {**(metadata or {}), "index": index}
        first = self._name(f"model-{index:06d}" if global_step is None else f"model-{global_step:09d}")
        name, before, number = first, None, 1
        while os.path.lexists(directory / name):
            before, number = directory / name, number + 1
            name = f"{first}.{number}"
        owner: dict[str, Any] = {"run_id": self.run_id, "lease": self.lease, "lineage": lineage, "sign": self.signer}
        path = write_model(model_state, directory, name, about, plan=plan, global_step=global_step, **owner)
        if before is not None and _same_export(before, path):
            temp_dirs.discard_dir(path)
            path = before
        self._log(logging.INFO, f"saved {path}")
        return str(path)

    def load(self, resume: bool | str | os.PathLike[str] | None = None) -> Checkpoint:
        """Return the state to continue from; see `AbstractCheckpointer.load`.

        The newest checkpoint is the one that was written last, regardless of its step. When it is searched, damaged
        ones are logged as warnings and skipped; if all are damaged, that is an error, also for `"auto"`. A named
        checkpoint is loaded or refused. Checkpoints with another prefix do not count.

        Raises:
            CheckpointNotFoundError, CheckpointDamagedError: see `AbstractCheckpointer.load`.
            CheckpointMismatchError: it is a model export, a single file, or of a newer trainstack.
            ConfigurationError: `resume` is none of these, or `delete_existing_checkpoints` would delete the checkpoint
                to load.
        """
        return self._load(resume, read_checkpoint)[0]

    def load_deferred(self, resume: bool | str | os.PathLike[str] | None = None) -> tuple[Checkpoint, Path | None]:
        """`load`, with the path of the checkpoint. Its large tensors are verified now, and read at their use."""
        if type(self).load is not DefaultCheckpointer.load:
            return self.load(resume), None
        return self._load(resume, read_deferred)

    def _load(
        self, resume: bool | str | os.PathLike[str] | None, read: Callable[[Path], Checkpoint]
    ) -> tuple[Checkpoint, Path | None]:
        self._background.wait()
        load_dir = self.save_dir
        if self.args.load_dir:
            load_dir = folder_at(self._resolve_directory("load_dir", self.args.load_dir), self.args.file_prefix)
        self._asked = resume
        newest = newest_entry(scan(self.save_dir), self.args.file_prefix)
        self._loaded_at = 0 if newest is None else newest.sequence
        finder = CheckpointFinder(self.args, load_dir, self.save_dir, self._log, self.known_run, read)
        checkpoint = finder.load(resume)
        self.loaded_from = self.loaded_from if finder.found is None else finder.found.parent
        self._run_id, self._loaded_run = None, checkpoint.run_id
        return checkpoint, finder.found

    def _warn_missing_monitor(self, checkpoint: Checkpoint, force: bool) -> None:
        """Warn once that a checkpoint cannot be the best, if the user requested the best and none had a value."""
        args, metrics = self.args, (checkpoint.metadata or {}).get("metrics", {})
        if args.monitor in metrics:
            self._missed = True  # it is measured, if not in each save
        elif self.asks_for_best and not self._missed and not force:
            self._missed = True
            self._log(
                logging.WARNING,
                f"{args.monitor!r} was not measured at global step {checkpoint.global_step}, so the checkpoint cannot "
                f"be the best. Measured there: {', '.join(sorted(metrics)) or 'nothing'}. Set monitor to one of "
                "those, or log it after each epoch.",
            )

    def _clear(self, directory: Path) -> bool:
        """Delete leftovers in `directory`. Returns False if that was done before."""
        if directory in self._prepared:
            return False
        self._prepared.add(directory)
        temp_dirs.clear_temp_dirs(directory)
        return True

    def _resolve_directory(self, field: str, value: str | os.PathLike[str]) -> Path:
        return self._directories.setdefault(field, Path(value).absolute())

    def _name(self, number: str) -> str:
        name = f"{self.args.file_prefix}-{number}"
        return f"{name}.{self.args.file_ext}" if self.args.file_ext else name

    def _free_name(self, number: str, run_id: str | None) -> str:
        """The name of a checkpoint. If an earlier run has one with this name, the run id is appended."""
        name = self._name(number)
        before = read_entry(self.save_dir / name)
        if not isinstance(before, CheckpointInfo) or run_id is None or before.run_id == run_id:
            return name
        return f"{name}.{run_id[:8]}"

    def _log(self, level: int, message: str) -> None:
        least = self._run_level if self.args.log_level is None else self.args.log_level.upper()
        if level >= logging.getLevelName(least):
            _logger.log(level, message)


def _same_export(one: Path, other: Path) -> bool:
    """Whether two exports are from the same run and have equal files."""
    try:
        first, second = read_manifest(one), read_manifest(other)
        return (first.files, first.run_id) == (second.files, second.run_id)
    except CheckpointError:
        return False
