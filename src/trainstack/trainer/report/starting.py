"""What is known of a run when it begins."""

from __future__ import annotations

from collections.abc import Iterable

from torch.optim import Optimizer

from trainstack.checkpointing import AbstractCheckpointer, DefaultCheckpointer
from trainstack.trainer.context import RunContext
from trainstack.trainer.plain_values import as_json
from trainstack.trainer.plan import TrainingPlan
from trainstack.trainer.report.facts import RunFacts
from trainstack.trainer.report.recorder import RunRecorder
from trainstack.trainer.report.surroundings import environment_rows, model_rows, optimizer_rows


def begin_recording(
    context: RunContext, plan: TrainingPlan, optimizers: Iterable[Optimizer], resume_step: int | None
) -> RunRecorder:
    """Begin to record a run, on its main process."""
    args, stack, device = context.args, context.stack, context.world.device
    facts = RunFacts(
        name=type(context.module).__name__,
        backend=stack.spec,
        device=str(device),
        private=stack.is_private,
        monitor=args.placed_checkpointer_args.monitor,
        arguments=as_json(args.to_dict()),
        plan=(*plan.rows(), *optimizer_rows(optimizers)),
        stack=stack.explain(),
        model=model_rows(context.module),
        environment=environment_rows(device, context.world.size),
        checkpoints=_folder_of(context.checkpointer),
    )
    return RunRecorder(args.log_dir, facts, device, resume_step)


def _folder_of(checkpointer: AbstractCheckpointer) -> str | None:
    if isinstance(checkpointer, DefaultCheckpointer) and checkpointer.args.checkpoint:
        return str(checkpointer.save_dir.absolute())
    return None
