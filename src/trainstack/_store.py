"""`TimedStore`: requests to a store of torch.distributed, each with a timeout; the socket on which a store listens.

torch 2.13.0: a client of `TCPStore` waits in `recv` without a timeout, and Python runs no signal handler while its main
thread waits in C++. If the network is interrupted, the kernel ends that wait after about 16 minutes, or never.
"""

from __future__ import annotations

import _thread
import errno
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from trainstack.errors import TrainstackError

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
TOKEN = "TRAINSTACK_TOKEN"
"""The variable with a secret that all ranks of a run share. `launch` sets it."""

_PIECE_S = 0.5
"""Seconds between checks of the deadline. On Windows, where a signal does not interrupt the wait for a lock, signal
handlers run only between these waits."""

_PAUSE_S = 0.02
"""Initial seconds between two queries for a key that another process sets; `wait_for` increases it."""


def listen_on_loopback(port: int) -> socket.socket | None:
    """A socket that listens only on the loopback address; None if the port is in use, possibly by this process.

    torch 2.13.0: a `TCPStore` that opens its own socket listens on all interfaces.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return listener


class StoreSilentError(TrainstackError):
    """The store has not answered within the timeout."""


def run_with_clock(call: Callable[[], T], timeout_s: float, look: Callable[[], None] | None = None) -> T:
    """Run `call()` in a daemon thread and wait for its result, so that signal handlers of this thread can run.

    After a timeout the thread is abandoned. It is a daemon thread, so Python can exit.

    Args:
        call: a function that may block.
        timeout_s: the timeout in seconds.
        look: called about twice a second during the wait; an exception from it ends the wait. `call` then runs in a
            `threading.Thread`, which debuggers and stack dumps list by name, because such calls take long.

    Returns:
        The result of `call`.

    Raises:
        TimeoutError: `call` has not returned within `timeout_s`.
    """
    done, results, errors = _thread.allocate_lock(), list[T](), list[BaseException]()
    done.acquire()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        finally:
            done.release()

    deadline = time.monotonic() + timeout_s
    if look is None:
        _thread.start_new_thread(run, ())  # takes 30 microseconds; a `threading.Thread` takes 200
    else:
        threading.Thread(target=run, name="trainstack-open", daemon=True).start()
    while not done.acquire(timeout=min(_PIECE_S, max(0.0, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        if look is not None:
            look()
    if errors:
        raise errors.pop()
    return results.pop()


class TimedStore:
    """A store whose requests have a timeout.

    Args:
        store: the store of torch. All threads share it; one thread at a time can wait for an answer.
        timeout_s: seconds for each request.
        deadline: time on the monotonic clock at which all requests end.
        pending: the start time of each request in progress, by a unique key.
    """

    raw: Store

    def __init__(
        self, store: Store, timeout_s: float, deadline: float = float("inf"), pending: dict[object, float] | None = None
    ) -> None:
        self.raw, self._timeout_s, self._deadline = store, timeout_s, deadline
        self._pending: dict[object, float] = {} if pending is None else pending

    def within(self, seconds: float) -> TimedStore:
        """The same store, with a deadline `seconds` from now for all its requests together."""
        deadline = min(self._deadline, time.monotonic() + seconds)
        return TimedStore(self.raw, self._timeout_s, deadline, self._pending)

    def under(self, prefix: str) -> TimedStore:
        """The part of the store whose keys begin with `prefix`."""
        return TimedStore(PrefixStore(prefix, self.raw), self._timeout_s, self._deadline, self._pending)

    def cloned(self) -> TimedStore:
        """The same store over another connection."""
        clone = run_with_clock(self.raw.clone, self._seconds_left())  # type: ignore[attr-defined]  # missing in stubs
        return TimedStore(clone, self._timeout_s, self._deadline)

    @property
    def silent_s(self) -> float:
        """Seconds since the oldest unanswered request was made; 0 if there is none."""
        begun = list(self._pending.values())
        return time.monotonic() - min(begun) if begun else 0.0

    def set(self, key: str, text: str) -> None:
        """Store `text` under `key`."""
        self._ask(lambda: self.raw.set(key, text))

    def get(self, key: str) -> str:
        """The text under a key that exists."""
        return self._ask(lambda: self.raw.get(key)).decode()

    def find(self, key: str) -> str | None:
        """The text under `key`, or None."""
        found = self.find_all([key])
        return None if found is None else found[0]

    def find_all(self, keys: Sequence[str]) -> list[str] | None:
        """The texts under `keys` once all of them exist, else None."""

        def read() -> list[str] | None:
            if not self.raw.check(list(keys)):
                return None
            found = self.raw.multi_get(list(keys)) if len(keys) > 1 else [self.raw.get(keys[0])] if keys else []
            return [text.decode() for text in found]

        return self._ask(read)

    def get_all(self, keys: Sequence[str]) -> list[str]:
        """The texts under keys that exist, in one request."""
        return [text.decode() for text in self._ask(lambda: self.raw.multi_get(list(keys)))]

    def set_all(self, texts: Mapping[str, str]) -> None:
        """Store each text under its key, in one request."""
        self._ask(lambda: self.raw.multi_set(list(texts), list(texts.values())))  # type: ignore[attr-defined]

    def compare_set(self, key: str, before: str, text: str) -> None:
        """Store `text` under `key` if its value is `before`; "" means that the key does not exist."""
        self._ask(lambda: self.raw.compare_set(key, before, text))

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the number under `key`, and return the sum."""
        return int(self._ask(lambda: self.raw.add(key, amount)))

    def delete(self, key: str) -> None:
        """Remove `key`, if the store supports it."""
        with suppress(RuntimeError, NotImplementedError):
            self._ask(lambda: self.raw.delete_key(key))

    def wait_for(self, keys: Sequence[str], seconds: float, readers: int = 1) -> list[str]:
        """The texts under `keys` once all of them exist.

        Args:
            keys: the keys to wait for.
            seconds: the timeout.
            readers: the number of processes that wait at the same time. Large groups query less often, because all
                processes use one server.

        Raises:
            TimeoutError: a key does not exist within `seconds`.
        """
        # one second more for the last request, which distinguishes a missing key from a store that does not answer
        store, pause, deadline = self.within(seconds + 1.0), _PAUSE_S, time.monotonic() + seconds
        while (found := store.find_all(keys)) is None:
            time.sleep(pause)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{', '.join(keys)}: not there within {seconds:g} s")
            pause = min(pause * 1.5, max(0.25, readers / 2000))
        return found

    def missing(self, keys: Sequence[str]) -> list[int]:
        """The indices in `keys` of the keys that do not exist, by binary search: a request reports only whether all of
        its keys exist."""
        found, parts = list[int](), [range(len(keys))] if keys else []
        while parts:
            part = parts.pop()
            if self._ask(lambda part=part: self.raw.check([keys[at] for at in part])):  # type: ignore[misc]
                continue
            if len(part) == 1:
                found.append(part[0])
            else:
                parts += [part[: len(part) // 2], part[len(part) // 2 :]]
        return sorted(found)

    def _seconds_left(self) -> float:
        return min(self._timeout_s, max(0.0, self._deadline - time.monotonic()))

    def _ask(self, request: Callable[[], T]) -> T:
        mark, begin = object(), time.monotonic()
        self._pending[mark] = begin

        def run() -> T:
            try:
                return request()
            finally:
                self._pending.pop(mark, None)

        seconds = self._seconds_left()
        try:
            return run_with_clock(run, seconds)
        except TimeoutError:
            raise StoreSilentError(self.silence(seconds)) from None

    def silence(self, seconds: float) -> str:
        """The message about a store that has not answered for at least `seconds`."""
        point, here = address_of(self.raw), socket.gethostname()
        host = point.rpartition(":")[0]
        return (
            f"the store at {point} has not answered for {max(seconds, self.silent_s):.0f} s: the network between "
            f"{host} and {here} is interrupted, or {host} is down, or the process with the store is stopped."
        )


class KeyWait:
    """Waits for a key over a separate connection, in a daemon thread, without polling.

    torch 2.13.0 logs two lines of warnings when `Store.wait` reaches its timeout. `end` therefore sets the key.

    Args:
        store: the store of the key.
        key: the key that another process sets.
        seconds: the timeout of the request to the store.
    """

    def __init__(self, store: TimedStore, key: str, seconds: float) -> None:
        self._store, self._key = store, key
        self._connection = store.cloned()
        self._woken = threading.Event()
        self._seconds = seconds
        threading.Thread(target=self._run, name="trainstack-wait", daemon=True).start()

    def _run(self) -> None:
        with suppress(RuntimeError):
            self._connection.raw.wait([self._key], timedelta(seconds=self._seconds))
        self._woken.set()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`; whether the key exists or the connection is lost."""
        return self._woken.wait(seconds)

    def end(self) -> None:
        """End the wait."""
        if not self._woken.is_set():
            with suppress(RuntimeError, StoreSilentError):
                self._store.within(_PIECE_S).set(self._key, "")


def address_of(store: Any) -> str:
    """`HOST:PORT` of the server of a store, behind its prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if hasattr(store, "port") else type(store).__name__
