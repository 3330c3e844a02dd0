"""The rows of the plan that is printed when a training begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainstack._tensor_classes import class_of
from trainstack.backends import Workload
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.intervals import Every, whole_steps
from trainstack.trainer.core.plan import TrainingPlan
from trainstack.trainer.data.step_batches import describe_order
from trainstack.trainer.data.training_data import TrainingData
from trainstack.trainer.module_checks import lacks_method
from trainstack.trainer.schedulers.stepping import Schedules

_MOST_LINES = 3
"""Of optimizers: the plan has at most 14 lines, more than half of a terminal with 24."""


def setup_rows(context: RunContext, data: TrainingData, work: Workload, schedules: Schedules) -> list[tuple[str, str]]:
    """Settings that decide the result of a run, as label and value."""
    return [
        ("model", _model(context, work)),
        ("data", _data(context, data)),
        ("validation", _validation(context, data.plan)),
        *data.plan.rows(),
        ("optimizer", "\n".join(_optimizers(work.optimizers, schedules))),
        ("gradients", _gradients(context, work)),
        ("backend", f"{context.stack.spec} on {context.world.device}"),
        *context.stack.plan_rows(work),
        *_memory(context, data, work),
    ]


def _memory(context: RunContext, data: TrainingData, work: Workload) -> list[tuple[str, str]]:
    """The memory of one process, if parameters are sharded."""
    layers = ((one, one.gathered_parts(work.module)) for one in context.stack.layers())
    layer, parts = next(((one, found) for one, found in layers if found is not None), (context.stack, None))
    if parts is None:
        return []
    from trainstack.trainer.core.memory_plan import format_bytes, plan_memory, shard_count

    shards, passes = shard_count(work.module), 1 if layer.reduces_each_pass else data.plan.accumulation
    plan = plan_memory(work.module, work.optimizers, shards=shards, units=parts, accumulation=passes)
    sizes = [f"{name} {size}" for name, size in plan.rows() if name not in ("activations", "in all")]
    return [("memory", f"{format_bytes(plan.total)} a process without activations: {', '.join(sizes)}")]


def _data(context: RunContext, data: TrainingData) -> str:
    if context.stack.sampling is not None:
        return "each step draws its samples at random"
    plan, order = data.plan, "in an unknown order" if data.loader is None else describe_order(data.loader)
    samples = "" if plan.samples_per_epoch is None else f"{plan.samples_per_epoch:,} samples per epoch, "
    if order == "shuffled":
        return f"{samples}shuffled with seed {context.state.seed}"
    advice = " (sampler=sampler(dataset) to shuffle)" if order == "in data set order" else ""
    return f"{samples}{order}{advice}"


def _validation(context: RunContext, plan: TrainingPlan) -> str:
    """When the run validates, or why it does not.

    `get_val_dataloaders` is not called for the number of samples: it may load data, or need values that a hook makes
    later.
    """
    module, when = context.module, describe_validations(context.args.validate_every, plan)
    if lacks_method(module, "get_val_dataloaders"):
        return (
            "none" if lacks_method(module, "val_step", context.val_step) else "none: get_val_dataloaders is not defined"
        )
    if when is None:
        return "none: validate_every=0" if context.args.validate_every == 0 else "when validate_every(trainer) is true"
    samples = module._count_val_samples()
    if samples == 0:
        return "none: there is no val_dataset"
    return when if samples is None else f"{samples:,} samples, {when}"


def describe_validations(every: Any, plan: TrainingPlan) -> str | None:
    """When a run with `validate_every=every` validates, such as "after each epoch"; None for 0 or a function."""
    if isinstance(every, Every) and every.time is not None:
        return f"after each {every.time:g} seconds"
    if isinstance(every, Every):
        every = -every.epochs if every.epochs else every.steps
    if every == 0 or callable(every):
        return None
    if every is None or (isinstance(every, int) and every < 0):
        return _after(1 if every is None else -every, "epoch")
    return _after(whole_steps("validate_every", every, plan), "step")


def _after(number: int, noun: str) -> str:
    return f"after each {noun}" if number == 1 else f"after each {number:,} {noun}s"


def _gradients(context: RunContext, work: Workload) -> str:
    for layer in context.stack.layers():
        if "clip" in layer.ends:
            return f"limited by the layer {layer.name}"
    clipping = work.clipping
    if clipping.kind == "none":
        return "not clipped"
    if clipping.kind == "value":
        return f"each value clipped to [-{clipping.limit}, {clipping.limit}] (clip_grads=False for none)"
    return f"clipped to norm {clipping.limit} (clip_grads=False for none)"


def _optimizers(optimizers: Sequence[Optimizer], schedules: Schedules) -> list[str]:
    lines = []
    for one in optimizers[: _MOST_LINES if len(optimizers) <= _MOST_LINES else _MOST_LINES - 1]:
        rates = sorted({_rate(group) for group in one.param_groups if "lr" in group})
        decays = sorted({float(g["weight_decay"]) for g in one.param_groups if _is_number(g.get("weight_decay"))})
        shown = [f"{type(one).__name__} {_range('lr', rates)}".rstrip()]
        shown += [_range("weight_decay", decays)] if any(decays) else []
        lines.append(", ".join([*shown, *schedules.describe(one)]))
    more = len(optimizers) - len(lines)
    return [*lines, f"and {more} more"] if more > 0 else lines


def _rate(group: Mapping[str, Any]) -> float:
    """The rate that the user gave: a schedule has changed `lr` already, such as a warm-up, which begins at 0.

    `OneCycleLR` keeps the rate of its peak as "max_lr" (torch 2.13.0); its "initial_lr" is a 25th of that.
    """
    return float(group.get("max_lr", group.get("initial_lr", group["lr"])))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _range(name: str, values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{name} {values[0]:g}" if len(values) == 1 else f"{name} {values[0]:g} to {values[-1]:g}"


def _model(context: RunContext, work: Workload) -> str:
    named = list(work.module.parameters())
    held = {id(p) for optimizer in work.optimizers for group in optimizer.param_groups for p in group["params"]}
    frozen = [p for p in named if not p.requires_grad]
    unheld = [p for p in named if p.requires_grad and id(p) not in held]
    if not held & {id(p) for p in named}:  # the optimizers hold copies
        unheld = []
    total, *others = [sum(p.numel() for p in part if not is_lazy(p)) for part in (named, frozen, unheld)]
    words = [f"{total - sum(others):,} trainable" if any(others) else "all trainable"]
    for count, state in zip(others, ("frozen", "in no optimizer"), strict=True):
        words += [f"{count:,} {state}"] if count else []
    lazy = sum(map(is_lazy, named))
    words += [f"{lazy} tensors get their shape in the first step"] if lazy else []
    return f"{class_of(context.module).__name__}, {total:,} parameters, {', '.join(words)}"
