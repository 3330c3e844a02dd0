"""Bitwise comparison of two state trees."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainstack._tensor_bytes import bytes_of
from trainstack._tensor_classes import inner_tensors
from trainstack.checkpointing.encoding import SPARSE_LAYOUTS, Index, array_as_tensor
from trainstack.checkpointing.encoding import describe as place_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One place where two checkpoints differ.

    Attributes:
        where: such as "trainer_state.optimizers[0].state".
        one, other: the values there, as text.
        elements: of a tensor, the number of different elements; None if shapes or dtypes differ.
        max_abs: the largest magnitude of a difference; nan if one of the two has a nan.
    """

    where: str
    one: str
    other: str
    elements: int | None = None
    max_abs: float | None = None

    def __str__(self) -> str:
        if self.elements is None:
            return f"{self.where}: {self.one} | {self.other}"
        return f"{self.where}: {self.elements} elements differ, by at most {self.max_abs:.3g} ({self.one})"


def differences(one: Any, other: Any, root: str = "", place: tuple[Any, ...] = ()) -> Iterator[Difference]:
    """Every leaf in which two state trees differ. nan equals nan, and 0.0 differs from -0.0."""
    mine, theirs = children(one), children(other)
    where = place_of(root, list(place))
    if mine is None or theirs is None or type(one) is not type(other):
        yield from _leaf(where, one, other)
        return
    for name in ("maxlen", "default_factory"):  # of a deque and a defaultdict
        traits = [getattr(side, name, None) for side in (one, other)]
        if traits[0] != traits[1]:
            yield Difference(where=f"{where}.{name}", one=repr(traits[0]), other=repr(traits[1]))
    part = (lambda key: key) if isinstance(one, dict | torch.Tensor) else Index
    left, right = dict(mine), dict(theirs)
    for key in [*left, *(key for key in right if key not in left)]:
        inner = (*place, part(key))
        if key in left and key in right:
            yield from differences(left[key], right[key], root, inner)
        else:
            texts = [describe(side[key]) if key in side else "absent" for side in (left, right)]
            yield Difference(where=place_of(root, list(inner)), one=texts[0], other=texts[1])


def _leaf(where: str, one: Any, other: Any) -> Iterator[Difference]:
    kind = next(
        (kind for kind in (torch.Tensor, np.ndarray) if isinstance(one, kind) and isinstance(other, kind)), None
    )
    if kind is not None and one.dtype == other.dtype and one.shape == other.shape:
        if kind is np.ndarray:
            one, other = array_as_tensor(one), array_as_tensor(other)
        one, other = one.detach().cpu(), other.detach().cpu()
        count = int((_bytes(one) != _bytes(other)).any(1).sum()) if one.numel() else 0
        if count:
            wide = torch.complex128 if one.is_complex() else torch.float64
            distance = (one.to(wide) - other.to(wide)).abs().max().item()
            text = describe(one)
            yield Difference(where=where, one=text, other=text, elements=count, max_abs=float(distance))
    elif kind is not None or type(one) is not type(other) or repr(one) != repr(other):
        yield Difference(where=where, one=describe(one), other=describe(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, one row for each element."""
    return bytes_of(tensor).reshape(tensor.numel(), tensor.element_size())


def children(value: Any) -> list[tuple[Any, Any]] | None:
    """Keys and values of a container; None for other objects. Sets are sorted, because their order has no meaning."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, torch.Tensor) and value.layout in SPARSE_LAYOUTS:
        parts = ((name.lstrip("_"), getattr(value, name)()) for name in SPARSE_LAYOUTS[value.layout])
        return [("shape", value.shape), ("layout", str(value.layout)), *parts]
    subclass = inner_tensors(value)
    if subclass is not None:
        return [("attributes", subclass[1]), *subclass[0].items()]
    if isinstance(value, list | tuple | deque) and not isinstance(value, torch.Size):
        return list(enumerate(value))
    if isinstance(value, set | frozenset):
        return list(enumerate(sorted(value, key=lambda item: (type(item).__name__, repr(item)))))
    return None


def describe(value: Any) -> str:
    """A leaf as a short text: tensors by dtype and shape, other values by their `repr`."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"numpy {value.dtype} {list(value.shape)}"
    if children(value):
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
