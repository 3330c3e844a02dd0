"""The rows of the printed plan about data, gradients, optimizers, parameters and validation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainstack.backends import Workload
from trainstack.trainer.context import RunContext
from trainstack.trainer.data.step_batches import describe_order
from trainstack.trainer.data.training_data import TrainingData
from trainstack.trainer.module_checks import lacks_method

_MOST_LINES = 3


def setup_rows(context: RunContext, data: TrainingData, work: Workload) -> list[tuple[str, str]]:
    """Settings that decide what a run does, as label and value."""
    rows = [
        ("order", _order(context, data)),
        ("gradients", _gradients(context, work)),
        ("optimizer", "\n".join(_optimizers(work.optimizers))),
        ("parameters", _parameters(work.module, work.optimizers)),
        *context.stack.plan_rows(work),
        *_memory(context, data, work),
    ]
    module = context.module
    if not lacks_method(module, "val_step", context.val_step) and lacks_method(module, "get_val_dataloaders"):
        rows.append(("validation", "none: get_val_dataloaders is not defined"))
    return rows


def _memory(context: RunContext, data: TrainingData, work: Workload) -> list[tuple[str, str]]:
    """What one process needs, where parameters are sharded."""
    layers = ((one, one.gathered_parts(work.module)) for one in context.stack.layers())
    layer, parts = next(((one, found) for one, found in layers if found is not None), (context.stack, None))
    if parts is None:
        return []
    from trainstack.trainer.core.memory_plan import format_bytes, plan_memory, shard_count

    shards, passes = shard_count(work.module), 1 if layer.reduces_each_pass else data.plan.accumulation
    plan = plan_memory(work.module, work.optimizers, shards=shards, units=parts, accumulation=passes)
    sizes = [f"{name} {size}" for name, size in plan.rows() if name not in ("activations", "in all")]
    return [("memory", f"{format_bytes(plan.total)} a process without activations: {', '.join(sizes)}")]


def _order(context: RunContext, data: TrainingData) -> str:
    if context.stack.sampling is not None:
        return "each step draws its samples at random"
    order = "unknown" if data.loader is None else describe_order(data.loader)
    if order == "shuffled":
        return f"shuffled with seed {context.state.seed}"
    return f"{order} (sampler=sampler(dataset) to shuffle)" if order == "in data set order" else order


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


def _optimizers(optimizers: Sequence[Optimizer]) -> list[str]:
    lines = []
    for one in optimizers[:_MOST_LINES]:
        # a schedule may have changed the rate already, such as a warm-up, which begins at 0
        rates = sorted({float(g.get("initial_lr", g["lr"])) for g in one.param_groups if "lr" in g})
        decay = one.param_groups[0].get("weight_decay") if len(one.param_groups) == 1 else None
        shown = [type(one).__name__]
        if rates:
            shown.append(f"lr {rates[0]:g}" if len(rates) == 1 else f"lr {rates[0]:g} to {rates[-1]:g}")
        if isinstance(decay, int | float) and decay:
            shown.append(f"weight_decay {decay:g}")
        lines.append(" ".join(shown))
    more = len(optimizers) - len(lines)
    return [*lines, f"and {more} more"] if more > 0 else lines


def _parameters(module: nn.Module, optimizers: Iterable[Optimizer]) -> str:
    named = list(module.parameters())
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    frozen, unheld = (
        [p for p in named if not p.requires_grad],
        [p for p in named if p.requires_grad and id(p) not in held],
    )
    if not held & {id(p) for p in named}:  # the optimizers hold copies
        unheld = []
    counts = [_elements(part) for part in (named, frozen, unheld)]
    text = f"{counts[0] - counts[1] - counts[2]:,} train"
    for count, what in zip(counts[1:], ("are frozen", "are in no optimizer"), strict=True):
        text += f", {count:,} {what}" if count else ""
    lazy = sum(map(is_lazy, named))
    return f"{text}, {lazy} tensors get their shape in the first step" if lazy else text


def _elements(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters if not is_lazy(p))
