"""Load a checkpoint on all ranks: each rank reads the files that the main process has chosen, or receives them.

The main process finds and verifies the checkpoint. It shares the path and the hash of the manifest. A rank that finds
the same manifest at this path reads the files. To the other ranks, the main process sends one tensor at a time, and
they store the tensors in a temporary file. So no rank has a whole state in memory before it loads it.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor

from trainstack._deferred import DeferredTensor, materialized, split, whole
from trainstack._files import read_small
from trainstack._tensor_bytes import bytes_of
from trainstack.backends import World
from trainstack.checkpointing import Checkpoint
from trainstack.checkpointing.checksums import digest
from trainstack.checkpointing.manifest import FILE_NAME as MANIFEST
from trainstack.checkpointing.tensorfile import DEFERRED_BYTES
from trainstack.errors import CheckpointDamagedError, CheckpointError
from trainstack.trainer.core.shards import states_of
from trainstack.trainer.resume.rank_zero import wait_for_all_ranks

OnRankZero = Callable[[Callable[[], Any], str], Any]
"""`Saver.run_on_rank_zero`."""

LOADING = "loading a checkpoint"


class Reopen(Protocol):
    """Reads a checkpoint, with `verified=True` one that another rank has verified. An example is `read_deferred`."""

    def __call__(self, path: Path, *, verified: bool) -> Checkpoint: ...


@dataclass(frozen=True, slots=True)
class Source:
    """The path of a checkpoint on the main process, and the hash of its manifest, both as strings to send."""

    path: str
    manifest: str

    @classmethod
    def of(cls, path: Path) -> Source:
        """The source with the checkpoint at `path`."""
        return cls(str(path), digest(read_small(path / MANIFEST)))

    def open(self, reopen: Reopen) -> Checkpoint | None:
        """The checkpoint, or None if this rank does not find it at the same path."""
        path = Path(self.path)
        try:
            if digest(read_small(path / MANIFEST)) != self.manifest:
                return None
            return reopen(path, verified=True)
        except (OSError, CheckpointError):
            return None


def load_on_all(
    load: Callable[[], tuple[Checkpoint, Path | None]],
    reopen: Reopen,
    world: World,
    on_rank_zero: OnRankZero,
    longest_s: float,
) -> Checkpoint:
    """Return the result of `load` on the main process, on all ranks. They call this together.

    Args:
        load: returns the checkpoint and its folder, or None in place of the folder.
        reopen: reads the checkpoint on another rank that finds the folder.
        world: the world of this rank.
        on_rank_zero: calls a function on rank 0 while the others wait, and returns its result on all ranks.
        longest_s: the largest number of seconds in which a rank may read its files.
    """
    found: Checkpoint | None = None

    def find() -> tuple[str, str] | None:
        nonlocal found
        found, path = load()
        return None if path is None else astuple(Source.of(path))

    source: tuple[str, str] | None = on_rank_zero(find, LOADING)
    if world.size > 1:
        with wait_for_all_ranks(world, LOADING, longest_s):
            if source is not None and not world.is_main:
                found = Source(*source).open(reopen)
        found = share_checkpoint(found, world, on_rank_zero)
    assert found is not None
    return found


def share_checkpoint(found: Checkpoint | None, world: World, on_rank_zero: OnRankZero) -> Checkpoint:
    """Return the checkpoint on each rank. All ranks call this together.

    Args:
        found: on rank 0 the loaded checkpoint; on the others the one that they have opened, or None.
        world: the world of this rank.
        on_rank_zero: calls a function on rank 0 while the others wait, and returns its result on all ranks.
    """
    missing = [rank for rank, has in enumerate(world.comm.gather(found is not None, LOADING)) if not has]
    if not missing:
        assert found is not None
        return found
    outline, tensors = found, list[Tensor]()
    if world.is_main:
        assert found is not None
        states, tensors = split(states_of(found), _is_large, _Sent.of)
        outline = Checkpoint(**states)
    shared = on_rank_zero(lambda: (outline, len(tensors)), LOADING)
    spool = _Spool.make(world, is_missing=found is None) if shared[1] else _Spool(None, writes=False)
    for number in range(shared[1]):
        tensor = on_rank_zero(lambda number=number: whole(tensors[number]), LOADING)  # type: ignore[misc]
        spool.append(tensor)
        del tensor
    world.comm.check_place(LOADING)
    return found if found is not None else Checkpoint(**_received(vars(shared[0]), spool))


def _is_large(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, DeferredTensor) and tensor.layout is torch.strided and tensor.nbytes > DEFERRED_BYTES
    )


@dataclass(frozen=True, slots=True)
class _Sent:
    """The placeholder in an outline for the tensor with this number."""

    trainstack_sent_tensor: int

    @classmethod
    def of(cls, number: int, tensor: Tensor) -> _Sent:
        return cls(number)


def _received(value: Any, spool: _Spool) -> Any:
    """`value` with tensors instead of the placeholders. After the transfer, `_Sent` is an object with its attribute."""
    number = getattr(value, "trainstack_sent_tensor", None)
    if number is not None:
        return spool.tensors[number]
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _received(item, spool)
        return value
    if isinstance(value, deque):
        return deque((_received(item, spool) for item in value), value.maxlen)
    return type(value)(_received(item, spool) for item in value) if type(value) in (list, tuple) else value


class _Spool:
    """Stores tensors in an unlinked temporary file that the ranks of one machine share.

    Attributes:
        tensors: the appended tensors, in their order.
    """

    tensors: list[DeferredTensor]

    def __init__(self, file: BinaryIO | None, *, writes: bool) -> None:
        self.tensors, self._file, self._writes, self._end = [], file, writes, 0

    @classmethod
    def make(cls, world: World, *, is_missing: bool) -> _Spool:
        """Make the spool of this rank. It stores nothing if no tensor is missing. All ranks call this together."""
        own = Path(tempfile.mkdtemp(prefix="trainstack-"), "tensors") if is_missing else None
        try:
            if own is not None:
                own.touch()
            paths = [path for path in world.comm.gather(None if own is None else str(own), LOADING) if path is not None]
            found = next((Path(path) for path in paths if os.path.exists(path)), None) if is_missing else None
            file = None if found is None else open(found, "r+b")  # noqa: SIM115 - closed with the last tensor
            world.comm.check_place(LOADING)
        finally:
            if own is not None:
                with suppress(OSError):  # the open file remains readable; Windows refuses to delete it
                    own.unlink()
                with suppress(OSError):
                    own.parent.rmdir()
        return cls(file, writes=file is not None and found == own)

    def append(self, tensor: Tensor) -> None:
        """Store `tensor` at the end."""
        if self._file is None:
            return
        data = bytes_of(tensor).numpy().data
        if self._writes:
            self._file.seek(self._end)
            self._file.write(data)
            self._file.flush()
        place = _Spooled(self._file, self._end, list(tensor.shape), tensor.dtype, digest(data))
        self.tensors.append(DeferredTensor(tensor.shape, tensor.dtype, place.read))
        self._end += len(data)


@dataclass(frozen=True, slots=True)
class _Spooled:
    file: BinaryIO
    start: int
    shape: list[int]
    dtype: torch.dtype
    hash: str

    def read(self) -> Tensor:
        made = torch.empty(self.shape, dtype=self.dtype)
        data = bytes_of(made).numpy().data
        self.file.seek(self.start)
        if self.file.readinto(data) != len(data) or digest(data) != self.hash:  # type: ignore[attr-defined]
            raise CheckpointDamagedError("the temporary file with the checkpoint has changed. Start again.")
        return made


LAZY = ("optimizers",)
"""The items of `Checkpoint.trainer_state` whose large tensors are read one at a time."""


def with_own_values(checkpoint: Checkpoint, world: World) -> Checkpoint:
    """`checkpoint` with loaded values in the states of this rank, except for states that load one tensor at a time."""
    trainer, ranks = checkpoint.trainer_state, checkpoint.rank_states
    if ranks is not None and len(ranks) == world.size:
        ranks = [materialized(part) if rank == world.rank else part for rank, part in enumerate(ranks)]
    return replace(
        checkpoint,
        trainer_state=trainer and {k: v if k in LAZY else materialized(v) for k, v in trainer.items()},
        trainer_backend_state=materialized(checkpoint.trainer_backend_state),
        rng_state=materialized(checkpoint.rng_state),
        history_state=materialized(checkpoint.history_state),
        rank_states=ranks,
    )
