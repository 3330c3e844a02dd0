"""Records under `torch.func.vmap`, and the physical tensors behind the tensors of `train_step`.

Under `vmap` a tensor of one record is a view of a *physical* tensor with all records along one dimension. The functions
here give this tensor out and put one back. A caller must keep records apart: `vmap` cannot check it.

The names of `torch._C._functorch` are private; read with torch 2.13.0. Where one is missing, `is_available` says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.func import vmap

functorch: Any = getattr(getattr(torch, "_C"), "_functorch", None)  # noqa: B009 - torch 2.13.0, private
_NAMES = (
    "_add_batch_dim",
    "_vmap_decrement_nesting",
    "_vmap_increment_nesting",
    "get_unwrapped",
    "maybe_current_level",
    "maybe_get_bdim",
    "maybe_get_level",
    "pop_dynamic_layer_stack",
    "push_dynamic_layer_stack",
)


def is_available() -> bool:
    """Whether this version of torch has all the private names that are needed."""
    return all(hasattr(functorch, name) for name in _NAMES)


def run_per_record(function: Callable[..., object], columns: Sequence[Tensor]) -> None:
    """Call `function` once for all records, which sees those of one.

    The same as `torch.func.vmap` with `randomness="different"`, without its handling of nested inputs and outputs.

    Args:
        function: is called with as many tensors as `columns`, each without its first dimension. To hand something out
            it stores the result of `unwrap`.
        columns: at least 1 tensor, records along dimension 0.
    """

    _load_decompositions()
    level = functorch._vmap_increment_nesting(len(columns[0]), "different")
    try:
        function(*(functorch._add_batch_dim(column, 0, level) for column in columns))
    finally:
        functorch._vmap_decrement_nesting()


@functools.cache
def _load_decompositions() -> None:
    """Load the decompositions now: `torch.func.vmap` loads them in its first call."""
    vmap(torch.neg)(torch.zeros(1))


def current_level() -> int | None:
    """The number of the innermost transform of `torch.func` that is active; None outside of all."""
    level: int | None = functorch.maybe_current_level()
    return level


def is_batched(tensor: Tensor, level: int) -> bool:
    """Whether `tensor` differs between the records of the `vmap` with this number."""
    return bool(functorch.maybe_get_level(tensor) == level and functorch.maybe_get_bdim(tensor) != -1)


def is_shared(tensor: Tensor) -> bool:
    """Whether `tensor` belongs to no transform of `torch.func`, so that all records have it."""
    return bool(functorch.maybe_get_level(tensor) == -1)


def version(tensor: Tensor) -> int | None:
    """The number of writes into the memory of a tensor that differs between records; None if torch does not count."""
    physical: Tensor = functorch.get_unwrapped(tensor)
    return None if physical.is_inference() else physical._version  # torch 2.13.0


def unwrap(tensor: Tensor, level: int, records: int) -> Tensor:
    """The physical tensor, `(records, *tensor.shape)`; a view, also of a tensor that all records share.

    Args:
        tensor: seen by `train_step` under the `vmap` with this number, and under no transform within it.
        level: of `current_level`.
        records: of that `vmap`.
    """
    if not is_batched(tensor, level):
        return tensor.expand(records, *tensor.shape)
    physical: Tensor = functorch.get_unwrapped(tensor)
    place = functorch.maybe_get_bdim(tensor)
    return physical if place == 0 else physical.movedim(place, 0)


def wrap(physical: Tensor, level: int) -> Tensor:
    """The tensor of one record for a physical tensor with the records along dimension 0; the reverse of `unwrap`."""
    seen: Tensor = functorch._add_batch_dim(physical, 0, level)
    return seen


@contextmanager
def outside_vmap() -> Iterator[None]:
    """A block in which functions on physical tensors run, and are differentiated, as if there were no `vmap`."""
    layer = functorch.pop_dynamic_layer_stack()
    try:
        yield
    finally:
        functorch.push_dynamic_layer_stack(layer)


class RecordsDiverge(BaseException):
    """`train_step` asks for a number or a shape that is not the same for all records.

    No `Exception`, so that the user's code does not catch it.

    Attributes:
        groups: positions of the records that agree, int64 each; none if all have to run again.
    """

    def __init__(self, groups: list[Tensor]) -> None:
        super().__init__(f"{len(groups)} groups")
        self.groups = groups


def require_agreement(physical: Tensor) -> None:
    """Raise `RecordsDiverge` unless all records have the same values; nan is equal to itself."""
    groups = _groups(map(repr, physical.detach().reshape(len(physical), -1).tolist()))
    if len(groups) > 1:
        raise RecordsDiverge([torch.tensor(group, device=physical.device) for group in groups])


def require_same(items: Sequence[Any]) -> NoReturn:
    """Raise `RecordsDiverge` for plain objects, one a record, that are not all equal."""
    raise RecordsDiverge([torch.tensor(group) for group in _groups(map(key_of, items))])


def key_of(item: Any) -> Any:
    """Equal for texts and numbers with the same value and type, and for no two other objects."""
    return (type(item), repr(item)) if type(item) in (str, bytes, bool, int, float) else id(item)


def _groups(keys: Iterable[Any]) -> list[list[int]]:
    """The positions of equal keys."""
    places: dict[Any, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return list(places.values())
