"""What `get_optimizers_schedulers` may return, and the sentences for what it may not."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainstack.errors import ModuleContractError
from trainstack.trainer.logs import RunLogger
from trainstack.trainer.schedulers.config import SchedulerConfig
from trainstack.trainer.schedulers.making import is_scheduler, is_scheduler_factory

_HOW = "Return ([optimizer], [scheduler]), or ([optimizer], []) without a scheduler."


def checked_optimizers_schedulers(
    returned: Any, module: nn.Module, log: RunLogger
) -> tuple[tuple[Optimizer, ...], tuple[Any, ...]]:
    """Optimizers and schedulers, or factories of schedulers, as tuples, checked against `module`.

    Raises:
        ModuleContractError: something in it is none, or belongs to other parameters or another optimizer.
    """
    if isinstance(returned, Optimizer):
        returned = (returned, ())
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        what = "nothing" if returned is None else f"a {type(returned).__name__}"
        what += f" of {len(returned)} items" if isinstance(returned, tuple | list) else ""
        raise ModuleContractError(f"get_optimizers_schedulers returned {what}. {_HOW}")
    optimizers, schedulers = _as_tuple(returned[0]), _as_tuple(returned[1])
    if not optimizers:
        raise ModuleContractError(f"get_optimizers_schedulers returned no optimizer. {_HOW}")
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ModuleContractError(
                f"get_optimizers_schedulers returned a {type(optimizer).__name__} among the optimizers. {_HOW}"
            )
        if _needs_closure(optimizer):
            raise ModuleContractError(
                f"{type(optimizer).__name__} evaluates a closure several times a step, which the loop does not offer. "
                "Use a first-order optimizer such as torch.optim.AdamW."
            )
    _check_parameters(optimizers, module, log)
    for scheduler in schedulers:
        _check_scheduler(scheduler, optimizers)
    return optimizers, schedulers


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _check_parameters(optimizers: Sequence[Optimizer], module: nn.Module, log: RunLogger) -> None:
    mine = {id(p) for p in module.parameters()}
    held: set[int] = set()
    for position, optimizer in enumerate(optimizers):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        foreign = [tuple(p.shape) for p in parameters if id(p) not in mine]
        if foreign:
            raise ModuleContractError(
                f"optimizer {position} ({type(optimizer).__name__}) holds {len(foreign)} parameters that are not "
                f"{type(module).__name__}'s, the first of shape {foreign[0]}. Make it over self.parameters(), and "
                "make the model an attribute of the module before that."
            )
        twice = sum(id(p) in held for p in parameters)
        if twice:
            raise ModuleContractError(
                f"optimizer {position} ({type(optimizer).__name__}) holds {twice} parameters that an optimizer before "
                "it holds as well, so they would move twice a step. Give each parameter to one optimizer."
            )
        held |= {id(p) for p in parameters}
    left_out = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in held]
    if left_out:
        names = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
        log.warning(f"{len(left_out)} trainable parameters are in no optimizer and will not change: {names}")


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _check_scheduler(scheduler: Any, optimizers: Sequence[Optimizer]) -> None:
    if isinstance(scheduler, SchedulerConfig):
        scheduler = scheduler.scheduler
    kind = type(scheduler).__name__
    if is_scheduler_factory(scheduler):
        return
    if not is_scheduler(scheduler):
        raise ModuleContractError(f"get_optimizers_schedulers returned a {kind} among the schedulers. {_HOW}")
    owner = getattr(scheduler, "optimizer", None)
    if owner is not None and all(owner is not optimizer for optimizer in optimizers):
        raise ModuleContractError(
            f"a {kind} belongs to an optimizer that get_optimizers_schedulers did not return. Make it over one of "
            "the optimizers you return."
        )
