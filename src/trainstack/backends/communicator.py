"""How processes tell each other small things: numbers, objects, failures. Gradients travel elsewhere."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from trainstack.errors import PeerError


class Communicator:
    """Talking to oneself: what a single process uses.

    Attributes:
        rank, size: this process's place among those that talk.
    """

    rank = 0
    size = 1

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, by rank, on every process. The value must be picklable."""
        return [value]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each of `values` summed over the processes, in float64 and in the order of the ranks."""
        return [sum(column) for column in zip(*self.gather(list(values)), strict=True)]

    def share(self, value: Any) -> Any:
        """The value of rank 0, on every process."""
        return value

    def share_rows(self, rows: Tensor, counts: Sequence[int], chunk: int | None = None) -> Tensor:
        """All processes' rows, one below the other in the order of the ranks.

        Args:
            rows: this process's, shape `(counts[rank], ...)`, on the CPU.
            counts: how many rows each process has.
            chunk: send at most so many rows at once.
        """
        return rows

    def add_up(self, tensor: Tensor) -> None:
        """Replace `tensor` in place by its sum over the processes; on the device on which gradients are."""

    def take_from_main(self, tensor: Tensor) -> None:
        """Replace `tensor` in place by that of rank 0; on the device on which gradients are."""

    def agree(self, error: BaseException | None, doing: str) -> None:
        """Go on together or stop together.

        Args:
            error: what went wrong on this process; None if nothing did.
            doing: what was being done, for the message.

        Raises:
            BaseException: `error` itself, on the process where it happened.
            PeerError: on the others, naming the rank and its error.
        """
        told = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, text in enumerate(told):
            if text is not None:
                raise PeerError(f"{doing} failed on rank {rank}, so all processes stop. There: {text}")

    def post_failure(self, error: BaseException) -> None:
        """Leave word of `error` for the other processes, which are about to miss this one."""

    def origin_of(self, error: BaseException) -> BaseException:
        """The failure of another process that made `error` happen here, if one left word; else `error`."""
        return error


class GroupCommunicator(Communicator):
    """Talking over a process group.

    Args:
        group: one that carries CPU tensors.
        store: where word of failures is left.
    """

    def __init__(self, group: dist.ProcessGroup, store: Store) -> None:
        self._group, self._store = group, store
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def share(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]

    def share_rows(self, rows: Tensor, counts: Sequence[int], chunk: int | None = None) -> Tensor:
        whole = rows.new_empty((sum(counts), *rows.shape[1:]))
        begin = 0
        for rank, count in enumerate(counts):
            part = whole[begin : begin + count]
            if rank == self.rank:
                part.copy_(rows)
            for piece in torch.split(part, chunk or count) if count else ():
                dist.broadcast(
                    piece.view(torch.uint8) if piece.dtype is torch.bool else piece, group=self._group, group_src=rank
                )
            begin += count
        return whole

    def add_up(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)

    def take_from_main(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, src=0)

    def post_failure(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        with suppress(RuntimeError):  # where the store is gone, there is nobody left to tell
            self._store.compare_set(_FAILURE, "", f"{self.rank}\n{text}")

    def origin_of(self, error: BaseException) -> BaseException:
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            return error  # not what a lost peer looks like from here
        try:
            if not self._store.check([_FAILURE]):
                return error
            rank, _, text = self._store.get(_FAILURE).decode().partition("\n")
        except RuntimeError:
            return error
        if int(rank) == self.rank:
            return error
        return PeerError(f"rank {rank} failed, so rank {self.rank} stops as well. There:\n{text}")


_FAILURE = "trainstack/failure"
