"""`run_rank` runs a case on one rank; `summary` converts the result of a side to values of JSON."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tools.differential import rank_breaks
from tools.differential.case import TAKE_OUTPUTS, Case
from tools.differential.comparison import Outcome, outcome
from tools.differential.library import LibraryRun
from tools.differential.rank_cases import draw_for_ranks
from tools.differential.rank_classes import RANK_PENDING, without_rank_classes
from tools.differential.trace import Bits, bits_of


class Chosen(NamedTuple):
    """A case and its settings, as JSON for a rank.

    Attributes:
        seed: the seed of the case.
        number: the number of the case.
        size: the number of ranks.
        kept: pending classes to which the case can belong.
        simplest: fields of the case that have their default instead.
        backend: the backend of the ranks, `ddp` or `fsdp`.
    """

    seed: int
    number: int
    size: int
    kept: Sequence[str] = ()
    simplest: Sequence[str] = ()
    backend: str = "ddp"

    def case(self) -> Case:
        """The case."""
        case = draw_for_ranks(self.seed, self.number, self.size, self.backend)
        case = without_rank_classes(case, [name for name in RANK_PENDING if name not in self.kept])
        return replace(case, **{one.name: _default(one) for one in fields(case) if one.name in self.simplest})


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def run_rank(chosen: list[Any], folder: str, breaks: str = "") -> dict[str, Any]:
    """Run a case as the rank of the environment.

    Args:
        chosen: the items of a `Chosen`.
        folder: for the files of the run.
        breaks: a fault of `rank_breaks`.
    """
    rank = int(os.environ["RANK"])
    case = Chosen(*chosen).case()
    with rank_breaks.broken(breaks, rank):
        found = outcome(case, lambda case, task: LibraryRun(case, task, Path(folder)), rank)
    return summary(case, found)


def summary(case: Case, found: Outcome) -> dict[str, Any]:
    """The result of a side: state, log, calls in order, and outputs by call."""
    if found.error is not None:
        return {"error": type(found.error).__name__, "text": str(found.error), "traceback": found.traceback}
    calls, outputs = list[Any](), dict[str, Any]()
    for kind, name, *given in found.calls:
        if kind == "reached":
            number = given[0] if given and isinstance(given[0], int) else None
            calls.append([name, number])
            if name in TAKE_OUTPUTS and len(given) > 1:
                key = f" of {given[-1]}" if name == "on_end_val_epoch" else ""
                rest = given[1:-1] if key else given[1:]
                outputs.setdefault(f"{name}{key} at {number}", []).extend(_predictions(case.returns, rest))
            elif name == "validation_end":
                calls[-1].append(plain(given[0]))
        elif kind == "optimizer":
            calls.append([f"optimizer {name}", *map(plain, given)])
        elif kind == "zero_grad":
            calls.append([f"zero_grad {name}"])
    state = {name: plain(value) for name, value in found.state.items() if not name.startswith("random")}
    random = {name: hash_of(value) for name, value in found.state.items() if name.startswith("random")}
    return {"state": state, "log": plain(bits_of(found.log)), "calls": calls, "outputs": outputs, "random": random}


def _predictions(returns: str, given: list[Any]) -> list[list[float]]:
    """The rows of `pred` in the arguments of a hook: they belong to samples, not to micro-batches."""
    if returns == "loss" or not given:
        return []
    if returns in ("tuple", "list"):
        parts = [given[1]]
    elif returns == "dict":
        parts = [given[0]["pred"]]
    elif returns == "nested":
        parts = [given[1]["pred"]]
    else:
        parts = [one["pred"] for one in given[0]]
    return [row for part in parts for row in _rows(part)]


def _rows(part: Any) -> list[list[float]]:
    numbers = _numbers(part)
    width = part.shape[1]
    return [numbers[begin : begin + width] for begin in range(0, len(numbers), width)]


def _numbers(bits: Bits) -> list[Any]:
    kind = getattr(torch, bits.dtype.removeprefix("torch."), None)
    if not bits.data or not isinstance(kind, torch.dtype):
        return [bits.data.hex()] if bits.data else []
    tensor = torch.frombuffer(bytearray(bits.data), dtype=kind)
    return list((torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten().tolist())


def plain(value: Any) -> Any:
    """A value with `Bits` as lists and numbers."""
    if isinstance(value, Bits):
        return {"shape": list(value.shape), "dtype": value.dtype, "values": _numbers(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, str):
        try:
            return float(value)  # as `bits_of` writes floats
        except ValueError:
            return value
    return value


def hash_of(value: Any) -> str:
    """A short text that is the same for equal values."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]
