"""`trainstack checkpoints diff`: in what two checkpoints differ, bit by bit."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainstack.checkpointing.decoding import StateDecoder
from trainstack.checkpointing.leaves import array_as_tensor
from trainstack.checkpointing.manifest import Manifest
from trainstack.checkpointing.places import Index
from trainstack.checkpointing.places import describe as place_of
from trainstack.checkpointing.reading import read_states
from trainstack.cli.outline import children, describe
from trainstack.cli.printing import print_json, print_line

ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One place where two checkpoints differ.

    Attributes:
        where: such as "trainer_state.optimizers[0].state".
        one, other: what stands there, in words.
        elements: of a tensor, how many differ; None where shapes or dtypes do.
        max_abs: the largest magnitude of a difference; nan if one of the two is nan somewhere.
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


def diff(args: argparse.Namespace) -> int:
    """Compare two checkpoints; 0 if all bits agree, else 1."""
    (one, states), (other, other_states) = read_states(args.one), read_states(args.other)
    model_only = args.model or one.kind == "model" or other.kind == "model"
    if model_only:
        found = list(differences(_model_of(states), _model_of(other_states), "model"))
    else:
        found = list(differences({**states, **_facts(one)}, {**other_states, **_facts(other)}))
    if args.json:
        rows = [{name: getattr(row, name) for name in Difference.__dataclass_fields__} for row in found]
        print_json({"same": not found, "compared": "model" if model_only else "all", "differences": rows})
    else:
        for row in found:
            print_line(str(row))
        what = "the weights" if model_only else "all states, plans and versions"
        print_line(f"{len(found)} differences in {what}" if found else f"{what} agree in every bit")
    return 1 if found else 0


def _model_of(states: dict[str, Any]) -> Any:
    return next(iter(states.values()))  # the module's state comes first in both kinds


def _facts(content: Manifest) -> dict[str, Any]:
    plain = StateDecoder({})
    return {
        "plan": plain.decode(content.plan),
        "metadata": plain.decode(content.metadata),
        "versions": content.versions,
    }


def differences(one: Any, other: Any, root: str = "", place: tuple[Any, ...] = ()) -> Iterator[Difference]:
    """Every leaf in which two trees of state differ; nan equals nan, and 0.0 is not -0.0."""
    mine, theirs = children(one), children(other)
    where = place_of(root, list(place))
    if mine is None or theirs is None or type(one) is not type(other):
        yield from _leaf(where, one, other)
        return
    part = (lambda key: key) if isinstance(one, dict) else Index
    left, right = dict(mine), dict(theirs)
    for key in [*left, *(key for key in right if key not in left)]:
        inner = (*place, part(key))
        if key in left and key in right:
            yield from differences(left[key], right[key], root, inner)
        else:
            texts = [describe(side[key]) if key in side else ABSENT for side in (left, right)]
            yield Difference(where=place_of(root, list(inner)), one=texts[0], other=texts[1])


def _leaf(where: str, one: Any, other: Any) -> Iterator[Difference]:
    if all(isinstance(value, torch.Tensor) for value in (one, other)):
        yield from _tensors(where, one, other)
    elif all(isinstance(value, np.ndarray) for value in (one, other)) and one.dtype == other.dtype:
        yield from _tensors(where, array_as_tensor(one), array_as_tensor(other))
    elif type(one) is not type(other) or repr(one) != repr(other):
        yield Difference(where=where, one=describe(one), other=describe(other))


def _tensors(where: str, one: torch.Tensor, other: torch.Tensor) -> Iterator[Difference]:
    if one.dtype != other.dtype or one.shape != other.shape:
        yield Difference(where=where, one=describe(one), other=describe(other))
        return
    count = int((_bytes(one) != _bytes(other)).any(1).sum()) if one.numel() else 0
    if count:
        wide = torch.complex128 if one.is_complex() else torch.float64
        distance = (one.to(wide) - other.to(wide)).abs().max().item()
        text = describe(one)
        yield Difference(where=where, one=text, other=text, elements=count, max_abs=float(distance))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """One row of bytes an element."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).reshape(tensor.numel(), tensor.element_size())
