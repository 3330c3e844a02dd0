"""A watchdog thread that aborts collectives if another rank has failed or is missing."""

from __future__ import annotations

import faulthandler
import json
import linecache
import os
import re
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
import torch.distributed as dist

from trainstack._store import StoreSilentError, TimedStore
from trainstack.backends.processes.peer_report import (
    Place,
    decode_place,
    encode_place,
    lost_touch,
    missing_peers,
    short_message,
)
from trainstack.errors import PeerError

_OURS = str(Path(__file__).parents[2]) + os.sep  # the folder of the package
_TORCH = str(Path(torch.__file__).parent) + os.sep
_PYTHON = str(Path(os.__file__).parent) + os.sep
_WRAPPERS = ("fail_together", "hook", "announced", "_train_until_stopped")
"""Functions around a public method of a trainer, every hook, every verb and the training; omitted from places."""

_THREAD = re.compile(r"hread 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class StackFrame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str


def summarize_thread(thread: int) -> str:
    """The current place of the thread with this ident; "" if it has ended.

    A running thread changes its frames while another one walks them in Python, which may crash CPython. `faulthandler`
    reads them without releasing the GIL.
    """
    with suppress(OSError), tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return _line(reversed(_frames_of(thread, file.read().decode(errors="replace"))))
    return ""


def _frames_of(thread: int, dump: str) -> list[StackFrame]:
    """The frames of one thread in a dump of `faulthandler`, innermost first."""
    for part in dump.split("\n\n"):
        head, *lines = part.splitlines() or [""]
        found = _THREAD.search(head)
        if found and int(found[1], 16) == thread:
            return [StackFrame(m[1], int(m[2]), m[3]) for line in lines if (m := _FRAME.match(line))]
    return []


def summarize_traceback(raised: TracebackType | None) -> str:
    """The place in the code where an exception was raised."""
    frames = traceback.walk_tb(raised)
    return _line(StackFrame(frame.f_code.co_filename, number, frame.f_code.co_name) for frame, number in frames)


def _line(stack: Iterable[StackFrame]) -> str:
    """`train > train_epoch > ... > train_step, at train.py:41: time.sleep(60)`: the functions of neither torch nor
    Python, from the first one of this library on."""
    places = [place for place in stack if _is_informative(place.file)]
    first = next((at for at, place in enumerate(places) if place.file.startswith(_OURS)), 0)
    if not places:
        return ""
    file, number, _ = places[-1]
    names = [place.function for place in places[first:] if place.function not in _WRAPPERS]
    called = (name if name.startswith("__") else name.removeprefix("_") for name in names)
    way = " > ".join(name for name, _ in groupby(called))
    source = linecache.getline(file, number).partition("  # ")[0].strip()
    return f"{way}, at {file}:{number}" + (f": {source}" if source else "")


def _is_informative(file: str) -> bool:
    if file.startswith(_TORCH) or file.startswith("<frozen "):
        return False
    return not file.startswith(_PYTHON) or "-packages" in file


PAUSE_S = 1.0
"""Between two reads of the store; longer for more than a hundred processes, because they share one store."""

GRACE_S = 2.0
"""Time for a process to notice without help that another one has failed, before its connections are closed."""

ANSWER_S = 2.0
"""Time for the others to report their places, in addition to their pause between two reads."""

_POLL_S = 0.02  # short against the answers; only ranks that already have an error poll

_ASKERS = 3
"""The number of ranks that ask all others, one after the other, in case an earlier one ends before its report."""

_ALL_PRINT = 16
"""Up to this number of ranks, each prints the places of all. With more, only the asking rank and rank 0 do."""

_LOST = ("/gloo/", "Application timeout caused pair closure")
"""A plain RuntimeError with one of these texts comes from gloo (torch 2.13.0)."""


class PeerWatchdog(threading.Thread):
    """A thread that reads the store once a second while the processes work together. A step has no further cost.

    It stores the place of this process and answers when another process asks. When another process has failed, it
    aborts the connections on which this one may wait: a process that failed need not have ended.

    Args:
        store: the group's store, with keys of this run only. This thread may wait for it without limit.
        rank: of this process.
        size: the number of ranks.
        number: counts the watchdogs of a run, equally in all its processes.
        acknowledged: failures up to this number were raised here before and are ignored. A later one may still be of an
            earlier watchdog: another process failed in it after this one had left it.
        where: returns a description such as the step, in addition to the place in the code.
        abort_collectives: makes every collective of this process fail, including current ones.

    Attributes:
        failed: the number of the last failure that `resolve_error` has handled.
    """

    failed: int

    def __init__(
        self,
        store: TimedStore,
        rank: int,
        size: int,
        number: int,
        acknowledged: int,
        where: Callable[[], str],
        abort_collectives: Callable[[], None],
    ) -> None:
        super().__init__(name="trainstack-watchdog", daemon=True)
        self._store, self._rank, self._size = store, rank, size
        self._where, self._abort_collectives = where, abort_collectives
        self._number, self._acknowledged, self.failed = number, acknowledged, number
        self._pause = max(PAUSE_S, size / 100)
        self._watched = threading.get_ident()
        self._failed_at: str | None = None
        self._peer_error: PeerError | None = None
        self._counted = set[str]()
        self._stopping = threading.Event()

    def run(self) -> None:
        """Read the store until `stop` is called, or until the store and with it all other ranks are unreachable."""
        with suppress(RuntimeError):
            while not self._stopping.is_set():
                with suppress(StoreSilentError):  # the network may recover
                    if self._poll():
                        return
                self._stopping.wait(self._pause)

    def stop(self) -> None:
        """Stop reading, and tell processes that may still ask."""
        self._stopping.set()
        if self._is_cut_off:  # the thread waits for the store, and no message could be sent
            return
        self.join(self._pause + GRACE_S)
        with suppress(RuntimeError, StoreSilentError):
            store = self._store.within(ANSWER_S)
            if self._failed_at is not None:
                self._count(store, f"heard/{self._number}")
            store.set(f"place/{self._rank}", encode_place(f"{self._where()}; its trainer has finished"))

    def resolve_error(self, error: BaseException) -> BaseException:
        """The exception to raise for `error`: `error`, which is stored for the others, or the failure of another rank.

        If other ranks are missing and none has stored a failure, all ranks are asked for their places.
        """
        self._failed_at = f"{self._where()}; {summarize_traceback(error.__traceback__)}"
        if isinstance(error, StoreSilentError):
            return PeerError(f"rank {self._rank} has lost the connection: {error} It was at {self._failed_at}")
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        if type(error) is RuntimeError or isinstance(error, dist.DistError):
            with suppress(RuntimeError, StoreSilentError):
                self._peer_error = self._peer_error or (None if self._is_cut_off else self._failure())
            if self._peer_error is not None:
                return self._peer_error
            if isinstance(error, dist.DistError) or any(sign in str(error) for sign in _LOST):
                error = PeerError(self._report(error))
                text = str(error)
        with suppress(RuntimeError, StoreSilentError):  # without the store, no other rank can be reached
            self._publish_failure(f"{type(error).__name__}: {error}", text)
        return error

    @property
    def _is_cut_off(self) -> bool:
        """Whether the store has not answered for so long that another request is useless."""
        return self._store.silent_s > self._pause + ANSWER_S

    def _publish_failure(self, line: str, text: str) -> None:
        """Store a failure, unless another process has done so in this watchdog. Rank 0 waits for the readers."""
        if self._is_cut_off:
            return
        store = self._store.within(self._pause + 2 * ANSWER_S)
        before = store.find("failure") or ""
        if not before or json.loads(before)["number"] < self._number:
            said = {"number": self._number, "rank": self._rank, "host": socket.gethostname()}
            store.compare_set("failure", before, json.dumps({**said, "line": line.partition("\n")[0], "text": text}))
        # The store may be in the process of rank 0, and that process may be about to end.
        if self._rank == 0:
            self._wait_for_count(store, f"heard/{self._number}", self._size - 1)

    def _count(self, store: TimedStore, name: str) -> None:
        """Increment a counter for this rank, once for each name."""
        if name not in self._counted:
            self._counted.add(name)
            store.add(f"{name}/count", 1)

    def _wait_for_count(self, store: TimedStore, name: str, number: int) -> bool:
        """Wait until the counter is at least `number`; False on a timeout. Each read is one request for all ranks."""
        deadline = time.monotonic() + self._pause + ANSWER_S
        while store.add(f"{name}/count", 0) < number:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _poll(self) -> bool:
        """Read the store once. Return whether the watchdog has nothing more to do."""
        here = encode_place(self._failed_at or f"{self._where()}; {summarize_thread(self._watched)}")
        self._store.set(f"place/{self._rank}", here)
        asked = self._store.find("asked")
        if asked is not None and asked not in self._counted:
            self._store.compare_set(f"{asked}/{self._rank}", "", here)
            self._count(self._store, asked)
        self._peer_error = self._failure()
        if self._peer_error is None:
            return False
        if not self._stopping.wait(GRACE_S):
            self._abort_collectives()
        return True

    def _failure(self) -> PeerError | None:
        """A failure that another process has stored since this one last failed."""
        store = self._store.within(ANSWER_S)
        said = store.find("failure")
        failure = json.loads(said) if said is not None else None
        if failure is None or failure["number"] <= self._acknowledged or failure["rank"] == self._rank:
            return None
        self.failed = max(self.failed, failure["number"])
        self._count(store, f"heard/{failure['number']}")
        where = f" There, on {failure['host']}: {failure['line']} (its output has the traceback)"
        if self._rank == 0:
            where = f" There, on {failure['host']}:\n{failure['text']}"
        return PeerError(f"rank {failure['rank']} failed, so rank {self._rank} stops too.{where}")

    def _report(self, error: BaseException) -> str:
        message = short_message(error)
        try:
            if not self._is_cut_off:
                return self._report_of_all(message)
        except StoreSilentError:
            pass
        except RuntimeError:
            return (
                f"rank {self._rank} has lost the connection to another process ({message}).\nThe group's store is gone "
                "too, so ranks cannot report: the process that hosts it (rank 0, or the agent of torchrun) has ended. "
                f"It was at {self._failed_at}"
            )
        return (
            f"rank {self._rank} has lost the connection to another process ({message}).\n{self._store.silence(0)}\n"
            f"It was at {self._failed_at}"
        )

    def _report_of_all(self, message: str) -> str:
        """The places of all ranks. One rank asks all, the others read its report. If none comes, the next rank asks."""
        assert self._failed_at is not None
        first = lost_touch(self._rank, message)
        for attempt in range(_ASKERS):
            store = self._store.within(2 * self._pause + 4 * ANSWER_S)
            asking, key = f"asking/{self._number}/{attempt}", f"report/{self._number}/{attempt}"
            store.compare_set(asking, "", str(self._rank))
            asker = int(store.get(asking))
            if asker == self._rank:
                places = self._locate_ranks(store, f"answer/{self._number}/{attempt}")
                report = missing_peers(self._rank, message, places)
                store.set(key, report.partition("\n")[2])
                return report
            with suppress(TimeoutError):
                report = store.wait_for([key], self._pause + 3 * ANSWER_S, readers=self._size)[0]
                if self._rank == 0 or self._size <= _ALL_PRINT:
                    return f"{first}\n{report}"
                return f"{first} It was at {self._failed_at}; the output of rank {asker} has the places of all."
        return f"{first} It was at {self._failed_at}"

    def _locate_ranks(self, store: TimedStore, answer: str) -> dict[int, Place]:
        """Ask all ranks for their places."""
        assert self._failed_at is not None
        store.set(f"{answer}/{self._rank}", encode_place(self._failed_at))
        self._count(store, answer)
        store.set("asked", answer)
        silent = set[int]()
        keys = [f"{answer}/{rank}" for rank in range(self._size)]
        if not self._wait_for_count(store, answer, self._size):
            silent = set(store.missing(keys))
        said = dict(enumerate(keys)) | {rank: f"place/{rank}" for rank in silent}
        unknown = {list(said)[at] for at in store.missing(list(said.values()))}
        known = [rank for rank in said if rank not in unknown]
        texts = dict(zip(known, store.get_all([said[rank] for rank in known]), strict=True))
        return {rank: decode_place(texts.get(rank), rank in silent) for rank in said}
