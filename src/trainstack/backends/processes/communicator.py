"""`Communicator` exchanges small values and failures between ranks."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from trainstack._store import TimedStore
from trainstack._tensor_bytes import bytes_of
from trainstack.backends.processes.headers import INLINE, Header, merge_headers, merge_over_ranks
from trainstack.backends.processes.network import connects_lazily
from trainstack.backends.processes.peer_report import MOST_LINES, rank_list
from trainstack.backends.processes.watchdog import PeerWatchdog
from trainstack.errors import ModuleContractError, PeerError

if TYPE_CHECKING:
    from trainstack.backends.processes.wire import Message


class Communicator:
    """The exchange of values between ranks, here for a single process.

    The methods that exchange values take `what`, the name of the exchange for the user: "trainer.gather", "saving a
    checkpoint". Ranks compare these names, and raise PeerError if they differ. The default is the calling function.

    Attributes:
        rank, size: the rank of this process and the number of ranks.
        aborted: whether the collectives of this rank were aborted because another rank failed.
    """

    rank = 0
    size = 1
    aborted = False

    def raise_if_aborted(self) -> None:
        """Raise if the collectives of this rank were aborted: gradients may not have been summed. Reads no device.

        Raises:
            RuntimeError: they were aborted. `fail_together` replaces it by the error of the failed rank.
        """
        if self.aborted:
            raise RuntimeError("the collectives of this rank were aborted because another rank has failed")

    def gather(self, value: Any, what: str = "") -> list[Any]:
        """The value of every process, by rank, on every process.

        A value consists of None, numbers, strings, bytes, tensors, numpy arrays, paths, dataclasses, named tuples and
        the usual containers. Tensors are returned on the CPU.

        Raises:
            ModuleContractError: the value of a process contains another object; on all processes.
            PeerError: the processes are not in the same exchange; on all processes.
        """
        return [value]

    def gather_to_main(self, value: Any, what: str = "") -> list[Any]:
        """Like `gather` on rank 0; the others get only their own value."""
        return [value]

    def sum(self, values: Sequence[float], what: str = "") -> list[float]:
        """Each of `values` summed over the processes, in float64, with the same bits on all of them.

        Sums of integers are exact. Other values are added in pairs, in an order that depends on the number of ranks.
        """
        return list(values)

    def merge_tensors(self, tensors: Sequence[Tensor], kinds: Sequence[str], what: str = "") -> list[Tensor]:
        """`tensors`, on the CPU, each merged over the processes by "sum", "max" or "min"; the same bits on all."""
        return list(tensors)

    def broadcast_object(self, value: Any, what: str = "") -> Any:
        """The value of rank 0, on every process. See `gather` for the types."""
        return value

    def check_place(self, what: str) -> None:
        """Compare the exchange with the other processes, without values.

        Raises:
            PeerError: one of them is in another exchange; on all processes.
        """

    def all_gather_rows(self, rows: Tensor, counts: Sequence[int], chunk: int | None = None) -> Tensor:
        """The rows of all processes, concatenated in rank order. Call it directly after an exchange of the counts.

        Args:
            rows: of this process, of shape `(counts[rank], ...)`, on the CPU.
            counts: the number of rows of each process.
            chunk: the largest number of rows in one collective.
        """
        return rows

    def rows_to_main(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Like `all_gather_rows` on rank 0; no rows on the others. A rank sends its rows once."""
        return rows

    def encoded(self, value: Any, what: str) -> Tensor:
        """A value as bytes, for `rows_to_main`. See `gather` for the types."""
        raise NotImplementedError("a single process sends nothing")

    def decoded(self, data: Tensor) -> Any:
        """The value in the bytes that `encoded` made."""
        raise NotImplementedError("a single process receives nothing")

    def all_reduce_(self, tensor: Tensor) -> None:
        """Replace `tensor` in place by its sum over the processes. It is on the device of the gradients."""

    def broadcast_(self, tensor: Tensor) -> None:
        """Replace `tensor` in place by that of rank 0. It is on the device of the gradients."""

    def raise_if_any(self, error: BaseException | None, doing: str) -> None:
        """Continue on all processes, or raise on all of them if one has an error.

        Args:
            error: the error of this process; None if it has none.
            doing: the operation, for the message.

        Raises:
            BaseException: `error`, on the process where it happened.
            PeerError: on the others, with the rank and its error.
        """
        errors = self.gather(None if error is None else f"{type(error).__name__}: {error}", doing)
        if error is not None:
            raise error
        for rank, text in enumerate(errors):
            if text is not None:
                raise PeerError(f"{doing} failed on rank {rank}, so all processes stop. There: {text}")

    def broadcast_outcome(self, error: BaseException | None, value: Any, doing: str) -> Any:
        """`raise_if_any` and `broadcast_object` in one exchange, for an operation that only rank 0 performs.

        Args:
            error: the error on rank 0; None on the others.
            value: of rank 0.
            doing: the operation, for the message.

        Raises:
            BaseException: `error`, on rank 0.
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
        """Store `text` under `name` for the other processes, without waiting for them."""

    def get_if_all(self, names: Sequence[str]) -> list[str] | None:
        """The texts under `names` if all of them exist, otherwise None. It does not wait."""
        return None

    def fail_together(self, where: Callable[[], str]) -> AbstractContextManager[None]:
        """A context in which a failure of one process becomes a failure of all, with its reason.

        Inside another such context it has no effect.

        Args:
            where: returns the place of this process in the run, for the others; called in another thread.

        Raises:
            PeerError: another process has failed, with its traceback; or it has not joined a collective, with the
                place of every process.
        """
        return nullcontext()


_GATHER, _SUM, _BROADCAST, _MEETING, _TO_MAIN = "gather", "sum", "broadcast", "meeting", "gather to rank 0"
_KINDS = (_GATHER, _SUM, _BROADCAST, _MEETING, _TO_MAIN)
_MERGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_PLACE_SIZE = 512  # bytes of a place in an error message; all ranks send the same size
_ROWS_TAG = 0x7275  # differs from the tags of headers.py and of `_abort_collectives`
_SHORT = 4096  # bytes of a message; up to this size its length is sent with it, which saves a collective
_MOST_AT_ONCE = 1 << 26  # bytes of rows from one process in a collective; each process receives as many from each
_OURS = str(Path(__file__).parents[2]) + os.sep  # the folder of the package
_OTHERS = (str(Path(torch.__file__).parent) + os.sep, str(Path(os.__file__).parent) + os.sep, "<")


class GroupCommunicator(Communicator):
    """The exchange of values over a process group.

    Each exchange begins with headers of a fixed size, which all ranks merge. They contain the name of the exchange, so
    ranks in different exchanges raise an error before they send data of different sizes. Small sums and short texts of
    rank 0 are part of the header. A rank sends about log2(ranks) messages.

    Args:
        group: a group for CPU tensors without other traffic: an exchange must never meet another collective.
        store: holds messages between processes outside of collectives.
        groups: the other groups of these processes, the one for gradients first. They are aborted after a failure.
        allow_pickle: send objects without an encoding as pickles, and read pickles.
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
        if connects_lazily(self.size):
            self._connect()
        # A group may serve several runs. A blocking wait on a shared connection would delay this communicator.
        own = PrefixStore(f"trainstack/run/{name}", store.clone())  # type: ignore[attr-defined]  # missing in the stubs
        self._store = TimedStore(own, timeout_s)

    def _connect(self) -> None:
        """Make the connections of all collectives now, while the failure of a rank is still noticed.

        A rank that waits for a connection later cannot be interrupted before the timeout of the group.
        """
        for group in dict.fromkeys([self._group, *self._groups]):
            if dist.get_backend(group) == "gloo":
                nothing = torch.zeros(1, dtype=torch.uint8, device="cpu")
                dist.all_reduce(nothing, group=group)
                dist.broadcast(nothing, group=group, group_src=0)
                dist.all_gather([torch.empty_like(nothing) for _ in range(self.size)], nothing, group=group)

    def _encode(self, value: Any, what: str) -> Message:
        from trainstack.backends.processes.wire import encode

        return encode(value, f"{what}: the value", allow_pickle=self._allow_pickle)

    def gather(self, value: Any, what: str = "") -> list[Any]:
        what = what or _calling_function()
        if self.size == 1:
            return [value]
        try:
            message = self._encode(value, what)
        except ModuleContractError as error:
            self._exchange(what, str(error).encode(), refused=True)
            raise
        return self._decode_all(self._exchange(what, message.packed()), message)

    def gather_to_main(self, value: Any, what: str = "") -> list[Any]:
        what = what or _calling_function()
        if self.size == 1:
            return [value]
        try:
            message = self._encode(value, what)
        except ModuleContractError as error:
            self._meet(what, _TO_MAIN, refused=True)
            self._exchange(what, str(error).encode(), refused=True)
            raise
        if self._meet(what, _TO_MAIN).refused:
            self._exchange(what, b"")  # raises the error of the rank that refused
        data = _flat(message.packed())
        lengths = self._all_gather(torch.tensor([data.numel()])).flatten().tolist()
        rows = self.rows_to_main(data, lengths)
        return [value] if self.rank else self._decode_all(torch.split(rows, lengths), message)

    def _decode_all(self, parts: Sequence[Tensor], mine: Message) -> list[Any]:
        from trainstack.backends.processes.wire import decode_packed

        return [decode_packed(part, mine.classes, allow_pickle=self._allow_pickle) for part in parts]

    def sum(self, values: Sequence[float], what: str = "") -> list[float]:
        what = what or _calling_function()
        inline = list(values) if 8 * len(values) <= INLINE else []
        met = self._meet(what, _SUM, length=len(values), values=inline)
        if met.longest * self.size != met.total:
            counts = self._all_gather(torch.tensor([len(values)])).flatten().tolist()
            raise PeerError(f"{what}: the ranks sum different amounts of numbers: {counts}.")
        if inline or not values:
            return met.values
        summed: list[float] = self._merged(torch.tensor(values, dtype=torch.float64, device="cpu"), torch.add).tolist()
        return summed

    def merge_tensors(self, tensors: Sequence[Tensor], kinds: Sequence[str], what: str = "") -> list[Tensor]:
        what = what or _calling_function()
        met = self._meet(what, _SUM, length=sum(tensor.nbytes for tensor in tensors))
        if met.longest * self.size != met.total:
            raise PeerError(f"{what}: the ranks have tensors of different sizes.")
        return [self._merged(tensor, _MERGES[kind]) for tensor, kind in zip(tensors, kinds, strict=True)]

    def _merged(self, tensor: Tensor, merge: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        def merge_bytes(mine: Tensor, theirs: Tensor, sender: int) -> Tensor:  # gloo lacks some dtypes, but has bytes
            return merge(mine.view(tensor.dtype), theirs.view(tensor.dtype)).view(torch.uint8)

        if self.size == 1 or not tensor.numel():
            return tensor
        flat = bytes_of(tensor)
        return merge_over_ranks(flat, merge_bytes, self._group).view(tensor.dtype).reshape(tensor.shape)

    def broadcast_object(self, value: Any, what: str = "") -> Any:
        what = what or _calling_function()
        if self.size == 1:
            return value
        if self.rank != 0:
            return self._receive(what)
        try:
            message = self._encode(value, what)
        except ModuleContractError as error:
            self._send(what, str(error).encode(), refused=True)
            raise
        self._send(what, message.head)
        for blob in message.blobs:
            self._broadcast_bytes(blob, 0)
        return value

    def check_place(self, what: str) -> None:
        self._meet(what, _MEETING)

    def raise_if_any(self, error: BaseException | None, doing: str) -> None:
        if self._meet(doing, _MEETING, refused=error is not None).refused:
            super().raise_if_any(error, doing)

    def all_gather_rows(self, rows: Tensor, counts: Sequence[int], chunk: int | None = None) -> Tensor:
        whole = rows.new_empty((sum(counts), *rows.shape[1:]))
        begins = list(accumulate([0, *counts[:-1]]))
        size = whole[:1].nbytes
        chunk = min(chunk or sys.maxsize, max(1, _MOST_AT_ONCE // max(1, size)))
        for begin in range(0, max(counts) if size else 0, chunk):
            here = [max(0, min(count - begin, chunk)) for count in counts]
            mine = rows[begin : begin + here[self.rank]].contiguous()  # gloo lacks some dtypes, but has bytes
            parts = self._all_gather_uneven(bytes_of(mine), [size * n for n in here])
            for first, count, part in zip(begins, here, parts, strict=True):
                target = whole[first + begin : first + begin + count]
                bytes_of(target).copy_(part)
        return whole

    def rows_to_main(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        if self.rank:
            if rows.nbytes:
                _wait_for(dist.isend(bytes_of(rows), group=self._group, group_dst=0, tag=_ROWS_TAG))
            return rows[:0]
        whole = rows.new_empty((sum(counts), *rows.shape[1:]))
        for sender, part in enumerate(torch.split(whole, list(counts))):
            if not sender:
                part.copy_(rows)
            elif part.nbytes:
                _wait_for(dist.irecv(bytes_of(part), group=self._group, group_src=sender, tag=_ROWS_TAG))
        return whole

    def encoded(self, value: Any, what: str) -> Tensor:
        return _flat(self._encode(value, what).packed())

    def decoded(self, data: Tensor) -> Any:
        from trainstack.backends.processes.wire import decode_packed

        return decode_packed(data, allow_pickle=self._allow_pickle)

    def _send(self, what: str, head: bytes, *, refused: bool = False) -> None:
        inline = head if len(head) <= INLINE else b""
        self._meet(what, _BROADCAST, length=len(head), text=inline, refused=refused)
        if not inline:
            self._broadcast_bytes(torch.frombuffer(bytearray(head), dtype=torch.uint8), 0)

    def _receive(self, what: str) -> Any:
        """The value that rank 0 sends. Each large tensor gets separate memory."""
        from trainstack.backends.processes.wire import blob_sizes, decode

        met = self._meet(what, _BROADCAST)
        data = met.text or self._broadcast_bytes(_room(met.longest), 0).numpy().tobytes()
        if met.refused:
            raise ModuleContractError(f"rank 0: {data.decode(errors='replace')}")
        blobs = [self._broadcast_bytes(_room(size), 0) for size in blob_sizes(data)]
        return decode(data, blobs, allow_pickle=self._allow_pickle)

    def _exchange(self, what: str, message: bytes | Tensor, *, refused: bool = False) -> list[Tensor]:
        """The messages of all processes, as flat bytes.

        Raises:
            ModuleContractError: a process has refused to send its value.
        """
        message = _flat(message)
        met = self._meet(what, _GATHER, length=message.numel(), refused=refused)
        begin = torch.tensor([message.numel(), int(refused)]).view(torch.uint8)
        if met.longest <= _SHORT:  # the lengths travel with the messages
            rows = self._all_gather(_padded(torch.cat([begin, message]), met.longest + begin.numel()))
            heads, bodies = torch.split(rows, [begin.numel(), met.longest], 1)
            facts = [head.clone().view(torch.int64).tolist() for head in heads]
            parts = [body[:length].clone() for body, (length, _) in zip(bodies, facts, strict=True)]
        else:
            facts = self._all_gather(begin).view(torch.int64).tolist()
            parts = self._all_gather_uneven(message, [length for length, _ in facts])
        for rank, (_, is_refused) in enumerate(facts):
            if is_refused and not refused:
                raise ModuleContractError(f"rank {rank}: {_text(parts[rank])}")
        return parts

    def _meet(self, what: str, kind: str, *, length: int = 0, **said: Any) -> Header:
        """Merge the headers of all processes into one.

        Raises:
            PeerError: the processes are not in the same exchange.
        """
        self._num_exchanges += 1
        mine = Header(
            kind=_KINDS.index(kind),
            number=self._num_exchanges & 0xFFFFFFFF,
            name=_hash(what),
            longest=length,
            total=length,
            **said,
        )
        met = mine if self.size == 1 else merge_headers(mine, self._group)
        if met.foreign != -1:
            raise PeerError(
                f"{what}: the data of rank {met.foreign} is not a message of this version of trainstack. Run the same "
                "version on all processes, and let no other program use the ports of the run."
            )
        if met.apart:
            self._raise_apart(what, kind)
        return met

    def _raise_apart(self, what: str, kind: str) -> None:
        place = f"{kind}\n{what!r}{f' at {where}' if (where := self._where()) else ''}{_calling_place()}"
        mine = place.encode()[:_PLACE_SIZE].ljust(_PLACE_SIZE, b"\0")
        alike: dict[str, list[int]] = {}
        for rank, row in enumerate(self._all_gather(torch.frombuffer(bytearray(mine), dtype=torch.uint8))):
            alike.setdefault(_text(row), []).append(rank)
        lines = [
            f"  rank{'s' * many} {rank_list(ranks)} {'are' if many else 'is'} in {place.partition(chr(10))[2]}\n"
            for place, ranks in alike.items()
            for many in [len(ranks) > 1]
        ]
        raise PeerError(
            "the processes are not in the same place:\n"
            + "".join(lines[:MOST_LINES])
            + (f"  and {len(lines) - MOST_LINES} more places\n" if len(lines) > MOST_LINES else "")
            + "All processes have to make the same calls in the same order: gather, validate, save_checkpoint and the "
            "like are called by all or by none, not below `if rank == 0:`."
        )

    def _all_gather(self, mine: Tensor) -> Tensor:
        """One row of bytes for each process; all rows have the same size."""
        rows = _room(self.size * mine.nbytes).view(mine.dtype).reshape(self.size, -1)
        dist.all_gather(list(rows.unbind()), mine, group=self._group)
        return rows

    def _all_gather_uneven(self, mine: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """The bytes of each process, in one collective.

        If padding all to the longest would send much more than the data, rows are padded to twice the mean. The rest of
        longer ones follows in one broadcast for each rank, which are fewer than half of the ranks.
        """
        longest, total = max(lengths), sum(lengths)
        # up to 1 MiB of padding is accepted, to save the broadcasts
        width = longest if longest * self.size <= 2 * total + (1 << 20) else 2 * total // self.size
        rows = self._all_gather(_padded(mine[:width], width)) if width else [mine[:0]] * self.size
        parts = []
        for rank, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if length <= width:
                parts.append(row[:length])
                continue
            whole = mine.clone() if rank == self.rank else _room(length)
            whole[:width] = row
            self._broadcast_bytes(whole[width:], rank)
            parts.append(whole)
        return parts

    def _broadcast_bytes(self, data: Tensor, source: int) -> Tensor:
        dist.broadcast(data, group=self._group, group_src=source)
        return data

    def all_reduce_(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self._for_gradients)

    def broadcast_(self, tensor: Tensor) -> None:
        if tensor.numel():
            # As bytes: gloo and nccl lack int16, uint16, uint32, uint64 and float8 (torch 2.13.0). `view` refuses a
            # tensor that `bytes_of` would copy.
            dist.broadcast(bytes_of(tensor.view(-1)), group=self._for_gradients, group_src=0)

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
        """Make all collectives of this communicator's groups fail on this rank, also those of another thread.

        gloo cannot abort, but after a receive that has timed out it closes every connection of its group. So receive,
        for 1 ms, a message that no rank sends, under an unused tag (checked on torch 2.13.0).
        """
        self.aborted = True  # first, because nccl's kernels then return with gradients that were not summed
        for group in dict.fromkeys([self._group, *self._groups]):
            with suppress(Exception):
                source = (group.rank() + 1) % group.size()
                never = dist.irecv(torch.empty(1), group=group, group_src=source, tag=0x7EA7)
                assert never is not None
                never.wait(timedelta(milliseconds=1))
            with suppress(Exception):
                group.abort()  # for nccl


@functools.lru_cache(maxsize=1024)
def _hash(what: str) -> int:
    return int.from_bytes(hashlib.blake2b(what.encode(), digest_size=8).digest(), "little")


def _flat(message: bytes | Tensor) -> Tensor:
    if isinstance(message, bytes):
        held = bytearray(message or b"\0")  # frombuffer refuses b""
        return torch.frombuffer(held, dtype=torch.uint8)[: len(message)]
    return message


def _room(size: int) -> Tensor:
    """Memory for the number of bytes that another process has announced."""
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    except (RuntimeError, TypeError, OverflowError) as error:
        raise PeerError(f"there is not enough memory for the {size} bytes that another process sends.") from error


def _wait_for(work: Any) -> None:
    assert work is not None
    work.wait()


def _padded(data: Tensor, size: int) -> Tensor:
    """`data`, padded with zeros at the end."""
    if data.numel() == size:
        return data.contiguous()
    padded = _room(size)
    padded[: data.numel()], padded[data.numel() :] = data, 0
    return padded


def _text(data: Tensor) -> str:
    return data.numpy().tobytes().rstrip(b"\0").decode(errors="replace")


def _calling_function() -> str:
    """The qualified name of the caller's caller, as the name of an exchange."""
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
