"""Between trainer and checkpointer: only the main process touches files, and all processes learn what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

from trainstack.checkpointing import Checkpoint
from trainstack.trainer.grace import Grace
from trainstack.trainer.run import Run
from trainstack.trainer.snapshot import refuse_diverged, refuse_poisoned, take_checkpoint

if TYPE_CHECKING:
    from trainstack.trainer.trainer import Trainer

Result = TypeVar("Result")


class Saver:
    """Saves and loads for one trainer; every method is called by all processes together.

    Attributes:
        saved_at: global step and epoch of the newest checkpoint, written or loaded.
        grace: holds the time that saving takes against the time there is.
        saved_as: where the newest that was written lies, if the checkpointer said so.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.saved_at: tuple[int, int] | None = None
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
        place = (state.global_step, state.epoch)
        if (unless_saved and place == self.saved_at) or not trainer.checkpointer.is_due(state.last_epoch, force):
            return
        began = time.monotonic()
        run.loop.meter.drain()
        refuse_poisoned(trainer.module, run.watched, state.global_step)
        refuse_diverged(trainer.module, trainer.world.comm, state.global_step)
        checkpoint = take_checkpoint(trainer, run.epoch_rng)
        self.saved_as = self._on_main(
            lambda: trainer.checkpointer.save(checkpoint, state.last_epoch, force), "saving a checkpoint"
        )
        self.saved_at = place
        self.grace.saved_in(time.monotonic() - began, run.log)

    def last_words(self, run: Run) -> str:
        """After which step `run` was stopped, where that is saved, and how to go on."""
        state = run.state
        stood = f"after global step {state.global_step}"
        if self.saved_at != (state.global_step, state.epoch):
            return f"{stood}. Nothing was saved, because the checkpointer saves nothing"
        where = "Saved" if self.saved_as is None else f"Saved {self.saved_as}"
        return f"{stood}. {where}; to go on, run it again with resume='auto'"

    def save_model(self) -> None:
        """Export the module's state alone."""
        trainer = self._trainer
        module_state = trainer.module.get_state()
        self._on_main(
            lambda: trainer.checkpointer.save_model(module_state, trainer.state.last_epoch), "exporting the model"
        )

    def load(self) -> Checkpoint:
        """What the checkpointer finds, as `args.resume` says; an empty checkpoint if nothing."""
        trainer = self._trainer
        asked = () if trainer.args.resume is False else (trainer.args.resume,)
        return self._on_main(lambda: trainer.checkpointer.load(*asked), "loading a checkpoint")

    def begin_run(self, *, resumed: bool) -> None:
        """Tell the checkpointer that training begins."""
        self._on_main(lambda: self._trainer.checkpointer.begin_run(resumed=resumed), "beginning the run")

    def _on_main(self, do: Callable[[], Result], what: str) -> Result:
        """Let the main process do something; the others get its result, or learn of its failure."""
        world = self._trainer.world
        result, failure = None, None
        if world.is_main:
            try:
                result = do()
            except Exception as error:
                failure = error
        world.comm.agree(failure, what)
        return cast(Result, world.comm.share(result))
