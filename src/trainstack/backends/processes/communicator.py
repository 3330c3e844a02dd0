"""`Communicator` exchanges small values and failures between ranks."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from trainstack.backends.processes.watchdog import PeerWatchdog
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

    def broadcast_object(self, value: Any) -> Any:
        """The value of rank 0, on every process."""
        return value

    def all_gather_rows(self, rows: Tensor, counts: Sequence[int], chunk: int | None = None) -> Tensor:
        """All processes' rows, one below the other in the order of the ranks.

        Args:
            rows: this process's, shape `(counts[rank], ...)`, on the CPU.
            counts: how many rows each process has.
            chunk: send at most so many rows at once.
        """
        return rows

    def all_reduce_(self, tensor: Tensor) -> None:
        """Replace `tensor` in place by its sum over the processes; on the device on which gradients are."""

    def broadcast_(self, tensor: Tensor) -> None:
        """Replace `tensor` in place by that of rank 0; on the device on which gradients are."""

    def raise_if_any(self, error: BaseException | None, doing: str) -> None:
        """Go on together or stop together.

        Args:
            error: what went wrong on this process; None if nothing did.
            doing: what was being done, for the message.

        Raises:
            BaseException: `error` itself, on the process where it happened.
            PeerError: on the others, naming the rank and its error.
        """
        errors = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, text in enumerate(errors):
            if text is not None:
                raise PeerError(f"{doing} failed on rank {rank}, so all processes stop. There: {text}")

    def put(self, name: str, text: str) -> None:
        """Leave `text` under `name` for the other processes; nobody waits."""

    def get_if_all(self, names: Sequence[str]) -> list[str] | None:
        """The texts under `names` once all of them are there, else None; nobody waits."""
        return None

    def fail_together(self, where: Callable[[], str]) -> AbstractContextManager[None]:
        """A context around what all processes do together: when one of them fails in it, all do, and say why.

        It may stand within another one, and does nothing there.

        Args:
            where: says where this process is, for the others; called from another thread.

        Raises:
            PeerError: another process has failed, with its traceback; or has not come to a collective, with the place
                of every process.
        """
        return nullcontext()


class GroupCommunicator(Communicator):
    """Talking over a process group.

    Args:
        group: one that carries CPU tensors.
        store: where processes leave word for each other outside of collectives.
        groups: the others in which these processes work together, that for gradients first. All are ours to break.
    """

    def __init__(self, group: dist.ProcessGroup, store: Store, groups: Sequence[dist.ProcessGroup] = ()) -> None:
        self._group, self._groups = group, tuple(groups)
        self._for_gradients = groups[0] if groups else group
        self._watchdog: PeerWatchdog | None = None
        self._num_watchdogs = self._acknowledged = 0
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        # A group may serve several runs. Use a separate connection: a blocking wait on the shared one would stall us.
        self._store = PrefixStore(f"trainstack/run/{self.broadcast_object(uuid.uuid4().hex)}", store.clone())  # type: ignore[attr-defined]  # missing in the stubs

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast_object(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]

    def all_gather_rows(self, rows: Tensor, counts: Sequence[int], chunk: int | None = None) -> Tensor:
        whole = rows.new_empty((sum(counts), *rows.shape[1:]))
        begin = 0
        for rank, count in enumerate(counts):
            part = whole[begin : begin + count]
            if rank == self.rank:
                part.copy_(rows)
            for piece in torch.split(part, chunk or count) if count else ():
                dist.broadcast(piece.view(torch.uint8), group=self._group, group_src=rank)  # gloo lacks some dtypes
            begin += count
        return whole

    def all_reduce_(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self._for_gradients)

    def broadcast_(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, group=self._for_gradients, group_src=0)

    def put(self, name: str, text: str) -> None:
        self._store.set(f"said/{name}", text)

    def get_if_all(self, names: Sequence[str]) -> list[str] | None:
        keys = [f"said/{name}" for name in names]
        return [self._store.get(key).decode() for key in keys] if self._store.check(keys) else None

    @contextmanager
    def fail_together(self, where: Callable[[], str]) -> Iterator[None]:
        if self.size == 1 or self._watchdog is not None:
            yield
            return
        self._num_watchdogs += 1
        self._watchdog = watchdog = PeerWatchdog(
            self._store, self.rank, self.size, self._num_watchdogs, self._acknowledged, where, self._abort_collectives
        )
        watchdog.start()
        try:
            yield
        except BaseException as error:
            origin = watchdog.resolve_error(error)
            self._acknowledged = watchdog.failed
            if origin is error:
                raise
            raise origin from error
        finally:
            self._watchdog = None
            watchdog.stop()

    def _abort_collectives(self) -> None:
        """Make all collectives of our groups fail here, those under way in another thread included.

        gloo knows no way to abort, but a wait that has run out closes every connection of its group: so wait a moment
        for what nobody sends, under a tag that nothing else has.
        """
        for group in {self._group, *self._groups}:
            with suppress(Exception):
                never = dist.irecv(torch.empty(1), group=group, group_src=(self.rank + 1) % self.size, tag=0x7EA7)
                assert never is not None
                never.wait(timedelta(milliseconds=1))
            with suppress(Exception):
                group.abort()  # what nccl understands
