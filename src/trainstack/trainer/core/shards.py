"""States with sharded tensors: whole in checkpoints and exports, one tensor after the other, and divided again."""

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
    """Whether a layer has divided parameters of `module` among the processes."""
    return any(map(is_sharded, module.parameters()))


def set_values(tensor: Tensor, values: Tensor) -> None:
    """`tensor.data = values`; of a sharded tensor a copy, as `fully_shard` keeps its own view of the memory."""
    if is_sharded(tensor):
        tensor.data.copy_(values)
    else:
        tensor.data = values


def kept_values(tensor: Tensor) -> Tensor:
    """What `set_values` gives back later: `tensor.data`, or a copy of a sharded tensor."""
    return tensor.data.clone() if is_sharded(tensor) else tensor.data


def gather_shards(
    state: Any, *, keep: bool, main_of: World | None = None, which: Callable[[Any], bool] = is_sharded
) -> Any:
    """A copy of `state` in which each sharded tensor is whole and on the CPU. All processes call it together.

    One tensor after the other becomes whole, in an order that does not depend on how a process has filled its dicts.

    Args:
        state: nested dicts, lists and tuples; equal on all processes but for the parts of sharded tensors.
        keep: whether this process needs the result. Else an empty tensor stands for each sharded one.
        main_of: the world, where its main process alone needs the result, which spares the others the memory.
        which: of the sharded tensors; the others stay as they are.
    """

    def gathered(number: int, tensor: Tensor) -> Tensor:
        full = gather_whole(tensor).cpu() if main_of is None else gather_to_main(tensor, main_of)
        return full if keep and full is not None else tensor.to_local().new_empty(0)  # type: ignore[attr-defined]

    return split(state, lambda tensor: is_sharded(tensor) and which(tensor), gathered)[0]


def gather_whole(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor on all processes, which call it together. Some copies exist for a moment."""
    full: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    return full


def gather_to_main(tensor: Any, world: World) -> Tensor | None:
    """The whole of a sharded tensor on the CPU of the main process, and None on the others; all call it together.

    The others send their rows into its memory. So the main process holds the whole once, and the others hold their own
    part, where `full_tensor` takes up to four times the whole on each (torch 2.13.0, gloo). A tensor that is divided in
    another way than by rows is gathered on all.
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
    """How many rows each process of the world gives to the whole, in their order; replicas of others give none.

    None if `tensor` is not divided by rows over the first processes, as `fsdp` divides it.
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
    """Makes the sharded tensors of a state whole while rank 0 writes them: one at a time, when rank 0 asks for it.

    All processes make one from equal states, and then run `wait_for_rank_zero` together, in which the others call
    `answer`. So the order in which rank 0 uses the tensors is its own.

    Args:
        state: as for `gather_shards`.
        world: of this process.

    Attributes:
        state: with a `DeferredTensor` for each sharded one on rank 0, which can be used within `serving`. On other
            ranks it is as it was.
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
                "a sharded tensor of a checkpoint was used after the checkpointer's save() had returned. Copy what is "
                "to be kept before."
            )
        self._ask(str(number))
        whole = gather_to_main(self._tensors[number], self._world)
        assert whole is not None
        return whole

    def answer(self, request: str) -> None:
        """Take part in what rank 0 has asked for."""
        gather_to_main(self._tensors[int(request)], self._world)

    @contextmanager
    def serving(self, ask: Callable[[str], None]) -> Iterator[None]:
        """A block in which the deferred tensors can be used; on rank 0."""
        self._ask = ask
        try:
            yield
        finally:
            self._ask = None


def local_shards(state: Any) -> Any:
    """`state` with this process's part in place of each sharded tensor."""
    return move_tensors(state, lambda one: next(plain_parts(one)) if is_sharded(one) else one)


def states_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The fields of `checkpoint`, for `gather_shards` and `ShardGatherer`."""
    return {one.name: getattr(checkpoint, one.name) for one in dataclasses.fields(checkpoint)}


def copy_values(target: Tensor, values: Tensor) -> None:
    """`target.copy_(values)`, in place and without a gradient.

    Of a sharded `target` this process's part is copied, of whole `values`. A `DeferredTensor` has memory in here only.
    """
    with torch.no_grad():
        if is_sharded(target) and not is_sharded(values):
            values = shard_like(values, target)
        target.detach().copy_(whole(values))


def fit_shards(state: Any, like: Any) -> Any:
    """A copy of `state` with this process's part of each tensor that is sharded in `like`, at the same place."""
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
