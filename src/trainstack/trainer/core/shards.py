"""Sharded tensors in states: gather them one after the other for checkpoints and exports, and shard them again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainstack._deferred import DeferredTensor, split, whole
from trainstack._tensor_classes import is_sharded, plain_parts, shard_like
from trainstack.backends import World
from trainstack.backends.optimizer_state import move_tensors
from trainstack.checkpointing import Checkpoint
from trainstack.checkpointing.sharded.rows import divides_rows
from trainstack.errors import CheckpointError


def has_shards(module: nn.Module) -> bool:
    """Whether parameters of `module` are sharded over the processes."""
    return any(map(is_sharded, module.parameters()))


def set_values(tensor: Tensor, values: Tensor) -> None:
    """Set `tensor.data = values`; a sharded tensor gets a copy, because `fully_shard` keeps a view of its memory."""
    if is_sharded(tensor):
        tensor.data.copy_(values)
    else:
        tensor.data = values


def kept_values(tensor: Tensor) -> Tensor:
    """Return the values for a later `set_values`: `tensor.data`, or a copy for a sharded tensor."""
    return tensor.data.clone() if is_sharded(tensor) else tensor.data


def gather_shards(
    state: Any, *, keep: bool, main_of: World | None = None, which: Callable[[Any], bool] = is_sharded
) -> Any:
    """Copy `state` with each sharded tensor whole and on the CPU. All processes call it together.

    The tensors are gathered one after the other, in an order that does not depend on the insertion order of dicts.

    Args:
        state: nested dicts, lists and tuples; equal on all processes except for the shards of tensors.
        keep: whether this process needs the result. Otherwise it gets an empty tensor for each sharded one.
        main_of: the world, if only its main process needs the result; the other processes then need less memory.
        which: selects the sharded tensors to gather; the others are not changed.
    """

    def gathered(number: int, tensor: Tensor) -> Tensor:
        full = gather_whole(tensor).cpu() if main_of is None else gather_to_main(tensor, main_of)
        return full if keep and full is not None else tensor.to_local().new_empty(0)  # type: ignore[attr-defined]

    return split(state, lambda tensor: is_sharded(tensor) and which(tensor), gathered)[0]


def gather_whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor on all processes. Collective. For a short time several copies exist."""
    full: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    return full


def gather_to_main(tensor: Any, world: World) -> Tensor | None:
    """Gather a sharded tensor on the CPU of the main process; the other processes get None. Collective.

    The other processes send their rows directly into the result. So only the main process holds the whole tensor, once.
    `full_tensor` instead takes up to four times the whole tensor on each process (torch 2.13.0, gloo). A tensor that is
    not sharded by rows is gathered on all processes.
    """
    counts = _rows_of_ranks(tensor, world.size)
    if counts is None:
        full = gather_whole(tensor).cpu()
        return full if world.is_main else None
    local = tensor.detach().to_local().cpu().contiguous()
    if world.size > 1:
        local = world.comm.rows_to_main(local[: counts[world.rank]], counts)
    return local if world.is_main else None


def _rows_of_ranks(tensor: Any, size: int) -> list[int] | None:
    """Return the number of rows that each process contributes to the whole tensor, in rank order; replicas have 0.

    None if `tensor` is not sharded by rows over the first processes, as `fsdp` shards it.
    """
    mesh = tensor.device_mesh
    divided = [number for number, one in enumerate(tensor.placements) if not one.is_replicate()]
    if not divides_rows(tensor) or not divided or mesh.mesh.flatten().tolist() != list(range(size)):
        return None
    if divided != [mesh.ndim - 1]:
        return None
    sharers = mesh.size(divided[0])
    most = -(-tensor.shape[0] // sharers)  # torch divides as torch.chunk does
    rows = [max(0, min(most, tensor.shape[0] - rank * most)) for rank in range(sharers)]
    return rows + [0] * (size - sharers)


class ShardGatherer:
    """Gathers the sharded tensors of a state while rank 0 writes it: one at a time, when rank 0 requests it.

    All processes make one from equal states and then call `wait_for_rank_zero` together, in which the other ranks call
    `answer`. So rank 0 can use the tensors in any order.

    Args:
        state: as for `gather_shards`.
        world: world of this process.

    Attributes:
        state: on rank 0 the state with a `DeferredTensor` for each sharded tensor, which can be read within `serving`;
            on other ranks the given state.
    """

    state: Any

    def __init__(self, state: Any, world: World) -> None:
        self._ask: Callable[[str], None] | None = None
        self._world = world
        made, self._tensors = split(state, is_sharded, self._deferred)
        self.state = made if world.is_main else state

    def _deferred(self, number: int, tensor: Tensor) -> DeferredTensor:
        return DeferredTensor(tensor.shape, tensor.dtype, lambda: self._read(number))

    def _read(self, number: int) -> Tensor:
        if self._ask is None:
            raise CheckpointError(
                "a sharded tensor of a checkpoint was read after the checkpointer's save() had returned. Copy the "
                "tensors that you need inside save()."
            )
        self._ask(str(number))
        whole = gather_to_main(self._tensors[number], self._world)
        assert whole is not None
        return whole

    def answer(self, request: str) -> None:
        """Take part in the gathering of the tensor that rank 0 requests."""
        gather_to_main(self._tensors[int(request)], self._world)

    @contextmanager
    def serving(self, ask: Callable[[str], None]) -> Iterator[None]:
        """Context manager on rank 0 in which the deferred tensors can be read."""
        self._ask = ask
        try:
            yield
        finally:
            self._ask = None


def local_shards(state: Any) -> Any:
    """Return `state` with this process's shard in place of each sharded tensor."""
    return move_tensors(state, lambda one: next(plain_parts(one)) if is_sharded(one) else one)


def states_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the fields of `checkpoint`, for `gather_shards` and `ShardGatherer`."""
    return {one.name: getattr(checkpoint, one.name) for one in dataclasses.fields(checkpoint)}


def copy_values(target: Tensor, values: Tensor) -> None:
    """Copy `values` into `target` in place, without a gradient.

    A sharded `target` gets this process's shard of whole `values`. A `DeferredTensor` has memory only during the call.
    """
    with torch.no_grad():
        if is_sharded(target) and not is_sharded(values):
            values = shard_like(values, target)
        target.detach().copy_(whole(values))


def fit_shards(state: Any, like: Any) -> Any:
    """Copy `state` with this process's shard of each tensor that is sharded at the same place in `like`."""
    if isinstance(state, Tensor):
        fits = isinstance(like, Tensor) and is_sharded(like) and not is_sharded(state) and state.shape == like.shape
        return shard_like(state, like) if fits else state
    if isinstance(state, dict) and isinstance(like, Mapping):
        made = state.copy()
        for key, item in state.items():
            made[key] = fit_shards(item, like.get(key))
        return made
    if type(state) in (list, tuple) and isinstance(like, Sequence) and len(like) == len(state):
        return type(state)(fit_shards(item, other) for item, other in zip(state, like, strict=True))
    return state
