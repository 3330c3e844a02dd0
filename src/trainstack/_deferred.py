"""`DeferredTensor`: a tensor whose values are read at their use, so that a state needs no memory for them.

A loaded checkpoint has such tensors for those in its files, and a checkpoint to save for those that are sharded over
ranks.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

Tree = TypeVar("Tree")


class DeferredTensor(Tensor):
    """A dense tensor on the CPU with a shape and a dtype, whose values are read at each use.

    An operation on it reads the values and returns an ordinary tensor. The values are not kept. It cannot be written
    to.

    Args:
        shape: of the tensor.
        dtype: of its elements.
        read: returns the values, in separate memory.
        read_rows: returns the rows from the first index up to the second one, without it; None if rows cannot be read
            separately.
    """

    _read: Callable[[], Tensor]
    _read_rows: Callable[[int, int], Tensor] | None

    def __new__(
        cls,
        shape: torch.Size | list[int],
        dtype: torch.dtype,
        read: Callable[[], Tensor],
        read_rows: Callable[[int, int], Tensor] | None = None,
    ) -> DeferredTensor:
        # private in torch 2.13.0, and the documented way to make tensor subclasses without memory
        made: DeferredTensor = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype)
        made._read, made._read_rows = read, read_rows
        return made

    def whole(self) -> Tensor:
        """The values, in new memory."""
        return self._read()

    def rows(self, first: int, end: int) -> Tensor:
        """Rows `first` to `end`, without `end`, in separate memory. Other rows are not read if that is possible."""
        if self._read_rows is None:
            return self.whole()[first:end].clone()
        return self._read_rows(first, end)

    def numpy(self, *, force: bool = False) -> Any:
        return self.whole().numpy(force=force)

    def tolist(self) -> Any:
        return self.whole().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made: Tensor = memo.setdefault(id(self), self.whole())
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeferredTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if isinstance(value, cls) and argument.alias_info is not None and argument.alias_info.is_write:
                raise RuntimeError(f"{func}: a tensor of a checkpoint cannot be written to. Clone it first.")
        return func(*_read_all(args), **_read_all(kwargs or {}))


def _read_all(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_read_all(item) for item in value)
    if type(value) is dict:
        return {key: _read_all(item) for key, item in value.items()}
    return whole(value)


def whole(value: Any) -> Any:
    """The values of a `DeferredTensor` in new memory; other objects are returned unchanged."""
    return value.whole() if isinstance(value, DeferredTensor) else value


def materialized(tree: Tree) -> Tree:
    """A copy of the containers of `tree` with values in place of each `DeferredTensor`; other leaves are the same
    objects.

    A tensor that occurs several times in `tree` is one tensor in the copy.
    """
    made: dict[int, Tensor] = {}

    def visit(value: Any) -> Any:
        if isinstance(value, DeferredTensor):
            if id(value) not in made:
                made[id(value)] = value.whole()
            return made[id(value)]
        if isinstance(value, dict):
            out = copy.copy(value)  # keeps the class, and with it a factory or the versions of modules
            for key, item in value.items():
                out[key] = visit(item)
            return out
        if isinstance(value, deque):
            return deque((visit(item) for item in value), value.maxlen)
        return type(value)(visit(item) for item in value) if type(value) in (list, tuple) else value

    found: Tree = visit(tree)
    return found


def split(
    tree: Any, is_split: Callable[[Any], bool], replace: Callable[[int, Tensor], Any]
) -> tuple[Any, list[Tensor]]:
    """`tree` with `replace(number, tensor)` for each tensor for which `is_split` is True, and these tensors by number.

    Dicts are visited in the order of the texts of their keys, so equal trees give equal numbers for any insertion
    order. A tensor that occurs several times has one number.
    """
    tensors: dict[int, tuple[Tensor, Any]] = {}

    def visit(value: Any) -> Any:
        if isinstance(value, Tensor):
            if not is_split(value):
                return value
            if id(value) not in tensors:
                tensors[id(value)] = value, replace(len(tensors), value)
            return tensors[id(value)][1]
        if isinstance(value, Mapping):
            new = {key: visit(value[key]) for key in sorted(value, key=repr)}
            if not isinstance(value, dict):
                return {key: new[key] for key in value}
            out = copy.copy(value)
            out.update(new)
            return out
        if isinstance(value, deque):
            return deque((visit(item) for item in value), value.maxlen)
        return type(value)(visit(item) for item in value) if type(value) in (list, tuple) else value

    found = visit(tree)
    return found, [tensor for tensor, _ in tensors.values()]
