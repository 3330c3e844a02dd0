"""`recompute_units`: discard activations of parts of a model, and recompute them in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recompute_units(module: nn.Module, units: Sequence[nn.Module]) -> None:
    """Let each call of `units` save only its inputs; other parts of `module` no longer recompute.

    Like `Module.compile`, it sets the attribute from which torch takes a compiled call, so names, the state dict,
    copies and pickles stay the same. The private names were checked on torch 2.13.0.

    Args:
        module: module that contains the units.
        units: parts to recompute.
    """
    for part in module.modules():
        if isinstance(part._compiled_call_impl, Recomputes):
            part._compiled_call_impl = None
    for unit in units:
        unit._compiled_call_impl = Recomputes(unit)


class Recomputes:
    """Replaces the call of a unit."""

    def __init__(self, unit: nn.Module) -> None:
        self._unit = unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Any = self._unit._call_impl
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        return checkpoint(partial(call, **kwargs), *args, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return context managers for the forward pass and for its repetition."""
        written: list[_Written] = []
        return _noting(self._unit, written), _repeating(written)


class _Written(NamedTuple):
    """A buffer that a forward pass has written or replaced; `before` is a copy of its earlier value."""

    owner: dict[str, Any]
    name: str
    tensor: Tensor
    before: Tensor


@contextmanager
def _noting(unit: nn.Module, written: list[_Written]) -> Iterator[None]:
    """Append to `written` the buffers that change inside the block, with their values before it."""
    held = [
        (part._buffers, name, buffer, _version(buffer), buffer.clone())
        for part in unit.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    yield
    written += [
        _Written(owner, name, buffer, before)
        for owner, name, buffer, version, before in held
        if owner.get(name) is not buffer or version != _version(buffer)
    ]


@contextmanager
def _repeating(written: Sequence[_Written]) -> Iterator[None]:
    """Context manager that starts with the buffers of the forward pass, and restores the current ones at its end.

    It writes through `.data`, which does not increase the version counter, because the graph may hold the buffer.
    """
    now = [(one.owner, one.name, one.owner.get(one.name), one.tensor, one.tensor.clone()) for one in written]
    for one in written:
        one.owner[one.name] = one.tensor
        one.tensor.data.copy_(one.before)
    try:
        yield
    finally:  # torch ends a repetition early with an exception
        for owner, name, current, tensor, value in now:
            owner[name] = current
            tensor.data.copy_(value)


def _version(buffer: Tensor) -> int | None:
    return None if buffer.is_inference() else buffer._version
