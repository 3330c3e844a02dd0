"""`Saver` saves on the main process and reports the result to all ranks."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import Tensor

from trainstack._files import local_path
from trainstack.checkpointing import Checkpoint, DefaultCheckpointer, export_model, push_to_hub, write_checkpoint
from trainstack.checkpointing.exporting import require_hub
from trainstack.checkpointing.warm_start import read_weights
from trainstack.errors import CheckpointError, annotate
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.plan import TrainingPlan
from trainstack.trainer.core.random_state import capture_rng
from trainstack.trainer.events import Event
from trainstack.trainer.torch_settings import cpu_settings, merge_settings


class SaveTimeBudget:
    """Warns, once, of saves that take so long that a run may be killed in the middle of its last one.

    Attributes:
        seconds: from the signal to the kill, as given, as the launcher says in `environ`, or 30.
    """

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
    """

    def __init__(self, context: RunContext, take: TakeCheckpoint) -> None:
        self._context, self._take_checkpoint = context, take
        self.pending_save = self.pending_pin = False
        self.pending_paths: list[tuple[str | os.PathLike[str], str]] = []
        self.saved_at: tuple[int, int] | None = None
        self._training = False
        self.saved_as: str | None = None
        self.save_time_budget = SaveTimeBudget(context.args.stop_grace_s)
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
        with context.events.weight_swap.original_weights():
            checkpoint = self._capture()
            self.saved_as = self.run_on_rank_zero(
                lambda: context.checkpointer.save(checkpoint, state.last_epoch, force), "saving a checkpoint"
            )
        self.saved_at = place
        if not self._training:
            self.finish()
        self._record_save_time(time.monotonic() - began)

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
            with self._context.events.weight_swap.original_weights():
                checkpoint, failure = self._capture(), None
            if world.is_main if once == "world" else world.local_rank == 0:
                target = local_path(path).absolute()
                try:
                    write_checkpoint(checkpoint, target.parent, target.name)
                except Exception as error:
                    failure = error
            world.comm.raise_if_any(failure, "saving a checkpoint")

    def stop_message(self) -> str:
        """After which step the run was stopped, where that is saved, and how to go on."""
        state = self._context.state
        stood = f"after global step {state.global_step}"
        if self.saved_at != (state.global_step, state.epoch):
            return f"{stood}. Nothing was saved, because the checkpointer saves nothing"
        where = "Saved" if self.saved_as is None else f"Saved {self.saved_as}"
        return f"{stood}. {where}; to go on, run it again with resume='auto'"

    def save_model(self, plan: TrainingPlan, path: str | os.PathLike[str] | None = None) -> None:
        """Export the module's state and `plan`, to `path` or where the checkpointer puts exports."""
        context, state = self._context, self._context.state
        about: dict[str, Any] = {
            "plan": plan.to_dict(),
            "global_step": state.global_step,
            "metadata": {**metadata_of(context), "module": type(context.module).__name__},
        }
        module_state = dict(context.module.get_state())
        context.events.fire(Event.SAVE_MODEL, module_state)

        def write() -> None:
            if path is None:
                context.checkpointer.save_model(module_state, state.last_epoch, **about)
            else:
                export_model(module_state, path, **about)

        self.run_on_rank_zero(write, "exporting the model")

    def push_to_hub(self, plan: TrainingPlan, repo_id: str, **options: Any) -> str:
        """Export to a temporary folder and upload that; see the function `push_to_hub`."""
        require_hub()
        with tempfile.TemporaryDirectory(prefix="trainstack-") as folder:
            path = Path(folder) / repo_id.rpartition("/")[2]
            self.save_model(plan, path)
            return self.run_on_rank_zero(lambda: push_to_hub(path, repo_id, **options), f"pushing to {repo_id}")

    def load(self) -> Checkpoint:
        """What the checkpointer finds, as `args.resume` says; an empty checkpoint if nothing."""
        context = self._context
        asked = () if context.args.resume is False else (context.args.resume,)
        return self.run_on_rank_zero(lambda: context.checkpointer.load(*asked), "loading a checkpoint")

    def read_weights(self, path: str | os.PathLike[str]) -> dict[str, Tensor]:
        """The tensors at `path`, by name."""
        return self.run_on_rank_zero(lambda: read_weights(path), "reading the weights to begin with")

    def begin_run(self, wake: Callable[[], None], *, resumed: bool) -> None:
        """Let the checkpointer begin a run; from now on saves may go on in the background.

        `wake` makes the loop call `poll` after the step under way. Any thread may call it.
        """
        self._training = True
        if self._context.world.is_main:
            self._context.checkpointer.watch(wake)
        self.run_on_rank_zero(lambda: self._context.checkpointer.begin_run(resumed=resumed), "beginning the run")

    def finish(self) -> None:
        """Wait until all checkpoints are safe, and raise what has failed."""
        self.run_on_rank_zero(self._context.checkpointer.finish, "finishing the checkpoints")
        self._training = False
        self._record_save_time()

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
            self._context.checkpointer.poll()
        except Exception:
            self.saved_at = None
            raise
        self._record_save_time()

    def _record_save_time(self, seconds: float = 0.0) -> None:
        """Warn if saving takes too long: `seconds` in the loop, or what the last save took until it was safe."""
        context = self._context
        self.save_time_budget.record(max(seconds, context.checkpointer.last_save_s or 0.0), context.log)

    def run_on_rank_zero(self, function: Callable[[], Result], what: str) -> Result:
        """Let the main process do something; the others get its result, or learn of its failure."""
        world = self._context.world
        result, failure = None, None
        if world.is_main:
            try:
                result = function()
            except Exception as error:
                failure = error
        try:
            world.comm.raise_if_any(failure, what)
        except Exception:
            self.saved_at = None  # the failure may be that of an earlier save in the background
            raise
        return cast(Result, world.comm.broadcast_object(result))


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
    *,
    pinned: bool = False,
    after: BaseException | None = None,
) -> Checkpoint:
    """Everything that a run needs to go on from here; tensors are the live ones.

    The metadata can be read without the tensors: what was measured with these very weights tells which is the best.

    `get_state` is called after the processes have met. After an exception, `after`, the other processes are not asked
    for anything, so there are no random states.
    """
    rng = {"now": capture_rng(context.world.device), "epoch": epoch_rng}
    ranks = context.world.comm.gather((rng, loader_state, cpu_settings())) if after is None else []
    loaders = [loader for _, loader, _ in ranks]
    aside: dict[str, Any] = {"cpu": merge_settings([cpu for *_, cpu in ranks] or [cpu_settings()])}
    aside |= {"pinned": True} if pinned else {}
    if after is not None:
        aside[EXCEPTION] = f"{type(after).__name__}: {after}"
    own = {"user": context.user_state.get_state()} | ({"loaders": loaders} if any(loaders) else {})
    return Checkpoint(
        module_interface_state=context.module.get_state(),
        trainer_state={**get_state(), **own},
        trainer_backend_state=context.stack.get_state(),
        rng_state={"ranks": [rng for rng, *_ in ranks]} if after is None else None,
        history_state=context.history.get_state(),
        callback_states=context.events.get_state(),
        plan=plan.to_dict(),
        global_step=context.state.global_step,
        metadata=metadata_of(context) | aside,
    )


def metadata_of(context: RunContext) -> dict[str, Any]:
    """What should be readable in a manifest: the backend, the epoch under way, what was measured at this step, and what
    a private run has promised so far."""
    metrics, stack = context.history.values_at(context.state.global_step), context.stack
    facts = {"backend": stack.spec, "epoch": context.state.epoch, "metrics": metrics}
    return facts | ({"privacy": json.loads(stack.privacy_statement().to_json())} if stack.is_private else {})


EXCEPTION = "exception"
"""The key in a checkpoint's metadata of what went wrong before it was written."""
