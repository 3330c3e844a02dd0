"""`Communicator` exchanges small values and failures between ranks."""

from __future__ import annotations

import functools
import hashlib
import os
import struct
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from trainstack._store import TimedStore
from trainstack.backends.processes.watchdog import PeerWatchdog
from trainstack.errors import ModuleContractError, PeerError


class Communicator:
    """Talking to oneself: what a single process uses.

    The methods that exchange values take `what`, which names the exchange to the user: "trainer.gather", "saving a
    checkpoint". Ranks compare these names, and raise PeerError where they differ. The default is the calling function.

    Attributes:
        rank, size: this process's place among those that talk.
        aborted: whether a failure of another rank has broken the collectives of this one.
    """

    rank = 0
    size = 1
    aborted = False

    def raise_if_aborted(self) -> None:
        """Raise if the collectives of this rank were broken: gradients may not have been summed. Reads no device.

        Raises:
            RuntimeError: they were. `fail_together` raises what the failed rank has left in its place.
        """
        if self.aborted:
            raise RuntimeError("the collectives of this rank were aborted because another rank has failed")

    def gather(self, value: Any, what: str = "") -> list[Any]:
        """The value of every process, by rank, on every process.

        A value is made of None, numbers, strings, bytes, tensors, numpy arrays, paths, dataclasses, named tuples and
        the usual containers. Tensors come back on the CPU.

        Raises:
            ModuleContractError: the value of a process holds something else; on all of them.
            PeerError: the processes are not in the same exchange; on all of them.
        """
        return [value]

    def sum(self, values: Sequence[float], what: str = "") -> list[float]:
        """Each of `values` summed over the processes, in float64 and in the order of the ranks."""
        return list(values)

    def broadcast_object(self, value: Any, what: str = "") -> Any:
        """The value of rank 0, on every process; as for `gather`."""
        return value

    def check_place(self, what: str) -> None:
        """Meet the other processes.

        Raises:
            PeerError: one of them is in another exchange; on all of them.
        """

    def all_gather_rows(self, rows: Tensor, counts: Sequence[int], chunk: int | None = None) -> Tensor:
        """All processes' rows, one below the other in the order of the ranks; right after an exchange of the counts.

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
        errors = self.gather(None if error is None else f"{type(error).__name__}: {error}", doing)
        if error is not None:
            raise error
        for rank, text in enumerate(errors):
            if text is not None:
                raise PeerError(f"{doing} failed on rank {rank}, so all processes stop. There: {text}")

    def broadcast_outcome(self, error: BaseException | None, value: Any, doing: str) -> Any:
        """As `raise_if_any` and then `broadcast_object`, in one exchange, of what rank 0 alone has done.

        Args:
            error: what went wrong on rank 0; None on the others.
            value: of rank 0.
            doing: what rank 0 was doing, for the message.

        Raises:
            BaseException: `error` itself, on rank 0.
            PeerError: on the others, with the error.
        """
        outcome = (None if error is None else f"{type(error).__name__}: {error}", value)
        text, value = self.broadcast_object(outcome, doing)
        if error is not None:
            raise error
        if text is not None:
            raise PeerError(f"{doing} failed on rank 0, so all processes stop. There: {text}")
        return value

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


_HEADER = struct.Struct(
    "<4sB3xI4xQQ"
)  # magic, flags, number of the exchange, its name as a hash, length of the message
_MAGIC = b"ts01"
_REFUSED = 1  # a flag; the other flags are the kind of the exchange
_GATHER, _SUM, _BROADCAST, _MEETING = 0, 2, 4, 6
_SIZE = 256
_INLINE = _SIZE - _HEADER.size
_PLACE_SIZE = 512
_MOST_AT_ONCE = 1 << 26  # bytes of rows that a process gives to one collective; all gather that much of each
_OURS = str(Path(__file__).parents[2]) + os.sep  # the folder of the package
_OTHERS = (str(Path(torch.__file__).parent) + os.sep, str(Path(os.__file__).parent) + os.sep, "<")


class GroupCommunicator(Communicator):
    """Talking over a process group.

    Each exchange begins with one all-gather of headers of a fixed size, which hold the name of the exchange and short
    messages. So processes that are in different exchanges learn of it from their headers, before sizes differ.

    Args:
        group: one that carries CPU tensors, and nothing else: an exchange must never meet a collective of another kind.
        store: where processes leave word for each other outside of collectives.
        groups: the others in which these processes work together, that for gradients first. All are ours to break.
        allow_pickle: send as a pickle what has no encoding, and read pickles.
        timeout_s: for an answer of the store.
    """

    rank: int
    size: int

    def __init__(
        self,
        group: dist.ProcessGroup,
        store: Store,
        groups: Sequence[dist.ProcessGroup] = (),
        timeout_s: float = 1800.0,
        *,
        allow_pickle: bool = False,
    ) -> None:
        self._group, self._groups, self._allow_pickle = group, tuple(groups), allow_pickle
        self._for_gradients = groups[0] if groups else group
        self._watchdog: PeerWatchdog | None = None
        self._num_watchdogs = self._acknowledged = self._num_exchanges = 0
        self._where: Callable[[], str] = lambda: ""
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        name = self.broadcast_object(uuid.uuid4().hex, "joining the process group")
        # A group may serve several runs. Use a separate connection: a blocking wait on the shared one would stall us.
        own = PrefixStore(f"trainstack/run/{name}", store.clone())  # type: ignore[attr-defined]  # missing in the stubs
        self._store = TimedStore(own, timeout_s)

    def gather(self, value: Any, what: str = "") -> list[Any]:
        what = what or _calling_function()
        if self.size == 1:
            return [value]
        from trainstack.backends.processes.wire import decode_packed, encode

        try:
            message = encode(value, f"{what}: the value", allow_pickle=self._allow_pickle)
        except ModuleContractError as error:
            self._exchange(what, str(error).encode(), _GATHER | _REFUSED)
            raise
        parts = self._exchange(what, message.packed(), _GATHER)
        return [decode_packed(part, message.classes, allow_pickle=self._allow_pickle) for part in parts]

    def sum(self, values: Sequence[float], what: str = "") -> list[float]:
        what = what or _calling_function()
        parts = self._exchange(what, struct.pack(f"<{len(values)}d", *values), _SUM)
        counts = [part.numel() // 8 for part in parts]
        if len(set(counts)) > 1:
            raise PeerError(f"{what}: the ranks do not sum up equally many numbers: {counts}.")
        return [sum(column) for column in zip(*(part.view(torch.float64).tolist() for part in parts), strict=True)]

    def broadcast_object(self, value: Any, what: str = "") -> Any:
        what = what or _calling_function()
        if self.size == 1:
            return value
        if self.rank != 0:
            return self._receive(what)
        from trainstack.backends.processes.wire import encode

        try:
            message = encode(value, f"{what}: the value", allow_pickle=self._allow_pickle)
        except ModuleContractError as error:
            self._send(what, str(error).encode(), _REFUSED)
            raise
        self._send(what, message.head)
        for blob in message.blobs:
            self._broadcast_bytes(blob, 0)
        return value

    def check_place(self, what: str) -> None:
        self._meet(what, b"", _MEETING)

    def all_gather_rows(self, rows: Tensor, counts: Sequence[int], chunk: int | None = None) -> Tensor:
        whole = rows.new_empty((sum(counts), *rows.shape[1:]))
        begins = [sum(counts[:rank]) for rank in range(len(counts))]
        size = whole[:1].nbytes
        chunk = min(chunk or sys.maxsize, max(1, _MOST_AT_ONCE // max(1, size)))
        for begin in range(0, max(counts) if size else 0, chunk):
            here = [max(0, min(count - begin, chunk)) for count in counts]
            mine = rows[begin : begin + here[self.rank]].contiguous()  # gloo lacks some dtypes, but has bytes
            parts = self._all_gather_uneven(mine.reshape(-1).view(torch.uint8), [size * n for n in here])
            for first, count, part in zip(begins, here, parts, strict=True):
                target = whole[first + begin : first + begin + count]
                target.reshape(-1).view(torch.uint8).copy_(part)
        return whole

    def _send(self, what: str, head: bytes, flags: int = 0) -> None:
        self._meet(what, head, _BROADCAST | flags)
        if len(head) > _INLINE:
            self._broadcast_bytes(torch.frombuffer(bytearray(head), dtype=torch.uint8), 0)

    def _receive(self, what: str) -> Any:
        """What rank 0 sends: into memory of its own for each large tensor."""
        from trainstack.backends.processes.wire import blob_sizes, decode

        flags, length, head = self._meet(what, b"", _BROADCAST)[0]
        if length > _INLINE:
            head = self._broadcast_bytes(_room(length), 0)
        if flags & _REFUSED:
            raise ModuleContractError(f"rank 0: {_text(head)}")
        data = head.numpy().tobytes()
        blobs = [self._broadcast_bytes(_room(size), 0) for size in blob_sizes(data)]
        return decode(data, blobs, allow_pickle=self._allow_pickle)

    def _exchange(self, what: str, message: bytes | Tensor, flags: int) -> list[Tensor]:
        """The messages of all processes, as flat bytes.

        Raises:
            ModuleContractError: a process has refused to send its value.
        """
        met = self._meet(what, message, flags)
        parts, lengths = [part for _, _, part in met], [length for _, length, _ in met]
        if max(lengths) > _INLINE:
            if isinstance(message, bytes):
                message = torch.frombuffer(bytearray(message or b"\0"), dtype=torch.uint8)[: len(message)]
            parts = self._all_gather_uneven(message, lengths)
        for rank, (refused, _, _) in enumerate(met):
            if refused & _REFUSED and rank != self.rank and not flags & _REFUSED:
                raise ModuleContractError(f"rank {rank}: {_text(parts[rank])}")
        return parts

    def _meet(self, what: str, message: bytes | Tensor, flags: int) -> list[tuple[int, int, Tensor]]:
        """Exchange headers; the flags, the length and, if it is short, the message of each process.

        Raises:
            PeerError: the processes are not in the same exchange.
        """
        self._num_exchanges += 1
        length = len(message)
        mine = bytearray(_SIZE)
        _HEADER.pack_into(mine, 0, _MAGIC, flags, self._num_exchanges & 0xFFFFFFFF, _hash(what), length)
        if length <= _INLINE and not isinstance(message, Tensor):
            mine[_HEADER.size : _HEADER.size + length] = message
        rows = self._all_gather(torch.frombuffer(mine, dtype=torch.uint8))
        data = rows.numpy().tobytes()
        headers = [_HEADER.unpack_from(data, begin) for begin in range(0, len(data), _SIZE)]
        if headers.count(headers[self.rank]) != self.size:
            if any(header[0] != _MAGIC for header in headers):
                others = [rank for rank, header in enumerate(headers) if header[0] != _MAGIC]
                raise PeerError(
                    f"{what}: what the ranks {others} sent are no messages of this version of trainstack. Run the same "
                    "version on all processes, and let no other program reach the ports of the run."
                )
            if len({(flags & ~_REFUSED, number, name) for _, flags, number, name, _ in headers}) > 1:
                self._raise_apart(what)
        return [
            (header[1], header[4], row[_HEADER.size : _HEADER.size + min(header[4], _INLINE)])
            for header, row in zip(headers, rows, strict=True)
        ]

    def _raise_apart(self, what: str) -> None:
        place = f"{what!r}{f' at {where}' if (where := self._where()) else ''}{_calling_place()}"
        mine = place.encode()[:_PLACE_SIZE].ljust(_PLACE_SIZE, b"\0")
        places = [_text(row) for row in self._all_gather(torch.frombuffer(bytearray(mine), dtype=torch.uint8))]
        raise PeerError(
            "the processes are not in the same place:\n"
            + "".join(f"  rank {rank} is in {place}\n" for rank, place in enumerate(places))
            + "All processes have to make the same calls in the same order: gather, validate, save_checkpoint and the "
            "like are called by all or by none, not below `if rank == 0:`."
        )

    def _all_gather(self, mine: Tensor) -> Tensor:
        """One row of bytes for each process; all give equally many."""
        rows = _room(self.size * mine.numel()).reshape(self.size, -1)
        dist.all_gather(list(rows.unbind()), mine, group=self._group)
        return rows

    def _all_gather_uneven(self, mine: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """The bytes of each process: in one collective, unless padding to the longest were much of it."""
        longest = max(lengths)
        if longest * self.size <= 2 * sum(lengths) + (1 << 20):
            padded = mine
            if mine.numel() < longest:
                padded = _room(longest)
                padded[: mine.numel()], padded[mine.numel() :] = mine, 0
            return [row[:length] for row, length in zip(self._all_gather(padded), lengths, strict=True)]
        parts = []
        for rank, length in enumerate(lengths):
            part = mine if rank == self.rank else _room(length)
            parts.append(self._broadcast_bytes(part, rank) if length else part)
        return parts

    def _broadcast_bytes(self, data: Tensor, source: int) -> Tensor:
        dist.broadcast(data, group=self._group, group_src=source)
        return data

    def all_reduce_(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self._for_gradients)

    def broadcast_(self, tensor: Tensor) -> None:
        if tensor.numel():
            # as bytes: gloo and nccl lack int16, uint16, uint32, uint64 and float8 (torch 2.13.0)
            dist.broadcast(tensor.view(-1).view(torch.uint8), group=self._for_gradients, group_src=0)

    def put(self, name: str, text: str) -> None:
        self._store.set(f"said/{name}", text)

    def get_if_all(self, names: Sequence[str]) -> list[str] | None:
        keys = [f"said/{name}" for name in names]
        return self._store.find_all(keys)

    @contextmanager
    def fail_together(self, where: Callable[[], str]) -> Iterator[None]:
        if self.size == 1 or self._watchdog is not None:
            yield
            return
        self._num_watchdogs += 1
        self._where = where
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
            # The reason is part of the message; a chain of two tracebacks on each rank would hide it.
            raise origin from None
        finally:
            self._watchdog = None
            self._where = lambda: ""
            watchdog.stop()

    def _abort_collectives(self) -> None:
        """Make all collectives of our groups fail here, those under way in another thread included.

        gloo knows no way to abort, but a wait that has run out closes every connection of its group: so wait a moment
        for what nobody sends, under a tag that nothing else has.
        """
        self.aborted = True  # before nccl's kernels return, and leave gradients that were not summed
        for group in {self._group, *self._groups}:
            with suppress(Exception):
                never = dist.irecv(torch.empty(1), group=group, group_src=(self.rank + 1) % self.size, tag=0x7EA7)
                assert never is not None
                never.wait(timedelta(milliseconds=1))
            with suppress(Exception):
                group.abort()  # what nccl understands


@functools.lru_cache(maxsize=1024)
def _hash(what: str) -> int:
    return int.from_bytes(hashlib.blake2b(what.encode(), digest_size=8).digest(), "little")


def _room(size: int) -> Tensor:
    """Memory for so many bytes, which another process has announced."""
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    except (RuntimeError, TypeError, OverflowError) as error:
        raise PeerError(f"there is no memory for the {size} bytes that another process announces.") from error


def _text(data: Tensor) -> str:
    return data.numpy().tobytes().rstrip(b"\0").decode(errors="replace")


def _calling_function() -> str:
    """The function that called the method which asks, as the name of an exchange."""
    code = sys._getframe(2).f_code
    return str(getattr(code, "co_qualname", code.co_name)).replace(".<locals>", "")  # co_qualname: from Python 3.11 on


def _calling_place() -> str:
    """The innermost function on the stack that is neither the library's, torch's nor Python's."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if not file.startswith(_OURS) and (
            "-packages" in file.removeprefix(_OTHERS[0]) or not file.startswith(_OTHERS)
        ):
            return f", called by {code.co_name} at {file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
