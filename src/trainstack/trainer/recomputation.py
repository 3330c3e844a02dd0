"""`recompute_units`: parts of a model give up their activations and compute them again in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recompute_units(module: nn.Module, units: Sequence[nn.Module]) -> None:
    """Let each call of `units` keep its inputs alone; units of an earlier run that are not among them keep all again.

    As with `Module.compile`, the call is replaced where torch looks for a compiled one: names, the state dict, copies
    and pickles stay the same. Names of torch 2.13.0.
    """
    for part in module.modules():
        if isinstance(part._compiled_call_impl, Recomputes):
            part._compiled_call_impl = None
    for unit in units:
        unit._compiled_call_impl = Recomputes(unit)


class Recomputes:
    """The call of a unit."""

    def __init__(self, unit: nn.Module) -> None:
        self._unit = unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Any = self._unit._call_impl
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        return checkpoint(partial(call, **kwargs), *args, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Around the forward pass, and around its repetition."""
        written: list[_Written] = []
        return _noting(self._unit, written), _repeating(written)


class _Written(NamedTuple):
    """A buffer to which a forward pass has written, or that it has replaced; `before` is a copy of its value."""

    owner: dict[str, Any]
    name: str
    tensor: Tensor
    before: Tensor


@contextmanager
def _noting(unit: nn.Module, written: list[_Written]) -> Iterator[None]:
    """Keep the values that buffers have before the block, of those that it changes."""
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
    """A block that begins with the buffers of the forward pass, and leaves those of now behind.

    Memory is written by `.data`, which raises no version: the graph may hold the buffer.
    """
    now = [(one.owner, one.name, one.owner.get(one.name), one.tensor, one.tensor.clone()) for one in written]
    for one in written:
        one.owner[one.name] = one.tensor
        one.tensor.data.copy_(one.before)
    try:
        yield
    finally:  # torch ends a repetition early by an exception
        for owner, name, current, tensor, value in now:
            owner[name] = current
            tensor.data.copy_(value)


def _version(buffer: Tensor) -> int | None:
    return None if buffer.is_inference() else buffer._version
