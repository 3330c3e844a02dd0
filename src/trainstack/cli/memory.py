"""`plan_of_target` computes the memory of a process for a module that a file defines, without its weights."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import SequentialSampler

from trainstack.backends import build_trainer_backend
from trainstack.backends.single_process import move_to_device
from trainstack.errors import ConfigurationError
from trainstack.stage import Stage
from trainstack.trainer import TrainerArguments, TrainingPlan
from trainstack.trainer.core.memory_plan import MemoryPlan, plan_memory

_META = torch.device("meta")


def plan_of_target(
    made_by: Callable[..., Any],
    parameters: Mapping[str, Any],
    arguments: TrainerArguments,
    plan: TrainingPlan | None,
    given: argparse.Namespace,
) -> MemoryPlan:
    """The memory of a process that trains the module.

    Args:
        made_by: makes the module.
        parameters: of `made_by`.
        arguments: of the trainer; its backend says whether parameters are divided.
        plan: of the run; None if the number of samples is not known.
        given: `processes`, `shards` and `activations`.

    Raises:
        ConfigurationError: `shards` does not divide `processes`, or no layer divides parameters.
    """
    with _META:
        module = made_by(**parameters)
    stack = build_trainer_backend(arguments.resolved_backend, **arguments.layer_options)
    found = ((layer, layer.gathered_parts(module)) for layer in stack.layers())
    divides, units = next(((layer, parts) for layer, parts in found if parts is not None), (stack, None))
    shards = given.shards or (1 if units is None else given.processes // divides.replicas)
    if not shards or given.processes % shards or (units is None and shards > 1):
        raise ConfigurationError(
            f"--shards {shards} of --processes {given.processes} under backend {stack.spec!r}: write a number that "
            "divides the processes, and a backend that divides parameters, such as --backend fsdp."
        )
    optimizers = _optimizers_of(module, plan)
    return plan_memory(
        module,
        optimizers if isinstance(optimizers, list) else None,
        shards=shards,
        units=units or (),
        accumulation=1 if plan is None or divides.reduces_each_pass else plan.accumulation,
        step=(lambda: _forward(module, plan)) if given.activations else None,
        reasons={"optimizer": optimizers} if isinstance(optimizers, str) else {},
    )


def _optimizers_of(module: Any, plan: TrainingPlan | None) -> list[Optimizer] | str:
    """The optimizers that the module makes, or why there are none."""
    module.plan = plan
    steps, epochs = (1, 1) if plan is None else (plan.estimated_global_steps_per_epoch, plan.epochs)
    try:
        made = module.get_optimizers_schedulers(steps, epochs)
    except Exception as error:
        return f"get_optimizers_schedulers on the meta device: {type(error).__name__}: {error}"
    made = made[0] if isinstance(made, tuple) else made
    return [made] if isinstance(made, Optimizer) else list(made)


def _forward(module: nn.Module, plan: TrainingPlan | None) -> Any:
    """The outputs of a forward pass of the first micro-batch, on the meta device."""
    size = 1 if plan is None else plan.micro_batch
    loader = module.get_train_dataloader(SequentialSampler, size)  # type: ignore[operator]
    batch = move_to_device(next(iter(loader)), _META)
    return module(stage=Stage.TRAIN, global_step=0, batch=batch, device=_META)
