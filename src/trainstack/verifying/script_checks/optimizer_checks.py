"""Checks of optimizers, schedules and gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import lr_scheduler

from trainstack.verifying.script_checks.evidence import Evidence
from trainstack.verifying.script_checks.findings import Found, check

_DIVERGED = 10.0
"""A loss of the same batch that is so many times as large after a few steps has diverged."""
_EXPLODED = 1e4
_HEAVY_DECAY = 1e-3
"""Below this, weight decay of a norm or a bias has no visible effect."""


@check("D403", "problem", "a learning rate that is far too high")
def diverging(evidence: Evidence) -> Iterator[Found]:
    """The loss of the first batch, before and after the dry run."""
    if not evidence.losses or evidence.first_loss_again is None or evidence.losses[0] < 1e-3:
        return
    before, after = evidence.losses[0], evidence.first_loss_again
    if not math.isfinite(after) or after > max(_DIVERGED * before, before + 1):
        rates = sorted({float(group["lr"]) for one in evidence.optimizers for group in one.param_groups})
        yield (
            f"the loss of the first batch rises from {before:.3g} to {after:.3g} in {len(evidence.gradients)} steps, "
            f"with lr={', '.join(f'{rate:g}' for rate in rates)}",
            "Write a learning rate that is 10 to 100 times lower. trainer.find_lr() proposes one.",
            evidence.method_place("get_optimizers_schedulers"),
        )


@check("D404", "problem", "a learning rate of 0")
def no_learning_rate(evidence: Evidence) -> Iterator[Found]:
    """A warm-up may begin with it, and only then."""
    groups = [group for one in evidence.optimizers for group in one.param_groups]
    if groups and not evidence.schedulers and all(float(group.get("lr", 1.0)) == 0 for group in groups):
        yield (
            "the learning rate is 0, so nothing is trained",
            "Write lr=1e-3 for Adam, or lr=0.1 for SGD, to begin with.",
            evidence.method_place("get_optimizers_schedulers"),
        )


@check("D405", "problem", "a warm-up that is longer than the run")
def long_warmup(evidence: Evidence) -> Iterator[Found]:
    """The learning rate never reaches its value."""
    plan = evidence.plan
    if plan is None or not plan.total_steps:
        return
    for scheduler in evidence.schedulers:
        length = _warmup_of(scheduler, plan.total_steps)
        if length is not None and length > plan.total_steps:
            yield (
                f"the warm-up of {type(scheduler).__name__} has {length} steps, and the run has {plan.total_steps}: "
                "the learning rate never reaches its value",
                "Write a share of self.plan.total_steps, such as int(0.05 * self.plan.total_steps).",
                evidence.method_place("get_optimizers_schedulers"),
            )


def _warmup_of(scheduler: Any, total: int) -> int | None:
    """The length of a warm-up; None where there is none or it is not known."""
    if isinstance(scheduler, lr_scheduler.LinearLR):
        return scheduler.total_iters if scheduler.end_factor > scheduler.start_factor else None
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        # torch 2.13.0: there is no public way to the parts of this scheduler.
        return _warmup_of(scheduler._schedulers[0], total)
    if isinstance(scheduler, lr_scheduler.LambdaLR):
        for function in scheduler.lr_lambdas:
            try:
                values = [function(step) for step in (0, total // 2, total, total + 1)]
            except Exception:  # the function may depend on more than the step
                return None
            if values[0] < values[1] < values[2] < values[3]:
                return total + 1
    return None


@check("D406", "hint", "gradients that explode")
def exploding(evidence: Evidence) -> Iterator[Found]:
    """Their joint norm, before clipping."""
    norms = [norm for norm in evidence.gradient_norms if math.isfinite(norm)]
    if norms and max(norms) > _EXPLODED:
        args = evidence.args
        clipped = "" if args.clip_grads else " and are not clipped"
        yield (
            f"the gradients have a norm of {max(norms):.2g} in the first steps{clipped}",
            "Scale the inputs and targets, or initialize the layers with smaller weights.",
            evidence.method_place("train_step"),
        )


@check("D407", "hint", "parameters whose gradient is always 0")
def zero_gradients(evidence: Evidence) -> Iterator[Found]:
    """In each step, such as behind a ReLU that gives 0 for all samples."""
    steps = evidence.gradients
    if len(steps) < 2:
        return
    names = [name for name in steps[0] if all(step.get(name, 1.0) == 0 for step in steps)]
    if names:
        count = f"{len(names)} parameter{'s' * (len(names) > 1)}"
        yield (
            f"{count} get a gradient of 0 in each of {len(steps)} steps: {', '.join(names[:5])}",
            "Look for an activation that gives 0 for all samples, a weight of 0 behind it, or a lower learning rate.",
            evidence.method_place("train_step"),
        )


@check("D408", "info", "weight decay of norms and biases")
def decayed_norms(evidence: Evidence) -> Iterator[Found]:
    """Most recipes leave them out."""
    norms = {
        id(parameter)
        for part in evidence.module.modules()
        if "Norm" in type(part).__name__ or isinstance(part, nn.modules.batchnorm._BatchNorm)
        for parameter in part.parameters(recurse=False)
    }
    groups = [group for one in evidence.optimizers for group in one.param_groups]
    heavy = [group for group in groups if float(group.get("weight_decay") or 0.0) > _HEAVY_DECAY]
    if any(id(parameter) in norms for group in heavy for parameter in group["params"]):
        yield (
            f"weight_decay={heavy[0]['weight_decay']:g} applies to norms and biases too",
            "Write AdamW(parameter_groups(self.model, lr=..., weight_decay=...)), which leaves them out. "
            "SupervisedModule takes such an optimizer in place of a name.",
            evidence.method_place("get_optimizers_schedulers"),
        )
