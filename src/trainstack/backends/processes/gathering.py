"""Concatenation of nested outputs of all ranks, in rank order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainstack.backends.processes.communicator import Communicator
from trainstack.errors import ModuleContractError


def gather_outputs(comm: Communicator, outputs: Any, chunk: int | None = None) -> Any:
    """Concatenate `outputs` of all processes along dimension 0, on every process.

    Tensors are concatenated by rows (a 0-dim tensor is one row) and returned on their device. Lists of other objects
    are concatenated. Dicts, tuples and lists of these are processed item by item. A process without outputs (`[]`) has
    no structure, so it gets that of the others, with a plain tuple for a named one, and a `SimpleNamespace` for a
    dataclass among other objects.

    Args:
        comm: the communicator.
        outputs: of this process.
        chunk: the largest number of rows in one collective.

    Raises:
        ModuleContractError: the outputs of the processes have different structures, or contain objects that cannot be
            sent (see `Communicator.gather`); on all processes.
        PeerError: the other processes have not called it; on all processes.
    """
    if comm.size == 1:
        return outputs
    leaves: list[tuple[str, Any]] = []
    plan = _flatten(outputs, "outputs", leaves)
    gathered = comm.gather((_plain(plan), repr(plan), [_describe(*item) for item in leaves]), "trainer.gather")
    filled = [(theirs, facts) for theirs, _, facts in gathered if facts]
    if not filled:
        return outputs
    theirs, facts = filled[0]
    _check_alike(gathered)
    columns = zip(*(theirs or [None] * len(facts) for *_, theirs in gathered), strict=True)
    joined = [
        _join(comm, leaf, column, like, chunk)
        for leaf, column, like in zip([leaf for _, leaf in leaves] or [None] * len(facts), columns, facts, strict=True)
    ]
    return _rebuild(plan if leaves else theirs, iter(joined))


def gather_to_main(comm: Communicator, outputs: Any, what: str) -> Any:
    """`gather_outputs` for rank 0 only; None elsewhere. Each rank sends its rows once, into the memory of the result.

    `what` names this call in the errors of processes that are in another call.

    Raises:
        ModuleContractError: see `gather_outputs`.
        PeerError: the other processes have not called it; on all processes.
    """
    if comm.size == 1:
        return outputs
    leaves: list[tuple[str, Any]] = []
    plan = _flatten(outputs, "outputs", leaves)
    sent = [comm.encoded(_describe(*item)[1], what) if not isinstance(item[1], Tensor) else None for item in leaves]
    facts = [
        _describe(*item) if data is None else ("objects", data.numel()) for item, data in zip(leaves, sent, strict=True)
    ]
    gathered = comm.gather((_plain(plan), repr(plan), facts), what)
    filled = [(theirs, described) for theirs, _, described in gathered if described]
    if not filled:
        return outputs if comm.rank == 0 else None
    _check_alike(gathered)
    theirs, described = filled[0]
    columns = zip(*(one or [None] * len(described) for *_, one in gathered), strict=True)
    mine: list[Any] = [data if data is not None else leaf for data, (_, leaf) in zip(sent, leaves, strict=True)]
    joined = [
        _join_on_main(comm, leaf, column, like)
        for leaf, column, like in zip(mine or [None] * len(described), columns, described, strict=True)
    ]
    return _rebuild(plan if leaves else theirs, iter(joined)) if comm.rank == 0 else None


def _join_on_main(comm: Communicator, leaf: Any, facts: Sequence[Any], like: Any) -> Any:
    counts = [0 if fact is None else fact[1] for fact in facts]
    if like[0] == "objects":
        data = torch.empty(0, dtype=torch.uint8) if leaf is None else leaf
        whole = comm.rows_to_main(data, counts)
        parts = torch.split(whole, counts) if comm.rank == 0 else ()
        decoded = [comm.decoded(part) for part in parts if part.numel()]
        return StepList(value for values in decoded for value in values)
    _, _, row, dtype, device = like
    rows = comm.rows_to_main(_rows_of(leaf, row, dtype), counts)
    return rows.to(device if leaf is None else leaf.device)


def _rows_of(leaf: Any, row: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The rows of a tensor, on the CPU; no rows of the shape `row` if this process has no outputs."""
    if leaf is None:
        return torch.empty((0, *row), dtype=dtype)
    rows: Tensor = leaf.reshape(1) if leaf.dim() == 0 else leaf
    return rows.detach().to("cpu").contiguous()


def _flatten(value: Any, place: str, leaves: list[tuple[str, Any]]) -> Any:
    """The structure of `value`. Its leaves are appended to `leaves`, with their places."""
    if isinstance(value, dict):
        return {key: _flatten(item, f"{place}[{key!r}]", leaves) for key, item in value.items()}
    if _is_structure(value):
        return _like(value, [_flatten(item, f"{place}[{i}]", leaves) for i, item in enumerate(value)])
    if isinstance(value, list) and not value and not isinstance(value, StepList):
        return value
    leaves.append((place, value))
    return _Leaf()


def _plain(plan: Any) -> Any:
    """`plan` in containers whose classes every process has."""
    if isinstance(plan, dict):
        return {key: _plain(item) for key, item in plan.items()}
    if isinstance(plan, list | tuple):
        return (list if isinstance(plan, list) else tuple)(_plain(item) for item in plan)
    return None


def _is_structure(value: Any) -> bool:
    """Whether `value` contains items to be concatenated one by one; a list of plain objects is one item."""
    if isinstance(value, StepList) or not isinstance(value, list | tuple):
        return False
    return any(isinstance(item, Tensor | dict | StepList) or _is_structure(item) for item in value)


class StepList(list[Any]):
    """A list with one item for each step, of any type: the lists of the processes are concatenated."""


class _Leaf:
    """Marks the place of a leaf in a structure. In a structure from another process it is None."""

    def __repr__(self) -> str:
        return "..."


def _check_alike(gathered: list[Any]) -> None:
    by_look: dict[str, list[int]] = {}
    for rank, (_, look, facts) in enumerate(gathered):
        if facts:
            kinds = [f"rows of shape {fact[2]}, {fact[3]}" if fact[0] == "tensor" else "objects" for fact in facts]
            by_look.setdefault(f"{look} with {'; '.join(kinds)}", []).append(rank)
    if len(by_look) > 1:
        looks = ", ".join(f"{look} on ranks {ranks}" for look, ranks in by_look.items())
        raise ModuleContractError(
            f"the processes' outputs cannot be joined: {looks}. Return the same structure, dtypes and shapes on every "
            "process, except for the first dimension; pad to one length."
        )


def _describe(place: str, leaf: Any) -> Any:
    """Of a tensor its number of rows, the shape of a row, dtype and device; another object as it is."""
    if isinstance(leaf, Tensor):
        leaf = leaf.reshape(1) if leaf.dim() == 0 else leaf
        return ("tensor", leaf.shape[0], tuple(leaf.shape[1:]), leaf.dtype, str(leaf.device))
    from trainstack.backends.processes.wire import At

    return ("objects", At(place, list(leaf)) if isinstance(leaf, list) else [At(place, leaf)])


def _join(comm: Communicator, leaf: Any, facts: Sequence[Any], like: Any, chunk: int | None) -> Any:
    if like[0] == "objects":
        return StepList(item for fact in facts if fact is not None for item in fact[1])
    _, _, row, dtype, device = like
    counts = [0 if fact is None else fact[1] for fact in facts]
    rows = comm.all_gather_rows(_rows_of(leaf, row, dtype), counts, chunk)
    return rows.to(device if leaf is None else leaf.device)


def _rebuild(plan: Any, leaves: Any) -> Any:
    if plan is None or isinstance(plan, _Leaf):
        return next(leaves)
    if isinstance(plan, dict):
        return {key: _rebuild(item, leaves) for key, item in plan.items()}
    return _like(plan, [_rebuild(item, leaves) for item in plan])


def _like(kind: Any, items: list[Any]) -> Any:
    return kind._make(items) if hasattr(kind, "_make") else type(kind)(items)
