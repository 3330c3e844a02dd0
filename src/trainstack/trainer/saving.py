"""Between trainer and checkpointer: only the main process touches files, and all processes learn what came of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch import Tensor

from trainstack.checkpointing import Checkpoint, export_model, read_model, write_checkpoint
from trainstack.checkpointing.warm_start import read_weights
from trainstack.errors import annotate
from trainstack.trainer.events import Event
from trainstack.trainer.grace import Grace
from trainstack.trainer.logs import RunLogger
from trainstack.trainer.run import Run
from trainstack.trainer.snapshot import facts_of, refuse_diverged, refuse_poisoned, take_checkpoint

if TYPE_CHECKING:
    from trainstack.trainer.trainer import Trainer

Result = TypeVar("Result")


class Saver:
    """Saves and loads for one trainer; methods are called by all processes together, unless they say otherwise.

    Attributes:
        saved_at: global step and epoch of the newest checkpoint, loaded, written or under way; None once one failed.
        grace: holds the time that saving takes against the time there is.
        saved_as: where the newest that was written lies, if the checkpointer said so.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.saved_at: tuple[int, int] | None = None
        self._training = False
        self.saved_as: str | None = None
        self.grace = Grace(trainer.args.stop_grace_s)

    def save(self, run: Run, force: bool, *, unless_saved: bool = False) -> None:
        """Write a checkpoint of where `run` stands, if it is due.

        Args:
            run: at a step boundary.
            force: write it out of turn as well.
            unless_saved: not if this very place was saved already.
        """
        trainer, state = self._trainer, self._trainer.state
        self.save_where_asked(run)
        place = (state.global_step, state.epoch)
        if (unless_saved and place == self.saved_at) or not trainer.checkpointer.is_due(state.last_epoch, force):
            return
        began = time.monotonic()
        with trainer.events.aside.put_back_for_now():
            self._write(run, force)
        self.saved_at = place
        if not self._training:
            self.finish()
        self._hold_against_grace(time.monotonic() - began)

    def _write(self, run: Run, force: bool) -> None:
        trainer, state = self._trainer, self._trainer.state
        checkpoint = self._take(run)
        self.saved_as = self.on_main(
            lambda: trainer.checkpointer.save(checkpoint, state.last_epoch, force), "saving a checkpoint"
        )

    def _take(self, run: Run) -> Checkpoint:
        trainer, state = self._trainer, self._trainer.state
        pinned, run.pin_asked = run.pin_asked, False
        run.loop.meter.drain()
        refuse_poisoned(trainer.trainer_backend, trainer.module, run.watched, state.global_step)
        refuse_diverged(trainer.trainer_backend, trainer.module, trainer.world.comm, state.global_step)
        loader_state = run.data.loader_memory.get_state(within=state.steps_in_epoch > 0)
        checkpoint = take_checkpoint(trainer, run.epoch_rng, loader_state, pinned=pinned)
        trainer.events.fire(Event.SAVE_CHECKPOINT, checkpoint)
        return checkpoint

    def save_where_asked(self, run: Run) -> None:
        """Write checkpoints of where `run` stands as the folders that were asked for, apart from the checkpointer."""
        asked, run.paths_asked = run.paths_asked, []
        for path, once in asked:
            self._save_as(run, path, once)

    def _save_as(self, run: Run, path: str | os.PathLike[str], once: str) -> None:
        trainer, world = self._trainer, self._trainer.world
        with trainer.events.aside.put_back_for_now():
            checkpoint, failure = self._take(run), None
        if world.is_main if once == "world" else world.local_rank == 0:
            target = Path(path).absolute()
            try:
                write_checkpoint(checkpoint, target.parent, target.name)
            except Exception as error:
                failure = error
        world.comm.agree(failure, "saving a checkpoint")

    def last_words(self, run: Run) -> str:
        """After which step `run` was stopped, where that is saved, and how to go on."""
        state = run.state
        stood = f"after global step {state.global_step}"
        if self.saved_at != (state.global_step, state.epoch):
            return f"{stood}. Nothing was saved, because the checkpointer saves nothing"
        where = "Saved" if self.saved_as is None else f"Saved {self.saved_as}"
        return f"{stood}. {where}; to go on, run it again with resume='auto'"

    def save_model(self, path: str | os.PathLike[str] | None = None) -> None:
        """Export the module's state alone, to `path` or where the checkpointer puts exports."""
        trainer, state = self._trainer, self._trainer.state
        about: dict[str, Any] = {
            "plan": trainer.plan.to_dict(),
            "global_step": state.global_step,
            "metadata": {**facts_of(trainer), "module": type(trainer.module).__name__},
        }
        module_state = dict(trainer.module.get_state())
        trainer.events.fire(Event.SAVE_MODEL, module_state)

        def write() -> None:
            if path is None:
                trainer.checkpointer.save_model(module_state, state.last_epoch, **about)
            else:
                export_model(module_state, path, **about)

        self.on_main(write, "exporting the model")

    def load(self) -> Checkpoint:
        """What the checkpointer finds, as `args.resume` says; an empty checkpoint if nothing."""
        trainer = self._trainer
        asked = () if trainer.args.resume is False else (trainer.args.resume,)
        return self.on_main(lambda: trainer.checkpointer.load(*asked), "loading a checkpoint")

    def read_weights(self, path: str | os.PathLike[str]) -> dict[str, Tensor]:
        """The tensors at `path`, by name."""
        return self.on_main(lambda: read_weights(path), "reading the weights to begin with")

    def read_export(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """The module's state in the export at `path`."""
        return self.on_main(lambda: read_model(path), "reading an export of the model")

    def begin_run(self, run: Run, *, resumed: bool) -> None:
        """Tell the checkpointer that training begins; from now on saves may go on in the background."""

        def wake() -> None:
            run.loop.attend_at = 0

        self._training = True
        if self._trainer.world.is_main:
            run.poll = self._poll
            self._trainer.checkpointer.watch(wake)
        self.on_main(lambda: self._trainer.checkpointer.begin_run(resumed=resumed), "beginning the run")

    def finish(self) -> None:
        """Wait until all checkpoints are safe, and raise what has failed."""
        self.on_main(self._trainer.checkpointer.finish, "finishing the checkpoints")
        self._training = False
        self._hold_against_grace()

    def finish_after(self, error: BaseException) -> None:
        """Wait for what the main process still writes when training ends by `error`; each process by itself.

        A failure is noted at `error`. An interrupt while it waits gives up what is being written.
        """
        self._training = False
        if not self._trainer.world.is_main:
            return
        try:
            self._trainer.checkpointer.finish()
        except BaseException as failure:
            self.saved_at = None
            if not isinstance(failure, Exception):
                self._trainer.checkpointer.abandon()
                raise
            annotate(error, f"also, a checkpoint is missing: {failure}")

    def _poll(self) -> None:
        """Raise what has failed in the background; the main process alone, at no step that others know of."""
        try:
            self._trainer.checkpointer.poll()
        except Exception:
            self.saved_at = None
            raise
        self._hold_against_grace()

    def _hold_against_grace(self, seconds: float = 0.0) -> None:
        """Warn if saving takes too long: `seconds` in the loop, or what the last save took until it was safe."""
        trainer = self._trainer
        log = RunLogger(trainer.args.log_level if trainer.world.is_main else "ERROR")
        self.grace.saved_in(max(seconds, trainer.checkpointer.last_save_s or 0.0), log)

    def on_main(self, do: Callable[[], Result], what: str) -> Result:
        """Let the main process do something; the others get its result, or learn of its failure."""
        world = self._trainer.world
        result, failure = None, None
        if world.is_main:
            try:
                result = do()
            except Exception as error:
                failure = error
        try:
            world.comm.agree(failure, what)
        except Exception:
            self.saved_at = None  # the failure may be that of an earlier save in the background
            raise
        return cast(Result, world.comm.share(result))
