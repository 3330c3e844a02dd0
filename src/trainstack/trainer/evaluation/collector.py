"""`OutputCollector` collects step outputs and concatenates them once."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from trainstack.backends.processes.communicator import Communicator
from trainstack.backends.processes.gathering import StepList
from trainstack.backends.processes.packing import is_dense, pack, unpack
from trainstack.errors import ModuleContractError


class OutputCollector:
    """Collects step outputs of the same structure and concatenates them along dimension 0.

    Tensors of shape `(batch, ...)` become one tensor of shape `(total, ...)`, or a list of tensors if they differ in
    another dimension than the first. 0-dim tensors become shape `(steps,)`. Tuples, lists and dicts are collected item
    by item; anything else becomes a list. Dtypes are kept. Tensors are detached and moved to `device`, a few MiB at
    once. Tensors in a dataclass, or in a list of other objects, are copied.

    Args:
        device: the device of collected tensors, by default the CPU; None keeps each tensor on its device.
        reused_memory: whether later steps may write to the memory of returned tensors without a new version, as
            replayed CUDA graphs do. Then each tensor is copied.
    """

    def __init__(self, device: str | torch.device | None = "cpu", *, reused_memory: bool = False) -> None:
        self._target = _Target(None if device is None else torch.device(device), reused_memory)
        self._root: _Node | None = None
        self._joined: Any = None
        self._count = self._marked = 0

    def reset(self) -> None:
        """Drop all collected outputs."""
        self._root = self._joined = None
        self._count = self._marked = 0
        self._target.forget()

    def mark(self) -> None:
        """Mark all outputs up to now as those of finished global steps."""
        self._marked = self._count

    def back_to_mark(self) -> None:
        """Drop the outputs after the last `mark`. They belong to a step that has failed and is repeated."""
        if not self._marked:
            self.reset()
        elif self._root is not None and self._count > self._marked:
            self._target.fetch()
            self._root.cut(self._marked)
            self._count, self._joined = self._marked, None

    def collect(self, outputs: Any) -> None:
        """Keep the outputs of one step.

        Tensors on the target device are not copied, so they must not be changed in place afterwards, unless
        `reused_memory` was given.

        Raises:
            ModuleContractError: the structure differs from that of earlier steps.
        """
        if self._root is None:
            by_position = isinstance(outputs, list)
            self._root = _Items("outputs", outputs) if by_position else _make_node(outputs, "outputs")
        self._count += 1
        self._root.add(outputs, self._target)
        self._joined = None

    def collect_structure(self, outputs: Any) -> None:
        """Keep the structure of `outputs` without rows, for a borrowed micro-batch."""
        self.collect(outputs)
        self._target.fetch()
        if self._root is not None:
            self._root.empty_last()

    @property
    def is_empty(self) -> bool:
        """Whether there are no outputs since the last reset."""
        return self._root is None

    @property
    def is_single(self) -> bool:
        """Whether each step returned one value, not a tuple, list or dict. `all_outputs` is then a list of one item."""
        return self._root is not None and not isinstance(self._root, _Items)

    @property
    def all_outputs(self) -> Any:
        """All outputs, joined: a list for tensor, tuple or list outputs, a dict for dicts.

        Raises:
            ModuleContractError: a tensor was changed in place after it was collected.
        """
        if self._joined is None:
            self._joined = self._join()
        return self._joined

    def _join(self) -> Any:
        if self._root is None:
            return []
        self._target.fetch()
        joined = self._root.join()
        return joined if isinstance(self._root, _Items) else [joined]

    def all_outputs_alike(self, comm: Communicator, pad_value: float | None = None) -> Any:
        """`all_outputs` in the same form on all processes. All processes call this together.

        Args:
            comm: the communicator of the processes whose outputs are joined afterwards.
            pad_value: pads tensors that differ in another dimension than the first, at the ends of their dimensions.
                With None they become a list.

        Raises:
            ModuleContractError: as `all_outputs`; or tensors to pad have different numbers of dimensions.
        """
        places = {} if self._root is None else {place.path: place for place in self._root.tensors()}
        shapes = {path: place.row_shapes() for path, place in places.items()}
        by_rank = comm.gather(shapes, "the shapes of outputs") if comm.size > 1 else [shapes]
        for path, place in places.items():
            place.form = _form_of(path, set().union(*(one.get(path, ()) for one in by_rank)), pad_value)
        return self._join()

    @property
    def as_arguments(self) -> tuple[Any, ...]:
        """`all_outputs` as positional arguments of a hook: one for each output, or a dict as a single argument."""
        return as_arguments(self.all_outputs)


_Rows = tuple[int, ...]
"""The shape of a tensor without its first dimension."""


def _form_of(path: str, shapes: set[_Rows], pad_value: float | None) -> _Form:
    """The form in which to join tensors with rows of these shapes."""
    if len(shapes) < 2:
        return None
    if pad_value is None:
        return "list"
    if len({len(shape) for shape in shapes}) > 1:
        raise ModuleContractError(
            f"{path}: tensors with {sorted({len(shape) + 1 for shape in shapes})} dimensions cannot be padded to one "
            "shape. Return the same number of dimensions from each step, or remove pad_value to get a list."
        )
    return tuple(map(max, zip(*shapes, strict=True))), pad_value


def as_arguments(outputs: Any) -> tuple[Any, ...]:
    """Collected outputs as positional arguments of a hook: one for each output, or a dict as a single argument."""
    return (outputs,) if isinstance(outputs, dict) else tuple(outputs)


_NOTHING = object()
"""Replaces an object of a borrowed micro-batch."""


_BYTES_WAITING = 8 << 20
"""The largest number of bytes that wait on a device. It bounds the additional memory there."""


class _Target:
    """Moves tensors to a device.

    Tensors on another device are first copied on that device, and then fetched a few MiB at once. Each copy to the host
    synchronizes with the device, so a copy in each step would slow it down.

    Attributes:
        device: the target device; None for the device of each tensor.
        copies: whether to copy tensors that are already on the target device.
    """

    def __init__(self, device: torch.device | None, copies: bool) -> None:
        self.device, self.copies = device, copies
        self.forget()

    def forget(self) -> None:
        """Drop the tensors that wait for `fetch`."""
        self._waiting: list[tuple[list[Tensor], int, Tensor]] = []
        self._bytes = 0

    def is_elsewhere(self, value: Tensor) -> bool:
        """Whether `value` is on another device."""
        return self.device is not None and value.device != self.device

    def fetch_later(self, value: Tensor, kept: list[Tensor]) -> None:
        """Append a copy of `value` to `kept`. It is on the target device after the next `fetch`."""
        if value.nbytes > _BYTES_WAITING or type(value) not in (Tensor, nn.Parameter) or not is_dense(value):
            kept.append(value.to(self.device))
            return
        copied = value.clone(memory_format=torch.contiguous_format)
        self._waiting.append((kept, len(kept), copied))
        kept.append(copied)
        self._bytes += value.nbytes
        if self._bytes > _BYTES_WAITING:
            self.fetch()

    def fetch(self) -> None:
        """Move the waiting tensors to the target device, in one copy for each source device."""
        waiting = self._waiting
        self.forget()
        for device in {copied.device for *_, copied in waiting}:
            places = [(kept, place) for kept, place, copied in waiting if copied.device == device]
            tensors = [copied for *_, copied in waiting if copied.device == device]
            fetched = pack(tensors).to(self.device)  # synchronizes if the target is the host
            for (kept, place), tensor in zip(places, unpack(fetched, tensors), strict=True):
                kept[place] = tensor


class _Node:
    """One place in the structure of the outputs."""

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path

    def add(self, value: Any, target: _Target) -> None:
        raise NotImplementedError

    def cut(self, count: int) -> None:
        """Keep only the first `count` values. After a failed step there may be fewer."""
        raise NotImplementedError

    def empty_last(self) -> None:
        """Keep only the structure of the last value."""
        raise NotImplementedError

    def join(self) -> Any:
        raise NotImplementedError

    def tensors(self) -> Iterator[_Tensors]:
        """The places of tensors here and below."""
        return iter(())

    def _mismatch_error(self, value: Any, expected: str) -> ModuleContractError:
        return ModuleContractError(
            f"{self.path}: earlier steps returned {expected} here, this one returned {type(value).__name__}. "
            "Return the same structure from every step."
        )


_Form = Literal["list"] | tuple[_Rows, float] | None
"""The form of joined tensors: a list, or padded to rows of a shape. None chooses it by their shapes."""


class _Tensors(_Node):
    __slots__ = ("form", "kept", "versions")

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.kept: list[Tensor] = []
        self.versions: list[int] = []
        self.form: _Form = None

    def add(self, value: Any, target: _Target) -> None:
        if not isinstance(value, Tensor):
            raise self._mismatch_error(value, "a tensor")
        if value.requires_grad:
            value = value.detach()
        if target.is_elsewhere(value):
            self.versions.append(-1)
            target.fetch_later(value, self.kept)
            return
        if target.copies or not value.dim() or value.untyped_storage().nbytes() > value.nbytes:
            value = value.clone()  # a scalar is cheap to copy; a small view would keep the memory of a large tensor
        self.kept.append(value)
        # torch 2.13.0: the private `_version` counts writes in place; no public API does.
        self.versions.append(-1 if value.is_inference() else value._version)

    def cut(self, count: int) -> None:
        del self.kept[count:], self.versions[count:]

    def empty_last(self) -> None:
        last = self.kept[-1]
        self.kept[-1], self.versions[-1] = (last if last.dim() else last.reshape(1))[:0].clone(), -1

    def tensors(self) -> Iterator[_Tensors]:
        yield self

    def row_shapes(self) -> set[_Rows]:
        """The shapes of the collected tensors without their first dimension."""
        return {tuple(tensor.shape[1:]) for tensor in self.kept}

    def join(self) -> Tensor | StepList:
        for step, (tensor, version) in enumerate(zip(self.kept, self.versions, strict=True)):
            if version != -1 and version != tensor._version:
                raise ModuleContractError(
                    f"{self.path}: the tensor that step {step} returned was changed in place afterwards. "
                    "Return a copy: tensor.clone()."
                )
        parts = [t.reshape(1) if t.dim() == 0 else t for t in self.kept]
        if self.form == "list" or (self.form is None and len(self.row_shapes()) > 1):
            return StepList(parts)
        if self.form is not None:
            parts = [_padded(part, *self.form, self.path) for part in parts]
        return torch.cat(parts)


class _Objects(_Node):
    __slots__ = ("kept",)

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.kept: list[Any] = []

    def add(self, value: Any, target: _Target) -> None:
        if isinstance(value, Tensor) or _has_items(value):
            raise self._mismatch_error(value, f"a {type(self.kept[0]).__name__}" if self.kept else "a plain object")
        self.kept.append(_copied(value, target.device))

    def cut(self, count: int) -> None:
        del self.kept[count:]

    def empty_last(self) -> None:
        self.kept[-1] = _NOTHING

    def join(self) -> StepList:
        return StepList(value for value in self.kept if value is not _NOTHING)


class _Items(_Node):
    """A dict, tuple or list of further places."""

    __slots__ = ("children", "kind")

    def __init__(self, path: str, outputs: Any) -> None:
        super().__init__(path)
        self.kind = dict if isinstance(outputs, dict) else list
        self.children = {key: _make_node(value, f"{path}[{key!r}]") for key, value in _pairs(outputs)}

    def add(self, value: Any, target: _Target) -> None:
        if not isinstance(value, dict if self.kind is dict else list | tuple):
            raise self._mismatch_error(value, f"a {self.kind.__name__}")
        pairs = _pairs(value)
        if len(pairs) != len(self.children) or any(key not in self.children for key, _ in pairs):
            raise ModuleContractError(
                f"{self.path}: earlier steps returned the items {list(self.children)}, this one "
                f"{[key for key, _ in pairs]}. Return the same structure from every step{self._of_samples(value)}."
            )
        for key, item in pairs:
            self.children[key].add(item, target)

    @staticmethod
    def _of_samples(value: Any) -> str:
        """Advice for a list, which may have an item for each sample of its batch."""
        if not isinstance(value, list):
            return ""
        return (
            ": the items of a list are joined by their positions. If it has one for each sample, use predict(..., "
            "stream=True), write --output FILE.jsonl on the command line, or return a dict with a tensor for each field"
        )

    def cut(self, count: int) -> None:
        for child in self.children.values():
            child.cut(count)

    def empty_last(self) -> None:
        for child in self.children.values():
            child.empty_last()

    def tensors(self) -> Iterator[_Tensors]:
        for child in self.children.values():
            yield from child.tensors()

    def join(self) -> Any:
        joined = {key: child.join() for key, child in self.children.items()}
        return joined if self.kind is dict else list(joined.values())


def _padded(tensor: Tensor, rows: _Rows, value: float, path: str) -> Tensor:
    """`tensor` with rows of the shape `rows`, padded with `value`.

    Raises:
        ModuleContractError: the dtype of `tensor` cannot represent `value`.
    """
    try:
        padded = tensor.new_full((len(tensor), *rows), value)
        kept = float(tensor.new_full((1,), value).item()) if not tensor.is_complex() else value
    except (RuntimeError, OverflowError, TypeError):
        kept = None
    whole = tensor.is_floating_point() or tensor.is_complex()
    if kept is None or not (whole or kept == value):
        raise ModuleContractError(
            f"{path}: pad_value={value!r} with tensors of {tensor.dtype}, which cannot represent it. Give a value of "
            "this dtype, or return a tensor of another dtype from the step."
        )
    padded[tuple(slice(size) for size in tensor.shape)] = tensor
    return padded


def _copied(value: Any, device: torch.device | None) -> Any:
    """A copy of `value` with detached copies of its tensors and arrays. Other objects are shared."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True) if device is not None else value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, list | tuple | dict):
        items = {key: _copied(item, device) for key, item in _pairs(value)}
        if isinstance(value, tuple):
            return type(value)(*items.values()) if hasattr(value, "_fields") else tuple(items.values())
        copied: Any = copy(value)  # keeps the class
        for key, item in items.items():
            copied[key] = item
        return copied
    if is_dataclass(value) and not isinstance(value, type):
        copied = copy(value)
        for name in (field.name for field in fields(value) if hasattr(value, field.name)):
            object.__setattr__(copied, name, _copied(getattr(value, name), device))  # for a frozen one
        return copied
    return value


def _pairs(outputs: Any) -> list[tuple[Any, Any]]:
    return list(outputs.items() if isinstance(outputs, dict) else enumerate(outputs))


def _make_node(value: Any, path: str) -> _Node:
    if isinstance(value, Tensor):
        return _Tensors(path)
    return _Items(path, value) if _has_items(value) else _Objects(path)


def _has_items(value: Any) -> bool:
    """Whether `value` is collected item by item, not as an object."""
    nested = isinstance(value, list) and any(isinstance(item, Tensor | dict | tuple) for item in value)
    return nested or isinstance(value, dict | tuple)
