"""What is known of a run when it begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainstack.checkpointing import AbstractCheckpointer, DefaultCheckpointer
from trainstack.trainer.plain_values import as_json
from trainstack.trainer.report.facts import RunFacts
from trainstack.trainer.report.recorder import RunRecorder
from trainstack.trainer.report.surroundings import environment_rows, model_rows, optimizer_rows

if TYPE_CHECKING:
    from trainstack.trainer.trainer import Trainer


def begin_recording(trainer: Trainer, resume_step: int | None) -> RunRecorder:
    """Begin to record the run of `trainer`, which is the main process's."""
    return RunRecorder(trainer.args.log_dir, _facts_of(trainer), trainer.device, resume_step)


def _facts_of(trainer: Trainer) -> RunFacts:
    args, stack = trainer.args, trainer.trainer_backend
    return RunFacts(
        name=type(trainer.module).__name__,
        backend=stack.spec,
        device=str(trainer.device),
        private=stack.is_private,
        monitor=args.placed_checkpointer_args.monitor,
        arguments=as_json(args.to_dict()),
        plan=(*trainer.plan.rows(), *optimizer_rows(trainer._ready().loop.work.optimizers)),
        stack=stack.explain(),
        model=model_rows(trainer.module),
        environment=environment_rows(trainer.device, trainer.world.size),
        checkpoints=_folder_of(trainer.checkpointer),
    )


def _folder_of(checkpointer: AbstractCheckpointer) -> str | None:
    if isinstance(checkpointer, DefaultCheckpointer) and checkpointer.args.checkpoint:
        return str(checkpointer.save_dir.absolute())
    return None
