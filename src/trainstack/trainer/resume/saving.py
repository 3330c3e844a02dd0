"""`Saver` saves on the main process and reports the result to all ranks."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from torch import Tensor

from trainstack._files import is_address, local_path, remote_address
from trainstack._keywords import keywords_taken
from trainstack.backends import Communicator, World
from trainstack.checkpointing import (
    Checkpoint,
    CheckpointInfo,
    DefaultCheckpointer,
    lease_file,
    list_checkpoints,
    push_to_hub,
    write_checkpoint,
)
from trainstack.checkpointing.abstract import LEFT_OUT
from trainstack.checkpointing.directory import read_entry
from trainstack.checkpointing.encoding import StateEncoder
from trainstack.checkpointing.remote.fetching import fetch, upload_export
from trainstack.checkpointing.remote.mirror import Mirror
from trainstack.checkpointing.weights import find_part, read_weights, require_hub, write_export
from trainstack.errors import CheckpointError, ConfigurationError, LeaseError, PeerError, annotate
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.module_extras import EXTRAS
from trainstack.trainer.core.plan import TrainingPlan
from trainstack.trainer.core.random_state import capture_rng
from trainstack.trainer.events import Event
from trainstack.trainer.resume.leasing import DirectoryOwner, writes_files
from trainstack.trainer.resume.module_generators import GENERATORS, get_generator_states, warn_of_unreachable
from trainstack.trainer.resume.own_states import CALLBACKS, DIFFERING, LAYERS, MODULE, USER, comparable
from trainstack.trainer.resume.rank_states import describe_place, divide_by_rank
from trainstack.trainer.run_directory import shortest
from trainstack.trainer.run_record import read_record
from trainstack.trainer.torch_settings import cpu_settings, merge_settings, precision_in_force


class SaveTimeBudget:
    """Warns, once, of saves that take so long that a run may be killed in the middle of its last one.

    Attributes:
        seconds: from the signal to the kill, as given, as the launcher says in `environ`, or 30.
    """

    seconds: float

    def __init__(self, seconds: float | None, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        with suppress(ValueError):
            seconds = seconds or float(environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", ""))
        self.seconds = seconds or 30.0  # the default of torchrun, of Kubernetes, and of SLURM's KillWait
        self._warned = False

    def record(self, seconds: float, log: RunLogger) -> None:
        """A save took `seconds`."""
        if seconds <= self.seconds / 2 or self._warned:
            return
        self._warned = True
        log.warning(
            f"saving a checkpoint took {seconds:.1f} s. A run that has to stop is killed after {self.seconds:g} s, "
            "and has to finish its step before it saves. Ask for more time (torchrun --shutdown-timeout, "
            "launch(grace_s=...), SLURM --signal=USR1@<seconds>, terminationGracePeriodSeconds), and write it as "
            "TrainerArguments(stop_grace_s=...)."
        )


Result = TypeVar("Result")


TakeCheckpoint = Callable[..., Checkpoint]
"""`Run.take_checkpoint` with what the trainer adds to it."""


class Saver:
    """Saves and loads for one trainer; methods are called by all processes together, unless they say otherwise.

    Attributes:
        pending_save: whether a checkpoint waits for the next step boundary.
        pending_pin: whether the next checkpoint is to be kept for good.
        pending_paths: where else it is to go, and whether once for the world or for each node.
        saved_at: global step and epoch of the newest checkpoint, loaded, written or under way; None once one failed.
        save_time_budget: holds the time that saving takes against the time there is.
        saved_as: where the newest that was written lies, if the checkpointer said so.
        exported_as: where the newest export lies, if the checkpointer said so.
        owner: of the directories that the run writes.
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
        """Write a checkpoint of the run, which is at a step boundary, if it is due or `force` is True.

        With `unless_saved`, nothing is written if this very place was saved already.
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
                checkpoint = self._capture()
                self.saved_as = self.run_on_rank_zero(lambda: self._hand_over(checkpoint, force), "saving a checkpoint")
            self.saved_at = place
            if not self._training:
                self.finish()
        self._record_save_time(time.monotonic() - began)
        self._announce_saved()

    def _announce_saved(self) -> None:
        """Tell the subscribers of the main process which checkpoints have become safe."""
        saved = self._context.directory.saved_paths
        while saved and self._context.world.is_main:
            self._context.events.fire(Event.CHECKPOINT_SAVED, saved.popleft())

    def _hand_over(self, checkpoint: Checkpoint, force: bool) -> str | None:
        self.owner.check()
        self._context.sync_logs()  # a checkpoint is not more durable than the logs that belong to it
        path = self._context.checkpointer.save(checkpoint, self._context.state.last_epoch, force)
        if not isinstance(self._context.checkpointer, DefaultCheckpointer):  # which tells by itself when one is safe
            self._context.directory.note_save(path)
        return path

    def _capture(self) -> Checkpoint:
        pinned, self.pending_pin = self.pending_pin, False
        checkpoint = self._take_checkpoint(pinned=pinned)
        self._context.events.fire(Event.SAVE_CHECKPOINT, checkpoint)
        return checkpoint

    def save_requested(self) -> None:
        """Write checkpoints as the folders that were asked for, apart from the checkpointer."""
        asked, self.pending_paths = self.pending_paths, []
        world = self._context.world
        for path, once in asked:
            with self._context.events.trained_weights():
                checkpoint, target = self._capture(), local_path(path).absolute()
            if once == "world":
                self.run_on_rank_zero(partial(self._write_at, target, checkpoint), "saving a checkpoint")
                continue
            failure = None
            try:
                if world.local_rank == 0:
                    self._write_at(target, checkpoint)
            except Exception as error:
                failure = error
            world.comm.raise_if_any(failure, "saving a checkpoint")

    def _write_at(self, target: Path, checkpoint: Checkpoint) -> None:
        """Write `checkpoint` as `target`, unless that would interfere with another run.

        Raises:
            CheckpointError: `target` is a checkpoint of another run, or another process owns its folder.
        """
        checkpointer, lease = self._context.checkpointer, self._context.lease
        own = checkpointer.run_id if isinstance(checkpointer, DefaultCheckpointer) else None
        before = read_entry(target)
        if isinstance(before, CheckpointInfo) and before.run_id not in (None, own):
            raise CheckpointError(
                f"save_checkpoint(path={str(target)!r}): a checkpoint of another run has this name "
                f"(run {before.run_id}), and is not replaced. Write another path."
            )
        seen = None if lease is not None and lease.owns(target.parent) else lease_file.look(target.parent)
        if self._context.world.is_main and seen is not None and not seen.is_free:
            raise CheckpointError(
                f"save_checkpoint(path={str(target)!r}): {seen.words} owns {target.parent}, the folder of a run. Write "
                "a path in another folder."
            )
        write_checkpoint(checkpoint, target.parent, target.name)

    def stop_message(self) -> str:
        """After which step the run was stopped, where that is saved, and how to go on."""
        state = self._context.state
        stood = f"after global step {state.global_step}"
        if self.saved_at != (state.global_step, state.epoch):
            return f"{stood}. Nothing was saved, because the checkpointer saves nothing"
        where = "Saved" if self.saved_as is None else f"Saved {shortest(self.saved_as)}"
        again = "run it again"
        if self._context.args.resume != "auto":
            again += " with resume='auto', or --resume auto"
        return f"{stood}. {where}; to go on, {again}"

    def save_model(
        self,
        plan: TrainingPlan,
        path: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = False,
        part: str = "",
        card: Mapping[str, Any] | None = None,
    ) -> None:
        """Export the module's state and `plan` where the checkpointer puts exports, or to `path`, as `write_export`."""
        context, state = self._context, self._context.state
        about: dict[str, Any] = {"plan": plan.to_dict(), "global_step": state.global_step}
        about["metadata"] = {**metadata_of(context), "module": type(context.module).__name__}
        if context.stack.is_private:
            about["metadata"]["privacy statement"] = context.stack.privacy_statement().text  # for the README
        options: dict[str, Any] = {"part": part, "card": card, "run_id": context.directory.run_id}
        options["owner"] = find_part(context.module, part) if part else None
        with context.events.optimizer_modes.evaluation():
            module_state = dict(context.module.get_state())
            context.events.fire(Event.SAVE_MODEL, module_state)
            if path is None:
                module_state, left_out = context.frozen.split(module_state)
                about["metadata"] |= {LEFT_OUT: left_out} if left_out else {}
            self._write_model(module_state, about, options, path, overwrite)

    def _write_model(
        self,
        module_state: dict[str, Any],
        about: dict[str, Any],
        options: dict[str, Any],
        path: str | os.PathLike[str] | None,
        overwrite: bool,
    ) -> None:
        context = self._context

        def write() -> str | None:
            if path is None:
                self.owner.check()
                save = context.checkpointer.save_model
                return save(module_state, context.state.last_epoch, **keywords_taken(save, about))
            if is_address(path):
                address = remote_address("path", path)
                with tempfile.TemporaryDirectory(prefix="trainstack-") as folder:
                    made = write_export(module_state, Path(folder, address.rpartition("/")[2]), **about, **options)
                    upload_export(made, address, overwrite=overwrite)
            else:
                write_export(module_state, path, overwrite=overwrite, **about, **options)
            return self.exported_as

        with self.owner.held_for_writing() if path is None else nullcontext():
            if path is None and getattr(getattr(context.checkpointer, "args", None), "checkpoint", False):
                self.claim_directory()
            self.exported_as = self.run_on_rank_zero(write, "exporting the model")

    def push_to_hub(
        self,
        plan: TrainingPlan,
        repo_id: str,
        *,
        part: str,
        card: Mapping[str, Any] | None,
        include: Sequence[str],
        **options: Any,
    ) -> str:
        """Export to a temporary folder and upload that, with what to `include`; see `Trainer.push_to_hub`."""
        require_hub()
        self.finish()
        with tempfile.TemporaryDirectory(prefix="trainstack-") as folder:
            path = Path(folder) / repo_id.rpartition("/")[2]
            self.save_model(plan, path, part=part, card=card)

            def push() -> str:
                if "checkpoint" in include:
                    copytree(self._newest_own(), path / "checkpoint")
                if "logs" in include:
                    self._context.directory.copy_logs(path / "logs")
                return push_to_hub(path, repo_id, **options)

            return self.run_on_rank_zero(push, f"pushing to {repo_id}")

    def _newest_own(self) -> Path:
        """The newest checkpoint that this run has written."""
        checkpointer, run_id = self._context.checkpointer, self._context.directory.run_id
        found: list[CheckpointInfo] = []
        if isinstance(checkpointer, DefaultCheckpointer) and checkpointer.save_dir.is_dir():
            found = [one for one in list_checkpoints(checkpointer.save_dir) if one.kind == "checkpoint"]
        own = [one for one in found if one.run_id == run_id]
        if not own:
            raise ConfigurationError(
                "push_to_hub(include=('checkpoint',)): this run has saved no checkpoint. Call trainer.save_checkpoint("
                "force=True) before, with DefaultCheckpointerArguments(checkpoint=True)."
            )
        return own[-1].path

    def choose_directory(self, *, to_train: bool) -> None:
        """Let the main process choose the folder of the run, and tell all; own the directories to train in them."""
        directory = self._context.directory
        if not directory.is_settled:
            choose = partial(self._choose_directory, to_train)
            directory.settle(Path(self.run_on_rank_zero(choose, "choosing the folder of the run")))
        if to_train:
            self.owner.take()

    def _choose_directory(self, to_train: bool) -> str:
        """Choose again where another process has just begun to train the run that was chosen."""
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
        """Make the folder of the run this run's before anything is written; see `RunDirectory.claim`."""
        if not self._is_claimed:
            self.run_on_rank_zero(self._claim, "claiming the folder of the run")
            self._is_claimed = True

    def _claim(self) -> None:
        context = self._context
        count = context.history.flushed_count
        context.directory.claim(context.args, continues=self._continues, earlier_records=count)

    def load(self) -> Checkpoint:
        """What the checkpointer finds, as `args.resume` says; an empty checkpoint if nothing."""
        context = self._context
        asked = () if context.args.resume is False else (context.directory.resume_from or context.args.resume,)
        found: Any = self.run_on_rank_zero(partial(self._load, *asked), "loading a checkpoint")
        checkpointer = context.checkpointer
        own = checkpointer.loaded_own if isinstance(checkpointer, DefaultCheckpointer) else True
        self._continues = own and not found.is_empty and context.args.resume_mode == "full"
        return found if context.world.is_main else Checkpoint(**vars(found))  # fields travel, classes do not

    def _load(self, *asked: bool | str | os.PathLike[str]) -> Checkpoint:
        context, mirror = self._context, self._context.directory.mirror
        asked = tuple(_located(one, mirror) for one in asked)
        if mirror is not None and not context.args.overwrite and (asked or context.lease is not None):
            mirror.pull(asked[0] if asked else False)
        self._context.directory.look_for_recorded_run()
        return self._context.checkpointer.load(*asked)

    def read_weights(self, path: str | os.PathLike[str]) -> dict[str, Tensor]:
        """The tensors at `path`, by name."""
        return self.run_on_rank_zero(lambda: read_weights(path), "reading the weights to begin with")

    def fetch(self, address: str) -> Path:
        """The local copy of what lies at `address`, which the main process downloads."""
        return Path(self.run_on_rank_zero(lambda: str(fetch(address)), f"downloading {address}"))

    def finish_uploads(self, *, is_signalled: bool = False) -> str | None:
        """Wait until the run is uploaded, if its folder has an address; returns a sentence about it.

        After a signal it waits no longer than there is time, and a failure is logged only.

        Raises:
            CheckpointError: not everything could be uploaded; the local copy has it.
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
        """Let the checkpointer begin a run; from now on saves may go on in the background.

        `wake` makes the loop call `poll` after the step under way. Any thread may call it.
        """
        self._training = True

        def begin() -> None:
            if writes_files(self._context):
                self._claim()
            self._context.directory.begin(self._context.args)

        self.run_on_rank_zero(begin, "claiming the folder of the run")
        if self._context.world.is_main:
            self._context.checkpointer.watch(wake)
            self.owner.watch(wake)
        self.run_on_rank_zero(lambda: self._context.checkpointer.begin_run(resumed=resumed), "beginning the run")

    def finish(self) -> None:
        """Wait until all checkpoints are safe, and raise what has failed."""
        self.run_on_rank_zero(self._context.checkpointer.finish, "finishing the checkpoints")
        self._training = False
        self._record_save_time()
        self._announce_saved()

    def finish_after(self, error: BaseException) -> None:
        """Wait for what the main process still writes when training ends by `error`; each process by itself.

        A failure is noted at `error`. An interrupt while it waits gives up what is being written.
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
        """Raise what has failed in the background; the main process alone, at no step that others know of."""
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
        """Warn if saving takes too long: `seconds` in the loop, or what the last save took until it was safe."""
        context = self._context
        self.save_time_budget.record(max(seconds, context.checkpointer.last_save_s or 0.0), context.log)

    def run_on_rank_zero(self, function: Callable[[], Result], what: str) -> Result:
        """Let the main process do something; the others get its result, or learn of its failure.

        The others wait in the store, not in a collective, so the time that the main process needs for its files does
        not count towards the time limit of collectives.

        Raises:
            PeerError: the main process failed, or was not done after `args.rank_zero_timeout_s`.
        """
        world, longest_s = self._context.world, self._context.args.rank_zero_timeout_s
        result, failure = None, None
        with wait_for_rank_zero(world, what, longest_s):
            if world.is_main:
                try:
                    result = function()
                except Exception as error:
                    failure = error
        try:
            return cast(Result, world.comm.broadcast_outcome(failure, result, what))
        except Exception:
            self.saved_at = None  # the failure may be that of an earlier save in the background
            raise


def _located(resume: bool | str | os.PathLike[str], mirror: Mirror | None) -> bool | str | os.PathLike[str]:
    """`resume` with a local path in place of an address; of the run's own address, what `pull` brings."""
    if isinstance(resume, bool) or not is_address(resume):
        return resume
    address = os.fspath(resume)
    if mirror is None or not f"{address}/".startswith(f"{mirror.store.address}/"):
        return fetch(address)
    place = address[len(mirror.store.address) :].strip("/")
    if place in ("", "checkpoints", "checkpoints/last", "checkpoints/best"):
        return "best" if place.endswith("best") else True
    return fetch(address, mirror.folder / Path(place).parent)


_BEAT_S = 1.0
"""How often rank 0 tells the others that it is alive, while it reads or writes files."""

_SILENCE_S = 5.0
"""Without a beat for so long, the others go to the collective. There they find out whether rank 0 has ended."""

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.5
"""Between two looks at the store; the pause doubles. There is one store for all ranks."""

_waits: WeakKeyDictionary[Communicator, int] = WeakKeyDictionary()
"""How often the ranks of a communicator have waited for rank 0; the same number on all ranks."""


@contextmanager
def wait_for_rank_zero(world: World, what: str, longest_s: float) -> Iterator[None]:
    """A block that rank 0 carries out; the others pass through it at once and wait at its end. All ranks enter it.

    The wait ends when rank 0 has left the block, when it has sent no heartbeat for some seconds, or when the store
    is gone. In the last two cases the collective that follows reports what happened, within its own time limit.

    Args:
        world: of this rank.
        what: what rank 0 does, for the message.
        longest_s: seconds after which a rank gives up although rank 0 is alive.

    Raises:
        PeerError: rank 0 is alive, and was not done after `longest_s`.
    """
    if world.size == 1:
        yield
        return
    number = _waits[world.comm] = _waits.get(world.comm, 0) + 1
    key = f"rank-zero/{number}"
    if not world.is_main:
        yield
        _wait_for_beats(world, key, what, longest_s)
        return
    done = threading.Event()
    heart = threading.Thread(target=_beat, args=(world.comm, key, done), name="trainstack-heartbeat", daemon=True)
    heart.start()
    try:
        yield
    finally:
        done.set()
        with suppress(RuntimeError):  # a store that is gone shows in the collective that follows
            world.comm.put(f"{key}/done", "")


def _beat(comm: Communicator, key: str, done: threading.Event) -> None:
    beats = 0
    with suppress(RuntimeError):
        while not done.wait(_BEAT_S):
            beats += 1
            comm.put(f"{key}/beat", str(beats))


def _wait_for_beats(world: World, key: str, what: str, longest_s: float) -> None:
    began = heard = now = time.monotonic()
    last, pause, longest_pause = None, _FIRST_PAUSE_S, max(_LAST_PAUSE_S, world.size / 200)
    with suppress(RuntimeError):  # a store that is gone shows in the collective that follows
        while now - began <= longest_s:
            if world.comm.get_if_all([f"{key}/done"]) is not None:
                return
            now, beat = time.monotonic(), world.comm.get_if_all([f"{key}/beat"])
            heard, last = heard if beat == last else now, beat
            if now - heard > _SILENCE_S + 2 * longest_pause:
                return
            time.sleep(pause)
            pause = min(2 * pause, longest_pause)
    if now - began > longest_s:
        raise PeerError(
            f"rank {world.rank} has waited {longest_s:g} s for rank 0, which is alive and not done with {what}. "
            "Look at the file system that it uses, or write a longer TrainerArguments(rank_zero_timeout_s=...)."
        )


def save_after_exception(error: BaseException, context: RunContext, take: TakeCheckpoint, within_s: float) -> None:
    """Write what the main process has under a name of its own; says what came of it and raises nothing.

    The weights are mostly those of the last finished step, but nothing is certain after an exception. The other
    processes may be gone, so none is asked; and the device may wait for them for ever, so no more than `within_s`
    seconds are spent on it.
    """
    log = context.log
    if not context.world.is_main or not isinstance(error, Exception) or isinstance(error, CheckpointError):
        return  # what could not be written cannot be written now

    def save() -> None:
        try:
            checkpoint = take(after=error)
            step = context.state.global_step
            path = context.checkpointer.save_aside(checkpoint, f"exception-{step:09d}")
        except Exception as failure:
            log.warning(f"could not save after the exception: {type(failure).__name__}: {failure}")
        else:
            if path is not None:
                log.warning(
                    f"saved {path} after the exception, for a look at it; it is resumed from only if it is named."
                )

    thread = threading.Thread(target=save, name="trainstack-after-exception", daemon=True)
    thread.start()
    thread.join(within_s)
    if thread.is_alive():
        log.warning(f"could not save after the exception within {within_s:g} s; the device may be stuck.")


def make_checkpoint(
    context: RunContext,
    plan: TrainingPlan,
    get_state: Callable[[], Mapping[str, Any]],
    epoch_rng: Mapping[str, Any] | None,
    loader_state: Mapping[str, Any] | None,
    begin: Mapping[str, Any] | None = None,
    *,
    pinned: bool = False,
    after: BaseException | None = None,
) -> Checkpoint:
    """Everything that a run needs to go on from here; tensors are the live ones.

    The metadata can be read without the tensors: what was measured with these very weights tells which is the best.

    `get_state` is called after the processes have met. After an exception, `after`, the other processes are not asked
    for anything, so there are no random states, and no states of other ranks. `begin` is what `Beginnings.old_states`
    returns; like the random states, it is kept for each rank.
    """
    rng: dict[str, Any] = {"begin": begin}
    if not context.stack.is_private:  # a private run stores no random states: they show its draws
        rng |= {"now": capture_rng(context.world.device), "epoch": epoch_rng}
        rng[GENERATORS] = get_generator_states(context)
    mine = (rng, loader_state, cpu_settings())
    ranks = context.world.comm.gather(mine, "taking a checkpoint") if after is None else []
    loaders = [loader for _, loader, _ in ranks]
    aside: dict[str, Any] = {"cpu": merge_settings([cpu for *_, cpu in ranks] or [cpu_settings()])}
    aside["float32_matmul_precision"] = precision_in_force(context.args.float32_matmul_precision)
    aside |= {"pinned": True} if pinned else {}
    if after is not None:
        # The message of an exception may hold values of records.
        aside[EXCEPTION] = type(after).__name__ + ("" if context.stack.is_private else f": {after}")
    states, rank_states, differing = _states_of(context, by_rank=after is None)
    module_state, left_out = context.frozen.split(states[MODULE])
    aside |= {LEFT_OUT: left_out} if left_out else {}
    own = {"user": states[USER], EXTRAS: states[EXTRAS]} | ({"loaders": loaders} if any(loaders) else {})
    own |= {DIFFERING: differing} if differing else {}
    return Checkpoint(
        module_interface_state=module_state,
        trainer_state={**get_state(), **own},
        trainer_backend_state=states[LAYERS],
        rng_state={"ranks": [rng for rng, *_ in ranks]} if after is None else None,
        history_state=context.history.get_state(),
        callback_states=states[CALLBACKS],
        plan=plan.to_dict(),
        global_step=context.state.global_step,
        metadata=metadata_of(context) | aside,
        rank_states=rank_states,
    )


def _states_of(context: RunContext, *, by_rank: bool) -> tuple[dict[str, Any], list[dict[str, Any]] | None, list[str]]:
    """The states that may differ between ranks, the part of each rank, and the names of the leaves that do differ.

    The parameters are left out: they were compared bit by bit.
    """
    states = {
        MODULE: context.module.get_state(),
        CALLBACKS: context.events.get_state(),
        USER: context.user_state.get_state(),
        LAYERS: context.stack.get_state(),
        # Records may have had an influence on them, so a private run stores none.
        EXTRAS: None if context.stack.is_private else context.extras.get_state(),
    }
    if not by_rank:
        return states, None, []
    parts, places = divide_by_rank(context.world.comm, comparable(states, context.stack), context.module.parameters())
    names = [describe_place(place) for place in places]
    buffers = {name for name, _ in context.module.named_buffers()} & {p[-1] for p in places if p[0] == MODULE}
    if buffers and not context.said_of_buffers:
        context.said_of_buffers = True
        context.log.warning(
            f"the buffers {', '.join(sorted(buffers))} differ between the ranks. A checkpoint keeps those of each "
            "rank, and a resume needs the same number of ranks; an export has those of rank 0. Let "
            "ddp synchronise buffers to train with those of rank 0 on all ranks."
        )
    return states, parts, names


def check_storable(context: RunContext, get_state: Callable[[], Mapping[str, Any]]) -> None:
    """Find a state that a checkpoint cannot hold before the first step; encodes all of it, and copies no tensors.

    Raises:
        UnsupportedStateError: naming the place in the state and the type found there.
    """
    checkpointer = context.checkpointer
    if not isinstance(checkpointer, DefaultCheckpointer) or not checkpointer.is_due(0, force=True):
        return  # others may hold other values
    try:
        states = {**_states_of(context, by_rank=False)[0], "trainer_state": get_state()}
        states[MODULE], _ = context.frozen.split(states[MODULE])
    except Exception:  # a state may need what the first hook makes; then the first save tells
        return
    encoder = StateEncoder()
    for name, state in states.items():
        encoder.encode(state, root=name)
    warn_of_unreachable(context)


def metadata_of(context: RunContext) -> dict[str, Any]:
    """What should be readable in a manifest: the backend, the epoch under way, what was measured at this step, and what
    a private run has promised so far. Of a private run only metrics that are public or covered: exports are shared."""
    metrics, stack = context.history.usable_values_at(context.state.global_step), context.stack
    facts = {"backend": stack.spec, "epoch": context.state.epoch, "metrics": metrics}
    return facts | ({"privacy": json.loads(stack.privacy_statement().to_json())} if stack.is_private else {})


EXCEPTION = "exception"
"""The key in a checkpoint's metadata of what went wrong before it was written."""
