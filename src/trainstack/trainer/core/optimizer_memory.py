"""`state_tensors` determines the state of an optimizer after its first step, by a step on the meta device."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainstack._dispatch import dispatch_to


def state_tensors(optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    """Return each tensor of the state after a first step, on the meta device, with the parameter that it belongs to.

    A copy of the optimizer runs a step with parameters and gradients of the same shapes and dtypes. A value that the
    step reads from a tensor, as with `item()`, is 1. The optimizer and its parameters do not change.

    Returns:
        Pairs of parameter and state tensor.

    Raises:
        ValueError: the step needs a closure or values, or the optimizer keeps tensors outside of its groups; the
            message gives the reason.
    """
    kept = [
        name for name, value in vars(optimizer).items() if name not in _OWN and next(_tensors(value), None) is not None
    ]
    if kept:
        raise ValueError(f"{type(optimizer).__name__} keeps tensors in its attribute {kept[0]!r}")
    real: dict[int, Tensor] = {}
    trial = _copy_of(optimizer, real)
    try:
        with reading_ones():
            trial.step()
    except Exception as error:
        raise ValueError(
            f"{type(optimizer).__name__} cannot step without values: {type(error).__name__}: {error}"
        ) from error
    return [(real[id(stand_in)], tensor) for stand_in, state in trial.state.items() for tensor in _tensors(state)]


_OWN = ("param_groups", "state", "defaults")


def _copy_of(optimizer: Optimizer, real: dict[int, Tensor]) -> Optimizer:
    """Copy `optimizer` without state and hooks, over stand-ins; `real` gets the parameter of each stand-in by id."""
    trial = copy.copy(optimizer)
    trial.state = defaultdict(dict)
    trial.param_groups = [
        {**group, "params": [_stand_in(one, real) for one in group["params"]], **_portable(group)}
        for group in optimizer.param_groups
    ]
    vars(trial).pop("step", None)  # torch 2.13.0: a scheduler replaces `step` by a wrapper that records calls
    for name in [name for name in vars(trial) if name.endswith("_hooks")]:
        setattr(trial, name, OrderedDict())
    return trial


def _portable(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with which a step runs on any device; they do not change the form of the state."""
    return {name: False for name in ("fused", "capturable") if group.get(name)}


def _stand_in(parameter: Tensor, real: dict[int, Tensor]) -> Tensor:
    made = nn.Parameter(
        torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), requires_grad=parameter.requires_grad
    )
    if parameter.requires_grad:
        made.grad = torch.empty_like(made)
    real[id(made)] = parameter
    return made


def reading_ones() -> AbstractContextManager[Any]:
    """Context manager in which a value that is read from a meta tensor, as with `item()`, is 1."""

    def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        return func(*args, **kwargs)

    return dispatch_to(handle)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
