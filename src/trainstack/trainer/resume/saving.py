"""`Saver` saves on the main process and reports the result to all ranks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from trainstack._files import is_address, local_path
from trainstack.checkpointing import (
    Checkpoint,
    CheckpointInfo,
    DefaultCheckpointer,
    WarmStartReport,
    lease_file,
    warm_start,
    write_checkpoint,
)
from trainstack.checkpointing.directory import read_entry
from trainstack.checkpointing.integrity.lineage import Lineage
from trainstack.checkpointing.reading import read_deferred, read_deferred_model
from trainstack.checkpointing.remote.fetching import fetch
from trainstack.checkpointing.remote.mirror import Mirror
from trainstack.checkpointing.sharded.rows import divides_rows
from trainstack.checkpointing.verification import open_checkpoint
from trainstack.checkpointing.weights import read_weights
from trainstack.errors import CheckpointError, LeaseError, annotate
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.shards import ShardGatherer, gather_shards, has_shards, states_of
from trainstack.trainer.events import Event
from trainstack.trainer.resume.leasing import DirectoryOwner, writes_files
from trainstack.trainer.resume.lineage import ancestors_of, begin_lineage
from trainstack.trainer.resume.loading import LOADING, Reopen, load_on_all, with_own_values
from trainstack.trainer.resume.rank_zero import wait_for_all_ranks, wait_for_rank_zero
from trainstack.trainer.resume.resume_changes import note_changes
from trainstack.trainer.resume.sharded_saving import save_by_rows, saves_by_rows
from trainstack.trainer.resume.streamed_start import can_stream, load_streamed
from trainstack.trainer.run_directory import shortest
from trainstack.trainer.run_record import read_record


class SaveTimeBudget:
    """Warns once of saves that take so long that a scheduler may kill the run during its last save.

    Attributes:
        seconds: the time from the signal to the kill: as given, from the environment of the launcher, or 30.
    """

    seconds: float

    def __init__(self, seconds: float | None, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        with suppress(ValueError):
            seconds = seconds or float(environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", ""))
        self.seconds = seconds or 30.0  # the default of torchrun, of Kubernetes, and of SLURM's KillWait
        self._warned = False

    def record(self, seconds: float, log: RunLogger) -> None:
        """Record a save that took `seconds`."""
        if seconds <= self.seconds / 2 or self._warned:  # the other half is for the current step
            return
        self._warned = True
        log.warning(
            f"saving a checkpoint took {seconds:.1f} s. A run that has to stop is killed after {self.seconds:g} s, "
            "and must finish its step before it saves. Request more time (torchrun --shutdown-timeout, "
            "launch(grace_s=...), SLURM --signal=USR1@<seconds>, terminationGracePeriodSeconds), and write it in "
            "TrainerArguments(stop_grace_s=...)."
        )


Result = TypeVar("Result")


TakeCheckpoint = Callable[..., Checkpoint]
"""`take_checkpoint` of `run_states.py`, with the arguments that the trainer binds."""


class Saver:
    """Saves and loads for one trainer. All processes call its methods together, unless a method says otherwise.

    Attributes:
        pending_save: whether a checkpoint is due at the next step boundary.
        pending_pin: whether the next checkpoint is exempt from retention.
        pending_paths: further paths to write to, each with "world" or "node" for the processes that write.
        saved_at: global step and epoch of the newest checkpoint, also while it is being written; None after a failure.
        save_time_budget: compares the time of saves with the time until a kill.
        saved_as: the path of the newest checkpoint; None if the checkpointer does not return it.
        exported_as: the path of the newest export; None if the checkpointer does not return it.
        owner: acquires the lease of the directories.
    """

    save_time_budget: SaveTimeBudget
    owner: DirectoryOwner
    pending_pin: bool

    def __init__(self, context: RunContext, take: TakeCheckpoint) -> None:
        self._context, self._take_checkpoint = context, take
        self.pending_save = self.pending_pin = False
        self.pending_paths: list[tuple[str | os.PathLike[str], str]] = []
        self.saved_at: tuple[int, int] | None = None
        self._training = self._is_claimed = self._continues = False
        self.saved_as: str | None = None
        self.exported_as: str | None = None
        self.save_time_budget = SaveTimeBudget(context.args.stop_grace_s)
        self.owner = DirectoryOwner(context, self.run_on_rank_zero)
        if isinstance(context.checkpointer, DefaultCheckpointer):
            context.checkpointer.begin_trainer(log_level=context.args.log_level, resume=context.args.resume)

    def save(self, force: bool, *, unless_saved: bool = False) -> None:
        """Write a checkpoint of the run at a step boundary, if it is due or `force` is True.

        With `unless_saved`, nothing is written if the current step and epoch are already saved.
        """
        context, state = self._context, self._context.state
        self.save_requested()
        place = (state.global_step, state.epoch)
        if (unless_saved and place == self.saved_at) or not context.checkpointer.is_due(state.last_epoch, force):
            return
        began = time.monotonic()
        with self.owner.held_for_writing():
            self.claim_directory()
            with context.events.trained_weights():
                by_rows = saves_by_rows(context)
                checkpoint, gatherer = self._capture(by_rows=by_rows)
                if by_rows:
                    self.saved_as = self._hand_over_rows(checkpoint, force)
                else:
                    hand_over = partial(self._hand_over, checkpoint, force)
                    self.saved_as = self.run_on_rank_zero(hand_over, "saving a checkpoint", gatherer)
            self.saved_at = place
            if not self._training:
                self.finish()
        self._record_save_time(time.monotonic() - began)
        self._announce_saved()

    def _announce_saved(self) -> None:
        """Call the subscribers of the main process for checkpoints that are now completely written."""
        saved = self._context.directory.saved_paths
        while saved and self._context.world.is_main:
            path = saved.popleft()
            self._context.note_saved(path)
            self._context.events.fire(Event.CHECKPOINT_SAVED, path)

    def _hand_over_rows(self, checkpoint: Checkpoint, force: bool) -> str | None:
        self.run_on_rank_zero(self._prepare_save, "saving a checkpoint")
        try:
            return save_by_rows(self._context, checkpoint, force, self.run_on_rank_zero)
        except Exception:
            self.saved_at = None
            raise

    def _prepare_save(self) -> None:
        self.owner.check()
        self._context.sync_logs()  # a checkpoint is not more durable than the logs that belong to it

    def _hand_over(self, checkpoint: Checkpoint, force: bool) -> str | None:
        self._prepare_save()
        path = self._context.checkpointer.save(checkpoint, self._context.state.last_epoch, force)
        if not isinstance(self._context.checkpointer, DefaultCheckpointer):  # it notes its saves when they are complete
            self._context.directory.note_save(path)
        return path

    def _capture(self, *, everywhere: bool = False, by_rows: bool = False) -> tuple[Checkpoint, ShardGatherer | None]:
        """The current state, and an object that gathers its sharded tensors while the main process writes them.

        If other processes write too (`everywhere`), or a subscriber receives the checkpoint, the tensors are gathered
        before, on each process that needs them. With `by_rows`, each process writes its rows: tensors that are divided
        by rows remain sharded, and the others are gathered on all processes.
        """
        context = self._context
        pinned, self.pending_pin = self.pending_pin, False
        checkpoint, gatherer = self._take_checkpoint(pinned=pinned, everywhere=everywhere or by_rows), None
        if by_rows:
            states = gather_shards(states_of(checkpoint), keep=True, which=lambda tensor: not divides_rows(tensor))
            checkpoint = replace(checkpoint, **states)
        elif has_shards(context.module):
            keep = context.world.is_main or (everywhere and context.world.local_rank == 0)
            if everywhere or context.events.has_foreign(Event.SAVE_CHECKPOINT):
                main_of = None if everywhere else context.world
                checkpoint = replace(checkpoint, **gather_shards(states_of(checkpoint), keep=keep, main_of=main_of))
            else:
                gatherer = ShardGatherer(states_of(checkpoint), context.world)
                checkpoint = replace(checkpoint, **gatherer.state)
        context.events.fire(Event.SAVE_CHECKPOINT, checkpoint)
        return checkpoint, gatherer

    def save_requested(self) -> None:
        """Write the checkpoints that were requested with a path, without the checkpointer."""
        asked, self.pending_paths = self.pending_paths, []
        world = self._context.world
        for path, once in asked:
            with self._context.events.trained_weights():
                (checkpoint, gatherer), target = self._capture(everywhere=once != "world"), local_path(path).absolute()
                write = partial(self._write_at, target, checkpoint)
                if once == "world":
                    self.run_on_rank_zero(write, "saving a checkpoint", gatherer)
                    continue
                failure = None
                with wait_for_all_ranks(world, "saving a checkpoint", self._context.args.rank_zero_timeout_s):
                    try:
                        if world.local_rank == 0:
                            write()
                    except Exception as error:
                        failure = error
                world.comm.raise_if_any(failure, "saving a checkpoint")

    def _write_at(self, target: Path, checkpoint: Checkpoint) -> None:
        """Write `checkpoint` as `target`, unless that would interfere with another run.

        Raises:
            CheckpointError: `target` is a checkpoint of another run, or another process owns its folder.
        """
        checkpointer, lease, own, sign = self._context.checkpointer, self._context.lease, None, None
        if isinstance(checkpointer, DefaultCheckpointer):
            own, sign = checkpointer.run_id, checkpointer.signer
        before = read_entry(target)
        if isinstance(before, CheckpointInfo) and before.run_id not in (None, own):
            raise CheckpointError(
                f"save_checkpoint(path={str(target)!r}): a checkpoint of another run ({before.run_id}) has this name "
                "and is not replaced. Write another path."
            )
        seen = None if lease is not None and lease.owns(target.parent) else lease_file.look(target.parent)
        if self._context.world.is_main and seen is not None and not seen.is_free:
            raise CheckpointError(
                f"save_checkpoint(path={str(target)!r}): {seen.words} owns {target.parent}, the folder of a run. Write "
                "a path in another folder."
            )
        write_checkpoint(checkpoint, target.parent, target.name, sign=sign)

    def stop_message(self) -> str:
        """The step after which the run was stopped, the path of its checkpoint, and the way to resume."""
        state = self._context.state
        stood = f"after global step {state.global_step}"
        if self.saved_at != (state.global_step, state.epoch):
            return f"{stood}. Nothing was saved, because the checkpointer saves nothing"
        where = "Saved" if self.saved_as is None else f"Saved {shortest(self.saved_as)}"
        again = "run it again"
        if self._context.args.resume != "auto":
            again += " with resume='auto', or --resume auto"
        return f"{stood}. {where}; to resume, {again}"

    def choose_directory(self, *, to_train: bool) -> None:
        """Choose the folder of the run on the main process, for all processes. `to_train` also acquires the lease."""
        directory = self._context.directory
        if not directory.is_settled:
            choose = partial(self._choose_directory, to_train)
            directory.settle(Path(self.run_on_rank_zero(choose, "choosing the folder of the run")))
        if to_train:
            self.owner.take()

    def _choose_directory(self, to_train: bool) -> str:
        """Choose a folder. Choose again if another process has just begun to train in the chosen one."""
        context, taken = self._context, list[Path]()
        directory, resume = context.directory, context.args.resume
        while True:
            folder = Path(directory.choose(context.args, context.log.info, taken))
            directory.settle(folder)
            try:
                if to_train:
                    self.owner.acquire()
                return str(folder)
            except BaseException as error:
                directory.unsettle()
                is_chosen = isinstance(resume, bool) or resume in ("auto", "last", "best")
                is_free = read_record(folder) is None or self.owner.is_interrupted()
                if not isinstance(error, LeaseError) or not is_chosen or is_free:
                    raise
            taken.append(folder)

    def claim_directory(self) -> None:
        """Claim the folder for this run before anything is written. See `RunDirectory.claim`."""
        if not self._is_claimed:
            self.run_on_rank_zero(self._claim, "claiming the folder of the run")
            self._is_claimed = True

    def _claim(self) -> None:
        context = self._context
        count = context.history.flushed_count
        context.directory.claim(context.args, continues=self._continues, earlier_records=count)

    def load(self) -> Checkpoint:
        """Load the checkpoint for `args.resume`; an empty checkpoint if there is none.

        Each large tensor of the module, the optimizers and the callbacks is a `DeferredTensor`.
        """
        context = self._context
        asked = () if context.args.resume is False else (context.directory.resume_from or context.args.resume,)
        lineage = Lineage()

        def load() -> tuple[Checkpoint, Path | None]:
            nonlocal lineage
            found, path = self._load(*asked)
            lineage = ancestors_of(found, path, context.args.resume_mode)
            return found, path

        loaded = self._load_on_all(load, read_deferred)
        if not loaded.is_empty:  # else the weights of an earlier evaluation remain the parent
            begin_lineage(context, Lineage.from_json(self.run_on_rank_zero(lineage.to_json, LOADING)))
        checkpointer = context.checkpointer
        own = checkpointer.loaded_own if isinstance(checkpointer, DefaultCheckpointer) else True
        self._continues = own and not loaded.is_empty and context.args.resume_mode == "full"
        return with_own_values(loaded, context.world)

    def _load(self, *asked: bool | str | os.PathLike[str]) -> tuple[Checkpoint, Path | None]:
        context, mirror = self._context, self._context.directory.mirror
        asked = tuple(_located(one, mirror) for one in asked)
        if mirror is not None and not context.args.overwrite and (asked or context.lease is not None):
            mirror.pull(asked[0] if asked else False)
        self._context.directory.look_for_recorded_run()
        checkpointer = self._context.checkpointer
        if isinstance(checkpointer, DefaultCheckpointer):
            return checkpointer.load_deferred(*asked)
        return checkpointer.load(*asked), None

    def load_weights(self, path: Path) -> WarmStartReport:
        """Load the matching tensors at `path` into the module. All ranks call this. User code gets all at once."""
        context = self._context
        if can_stream(context.module):
            return load_streamed(context, self.run_on_rank_zero, path)
        weights = self.run_on_rank_zero(lambda: read_weights(path), "reading the initial weights")
        return warm_start(context.module, weights, strict=context.args.init_weights_strict, name=os.fspath(path))

    def load_model(self, path: str | os.PathLike[str]) -> Any:
        """The module's state in the export or checkpoint at `path`, on all ranks; large tensors are deferred."""

        def load() -> tuple[Checkpoint, Path]:
            return read_deferred_model(path), open_checkpoint(path)[0]

        return self._load_on_all(load, read_deferred_model).module_interface_state

    def _load_on_all(self, load: Callable[[], tuple[Checkpoint, Path | None]], reopen: Reopen) -> Checkpoint:
        context = self._context
        return load_on_all(load, reopen, context.world, self.run_on_rank_zero, context.args.rank_zero_timeout_s)

    def fetch(self, address: str) -> Path:
        """The local copy of the file or folder at `address`. The main process downloads it."""
        return Path(self.run_on_rank_zero(lambda: str(fetch(address)), f"downloading {address}"))

    def finish_uploads(self, *, is_signalled: bool = False) -> str | None:
        """Wait for the upload of the run, if its folder has an address. Returns a sentence about it.

        After a signal it waits for half of the time until the kill, and a failure does not raise.

        Raises:
            CheckpointError: not everything was uploaded. The local copy is complete.
        """
        mirror = self._context.directory.mirror
        if mirror is None:
            return None
        limit = self.save_time_budget.seconds / 2 if is_signalled else None
        problem = self.run_on_rank_zero(lambda: mirror.finish(limit), f"uploading to {mirror.store.address}")
        if problem is None:
            return f"uploaded: {mirror.store.address}"
        if is_signalled:
            return mirror.describe(problem)
        raise CheckpointError(mirror.describe(problem))

    def begin_run(self, wake: Callable[[], None], *, resumed: bool) -> None:
        """Begin a run with the checkpointer. From now on saves may continue in the background.

        `wake` makes the loop call `poll` after the current step. Any thread may call it.
        """
        self._training = True

        def begin() -> None:
            if writes_files(self._context):
                self._claim()
            self._context.directory.begin(self._context.args)
            note_changes(self._context)

        self.run_on_rank_zero(begin, "claiming the folder of the run")
        if self._context.world.is_main:
            self._context.checkpointer.watch(wake)
            self.owner.watch(wake)
        self.run_on_rank_zero(lambda: self._context.checkpointer.begin_run(resumed=resumed), "beginning the run")

    def finish(self) -> None:
        """Wait until all checkpoints are completely written, and raise the error of a failed one."""
        self.run_on_rank_zero(self._context.checkpointer.finish, "finishing the checkpoints")
        if not self._context.world.is_main and saves_by_rows(self._context):
            self._context.checkpointer.finish()  # the part of this process was written in the background, too
        self._training = False
        self._record_save_time()
        self._announce_saved()

    def finish_after(self, error: BaseException) -> None:
        """Wait for the saves of the main process when training ends by `error`. Each process calls this separately.

        A failure is added to `error` as a note. An interrupt during the wait abandons the unfinished saves.
        """
        self._training = False
        if not self._context.world.is_main:
            return
        try:
            self._context.checkpointer.finish()
        except BaseException as failure:
            self.saved_at = None
            if not isinstance(failure, Exception):
                self._context.checkpointer.abandon()
                raise
            annotate(error, f"also, a checkpoint is missing: {failure}")

    def poll(self) -> None:
        """Raise the error of a failed save in the background, only on the main process.

        The other processes do not call it at the same step, so it uses no collective.
        """
        if not self._context.world.is_main:
            return
        try:
            self.owner.check()
            self._context.checkpointer.poll()
        except Exception:
            self.saved_at = None
            raise
        self._record_save_time()
        self._announce_saved()

    def _record_save_time(self, seconds: float = 0.0) -> None:
        """Warn if saving takes too long: `seconds` in the loop, or the last save until it was complete."""
        context = self._context
        self.save_time_budget.record(max(seconds, context.checkpointer.last_save_s or 0.0), context.log)

    def run_on_rank_zero(
        self, function: Callable[[], Result], what: str, gatherer: ShardGatherer | None = None
    ) -> Result:
        """Call `function` on the main process. The others get its result, or raise if it fails.

        The others wait in the store, not in a collective, so the time that the main process needs for its files does
        not count towards the time limit of collectives. With a `gatherer`, they take part in gathering the sharded
        tensors that the main process uses.

        Raises:
            PeerError: the main process failed, or has not finished after `args.rank_zero_timeout_s`.
        """
        world, longest_s = self._context.world, self._context.args.rank_zero_timeout_s
        result, failure = None, None
        answer = None if gatherer is None else gatherer.answer
        with wait_for_rank_zero(world, what, longest_s, answer) as ask:
            if world.is_main:
                try:
                    with nullcontext() if gatherer is None else gatherer.serving(ask):
                        result = function()
                except Exception as error:
                    failure = error
        try:
            return cast(Result, world.comm.broadcast_outcome(failure, result, what))
        except Exception:
            self.saved_at = None  # the failure may be that of an earlier save in the background
            raise


def _located(resume: bool | str | os.PathLike[str], mirror: Mirror | None) -> bool | str | os.PathLike[str]:
    """`resume` with a local path instead of an address. For the address of the run, it is the result of `pull`."""
    if isinstance(resume, bool) or not is_address(resume):
        return resume
    address = os.fspath(resume)
    if mirror is None or not f"{address}/".startswith(f"{mirror.store.address}/"):
        return fetch(address)
    place = address[len(mirror.store.address) :].strip("/")
    if place in ("", "checkpoints", "checkpoints/last", "checkpoints/best"):
        return "best" if place.endswith("best") else True
    return fetch(address, mirror.folder / Path(place).parent)


def save_after_exception(error: BaseException, context: RunContext, take: TakeCheckpoint, within_s: float) -> None:
    """Write a checkpoint of the main process with a separate name. Logs the outcome and raises nothing.

    The weights are usually those of the last finished step, but after an exception this is not certain. The other
    processes may have ended, so no communication takes place. The device may wait for them forever, so the save ends
    after at most `within_s` seconds.
    """
    log = context.log
    if not context.world.is_main or not isinstance(error, Exception) or isinstance(error, CheckpointError):
        return  # after a CheckpointError another save would fail, too

    def save() -> None:
        try:
            checkpoint = take(after=error)
            step = context.state.global_step
            path = context.checkpointer.save_aside(checkpoint, f"exception-{step:09d}")
        except Exception as failure:
            log.warning(f"could not save after the exception: {type(failure).__name__}: {failure}")
        else:
            if path is not None:
                log.warning(f"saved {path} after the exception for inspection. A run resumes from it only by its path.")

    thread = threading.Thread(target=save, name="trainstack-after-exception", daemon=True)
    thread.start()
    thread.join(within_s)
    if thread.is_alive():
        log.warning(f"could not save after the exception within {within_s:g} s; the device may be stuck.")
