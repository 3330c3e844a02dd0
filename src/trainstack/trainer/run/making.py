"""Make the parts of `Run`: the hooks, the optimizers and the loop of a module on a stack."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from trainstack.backends import Workload
from trainstack.backends.losses import looks_summed
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.plan import TrainingPlan
from trainstack.trainer.core.several_updates import check_updates
from trainstack.trainer.data.training_data import TrainingData
from trainstack.trainer.events.hooks import Hooks
from trainstack.trainer.module_checks import check_optimizers_schedulers
from trainstack.trainer.module_interface import MicroBatchInfo, StepView
from trainstack.trainer.run.agreement import agree_on_workload, share_initial_values
from trainstack.trainer.run.stopping import Stopper
from trainstack.trainer.run.train_loop import TrainLoop
from trainstack.trainer.schedulers.building import make_schedules
from trainstack.trainer.torch_settings import CompiledModels, prepare_model, reuses_memory
from trainstack.trainer.tracking.log_sink import LogSink


def make_hooks(context: RunContext, stopper: Stopper) -> Hooks:
    """Find the hooks of the module. If a layer hides records, hooks and subscribers of events get none."""
    hides_records = any(layer.hides_records for layer in context.stack.layers())
    if hides_records:
        context.events.hide_records()
    hooks = Hooks(context.module, stopper.request, hides_records=hides_records)
    if hooks.withheld:
        context.log.warning(
            f"{' and '.join(hooks.withheld)} of {type(context.module).__name__} will be called without outputs: a "
            "private run passes no records and outputs of training to hooks. DifferentialPrivacyArguments("
            "expose_records=True) passes them, and makes the run NOT PRIVATE."
        )
    return hooks


def connect_module(context: RunContext, run_data: TrainingData) -> None:
    """Set the plan, the log sink and the view of the current step in the module."""
    module = context.module
    module.plan = run_data.plan
    sink = module._log_sink = context.sink = (module._log_sink or LogSink()).connect(context.history, context.state)
    data = weakref.ref(run_data)  # the module may outlive the run; the sink has the counters of the current step
    module._step_view = StepView(lambda: MicroBatchInfo() if (mine := data()) is None else mine.micro_batch(sink.state))


def _prepare_model(context: RunContext) -> CompiledModels | None:
    args, stack = context.args, context.stack
    return prepare_model(
        context.module,
        compiled=args.compile,
        channels_last=args.channels_last,
        private=stack.is_private,
        recomputes=args.activation_checkpointing,
        units=next((layer.units for layer in stack.layers() if layer.units is not None), None),
    )


def make_loop(
    context: RunContext, data: TrainingData, hooks: Hooks, log_interval: int, *, trains: bool, saves: bool
) -> TrainLoop:
    """Compile the module, get its optimizers and schedulers, and prepare it with the stack.

    Args:
        context: the context of the run.
        data: the training data of the run.
        hooks: the hooks of the module.
        log_interval: global steps between two log points.
        trains: False to make no optimizers.
        saves: whether the run saves checkpoints.
    """
    module, stack, world, state = context.module, context.stack, context.world, context.state
    args, plan = context.args, data.plan
    compiled = _prepare_model(context)
    context.compiled = context.compiled or compiled  # an earlier evaluation may have compiled the module
    ahead = plan.rest(state.epoch, state.global_step) if args.reset_optimizers_schedulers else plan
    epochs = max(1, ahead.epochs)
    stack.place(module, world)
    context.give_values()
    share_initial_values(context)
    steps_per_epoch = ahead.estimated_global_steps_per_epoch
    optimizers, schedulers = _make_optimizers(context, steps_per_epoch, epochs) if trains else ((), ())
    parts = (module, optimizers, world, args.clipping, data.training_set, context.output_dir)
    work = Workload.from_module(*parts, fast_paths=args.fast_paths)
    agree_on_workload(context, data, work)
    check_updates(work, list(stack.layers()))
    with context.sink.mute(state):  # a layer may run the module on trial inputs
        work = stack.prepare(work)
    keep = args.collect_train_outputs
    plan_ahead = replace(ahead, epochs=epochs)
    return TrainLoop(
        stack,
        work,
        hooks,
        schedules=make_schedules(schedulers, work.optimizers, plan_ahead, saves=saves, log=context.log),
        state=state,
        skip_nonfinite=args.nonfinite == "skip",
        measures_every_step=log_interval == 1,
        keep_epoch_outputs=hooks.epoch_outputs if keep == "auto" else bool(keep),
        bind=context.events.bound,
        inspect_loss=partial(_inspect_loss, context, data) if _may_misjudge_sums(context, data.plan) else None,
        reused_memory=reuses_memory(module, args.compile),
    )


def _make_optimizers(context: RunContext, steps_per_epoch: int, epochs: int) -> tuple[Sequence[Any], Sequence[Any]]:
    made = context.module.get_optimizers_schedulers(steps_per_epoch, epochs)
    return check_optimizers_schedulers(made, context.module, context.log, context.world.size)


def _may_misjudge_sums(context: RunContext, plan: TrainingPlan) -> bool:
    """Whether a summed loss would be scaled down, and the module does not set `loss_reduction`."""
    split = plan.accumulation > 1 or context.world.size > 1
    return split and not context.stack.is_private and getattr(context.module, "loss_reduction", None) is None


def _inspect_loss(context: RunContext, data: TrainingData, loss: Tensor) -> None:
    """Warn if the first loss is a sum over samples. This reads its graph and computes nothing."""
    samples = data.micro_batch(context.state).samples
    if looks_summed(loss, None if samples is None else len(samples)):
        name, parts = type(context.module).__name__, data.plan.accumulation * context.world.size
        context.log.warning(
            f"{name}.train_step seems to return a sum over samples, and a step averages the losses of its {parts} "
            f"parts: the loss and its gradient are about {parts} times smaller than those of the whole batch. If the "
            "loss is a mean, write loss_reduction = 'mean' in the module. If it is a sum, return a mean, or write "
            "loss_reduction = 'sum' to add the parts up."
        )
