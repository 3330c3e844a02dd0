"""A training that ends after a given step, and keeps only the checkpoints that are compared."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

from trainstack.checkpointing import Checkpoint, DefaultCheckpointer
from trainstack.errors import Preempted
from trainstack.trainer import AbstractTrainer, ModuleInterface, Trainer, TrainerArguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Until:
    """The end of a replay.

    Attributes:
        step: the global step after which it stops; in several processes up to two steps later.
        keep: the global steps whose checkpoints are written, if the run saves there.
    """

    step: int
    keep: frozenset[int] = frozenset()


class KeepSome(DefaultCheckpointer):
    """Saves on the schedule of the run's checkpointer, but writes only the checkpoints of chosen steps."""

    keep: frozenset[int] = frozenset()

    def save(self, checkpoint_state: Checkpoint, index: int, force: bool = False) -> str | None:
        """Write the checkpoint if it is among those to keep. Returns its path, or None."""
        if checkpoint_state.global_step not in self.keep:
            return None
        return super().save(checkpoint_state, index, force)

    def save_model(self, *_: Any, **__: Any) -> None:
        """Export nothing, because a replay produces no model for use."""


def replay_until(
    until: Until,
    module: ModuleInterface,
    args: TrainerArguments,
    callbacks: Any,
    progress: Callable[[Trainer], AbstractContextManager[None]],
) -> None:
    """Train `module` until the end of the replay.

    It stops like a signal does, which ends the training without `on_end_train` of the module: that hook may publish a
    model.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a stop requested after the last step is raised as this signal
    checkpointer = KeepSome(args.placed_checkpointer_args)
    checkpointer.keep = until.keep
    trainer = Trainer(module, args, checkpointer=checkpointer, callbacks=callbacks)
    _ = trainer.plan  # prepares the trainer, which loads the checkpoint

    def stop(_: AbstractTrainer) -> None:
        trainer._stopper.request("the end of the replay", signal.SIGTERM.value)

    if until.step > trainer.global_steps_finished:
        trainer.call_at_step(until.step, stop)
    with progress(trainer), suppress(Preempted):
        trainer.train()
    trainer.close()
