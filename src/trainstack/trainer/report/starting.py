"""Whether a run gets a report, and what is known of it when it begins."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainstack.backends.explain import explain_stack
from trainstack.checkpointing import DefaultCheckpointer
from trainstack.trainer.plain_values import as_json
from trainstack.trainer.report.facts import RunFacts
from trainstack.trainer.report.recorder import RunRecorder
from trainstack.trainer.report.surroundings import environment_rows, model_rows

if TYPE_CHECKING:
    from trainstack.trainer.arguments import TrainerArguments
    from trainstack.trainer.trainer import Trainer


def is_wanted(args: TrainerArguments) -> bool:
    """Whether `args` ask for a report: by default where any writer but "stdout" writes."""
    return any(writer != "stdout" for writer in args.writers) if args.report == "auto" else bool(args.report)


def begin_recording(trainer: Trainer, resume_step: int | None) -> RunRecorder | None:
    """Begin to record the run of `trainer`; None on processes that write nothing, or where no report is wanted."""
    if not trainer.is_main_process or not is_wanted(trainer.args):
        return None
    return RunRecorder(trainer.args.log_dir, _facts_of(trainer), trainer.device, resume_step)


def _facts_of(trainer: Trainer) -> RunFacts:
    args, stack, checkpointer = trainer.args, trainer.trainer_backend, trainer.checkpointer
    keeps = isinstance(checkpointer, DefaultCheckpointer) and checkpointer.args.checkpoint
    return RunFacts(
        name=type(trainer.module).__name__,
        backend=stack.spec,
        device=str(trainer.device),
        private=stack.is_private,
        monitor=args.placed_checkpointer_args.monitor,
        arguments=as_json(args.to_dict()),
        plan=tuple(trainer.plan.rows()),
        stack=explain_stack(stack),
        model=model_rows(trainer.module),
        environment=environment_rows(trainer.device, trainer.world.size),
        checkpoints=str(Path(checkpointer.save_dir).absolute()) if keeps else None,
    )
