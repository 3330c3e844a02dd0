"""A watchdog thread that ends collectives when another rank has failed or is missing."""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
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
from torch.distributed import Store  # type: ignore[attr-defined]

from trainstack.errors import PeerError

_OURS = str(Path(__file__).parents[2]) + os.sep  # the folder of the package
_TORCH = str(Path(torch.__file__).parent) + os.sep
_PYTHON = str(Path(os.__file__).parent) + os.sep
_WRAPPERS = ("fail_together", "hook", "announced")  # around a public method of a trainer, every hook and every verb

_THREAD = re.compile(r"hread 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class StackFrame(NamedTuple):
    """A line of a stack."""

    file: str
    line: int
    function: str


def summarize_thread(thread: int) -> str:
    """Where the thread with this ident is now; "" if it is gone.

    A thread that runs changes its frames while another one walks them in Python, at which CPython may crash.
    `faulthandler` walks them in one go.
    """
    with suppress(OSError), tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return _line(reversed(_frames_of(thread, file.read().decode(errors="replace"))))
    return ""


def _frames_of(thread: int, dump: str) -> list[StackFrame]:
    """What a dump of `faulthandler` says of one thread, the innermost frame first."""
    for part in dump.split("\n\n"):
        head, *lines = part.splitlines() or [""]
        found = _THREAD.search(head)
        if found and int(found[1], 16) == thread:
            return [StackFrame(m[1], int(m[2]), m[3]) for line in lines if (m := _FRAME.match(line))]
    return []


def summarize_traceback(raised: TracebackType | None) -> str:
    """Where an exception comes from."""
    frames = traceback.walk_tb(raised)
    return _line(StackFrame(frame.f_code.co_filename, number, frame.f_code.co_name) for frame, number in frames)


def _line(stack: Iterable[StackFrame]) -> str:
    """`train > train_epoch > ... > train_step, at train.py:41: time.sleep(60)`: what is neither torch's nor Python's,
    from the first function of this library on."""
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
"""Between two looks at the store; longer where there are more than a hundred processes, for there is one store."""

GRACE_S = 2.0
"""For a process to learn by itself that another one has failed, before its connections are cut."""

ANSWER_S = 2.0
"""How long to wait, after a look, for the others to say where they are."""

_POLL_S = 0.02

_LOST = ("/gloo/", "Application timeout caused pair closure")
"""What the text of a plain RuntimeError of gloo's has in it."""

_WHERE_TORCH_SAW_IT = re.compile(r"\[\S+\.cc:\d+\] ")
_SILENT = (
    "A process that does not answer has ended, is stopped, or runs code that holds Python's lock. One that left no "
    "traceback in its output was killed: the system does that when memory runs out."
)
_ADVICE = (
    "All processes have to come to the same collectives, and equally often: train, validate, gather and "
    "save_checkpoint are called by all or by none, not below `if rank == 0:`. If one is only slow, give it more time: "
    "backend_options={'ddp': {'timeout_s': ...}}."
)


class PeerWatchdog(threading.Thread):
    """A thread that looks at the store once a second while the processes work together; a step costs nothing more.

    It leaves word of where this process is, answers when another one asks, and when another one has failed it
    cuts the connections that this one may be waiting on: a process that failed need not have ended.

    Args:
        store: the group's, with keys of this run only.
        rank: of this process.
        size: how many there are.
        number: counts the watchdogs of a run, alike in all its processes.
        acknowledged: failures up to this number were raised here before and are not heard again. A later one may still
            be of an earlier watchdog: another process failed in it when this one was through already.
        where: what to say beside the place in the code, such as the step.
        abort_collectives: makes every collective of this process fail, those under way included.

    Attributes:
        failed: the number of what `resolve_error` has judged.
    """

    def __init__(
        self,
        store: Store,
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
        self._stopping = threading.Event()

    def run(self) -> None:
        """Look until told to stop, or until the store is gone and with it everybody to talk to."""
        with suppress(RuntimeError):
            while not self._poll() and not self._stopping.wait(self._pause):
                pass

    def stop(self) -> None:
        """Look no more, and tell those who may still ask."""
        self._stopping.set()
        self.join(self._pause + GRACE_S)
        with suppress(RuntimeError):
            if self._failed_at is not None:
                self._store.set(f"heard/{self._number}/{self._rank}", "")
            self._store.set(f"place/{self._rank}", f"{self._where()}; its trainer is at work no more")

    def resolve_error(self, error: BaseException) -> BaseException:
        """What is to be raised for `error`: itself, left for the others to read, or what another process has left.

        Where processes are missed and none has left word, all are asked where they are.
        """
        self._failed_at = f"{self._where()}; {summarize_traceback(error.__traceback__)}"
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        if type(error) is RuntimeError or isinstance(error, dist.DistError):
            with suppress(RuntimeError):
                self._peer_error = self._peer_error or self._failure()
            if self._peer_error is not None:
                return self._peer_error
            if isinstance(error, dist.DistError) or any(sign in str(error) for sign in _LOST):
                error = PeerError(self._report(error))
                text = str(error)
        with suppress(RuntimeError):  # where the store is gone, there is nobody left to tell
            self._publish_failure(text)
        return error

    def _publish_failure(self, text: str) -> None:
        """Leave word of a failure, unless another process has done so in this watchdog; rank 0 waits for answers."""
        before = self._store.get("failure").decode() if self._store.check(["failure"]) else ""
        if not before or int(before.partition("\n")[0]) < self._number:
            self._store.compare_set("failure", before, f"{self._number}\n{self._rank}\n{text}")
        # The store may be in the process of rank 0, and that process may be about to end.
        deadline, deaf = time.monotonic() + self._pause + ANSWER_S, set(range(1, self._size))
        while self._rank == 0 and deaf and time.monotonic() < deadline:
            deaf -= {rank for rank in deaf if self._store.check([f"heard/{self._number}/{rank}"])}
            time.sleep(_POLL_S)

    def _poll(self) -> bool:
        """Whether there is nothing more to look for."""
        here = self._failed_at or f"{self._where()}; {summarize_thread(self._watched)}"
        self._store.set(f"place/{self._rank}", here)
        if self._store.check(["asked"]):
            self._store.compare_set(f"{self._store.get('asked').decode()}/{self._rank}", "", here)
        self._peer_error = self._failure()
        if self._peer_error is None:
            return False
        if not self._stopping.wait(GRACE_S):
            self._abort_collectives()
        return True

    def _failure(self) -> PeerError | None:
        """What another process has left since this one last failed."""
        if not self._store.check(["failure"]):
            return None
        number, rank, text = self._store.get("failure").decode().split("\n", 2)
        if int(number) <= self._acknowledged or int(rank) == self._rank:
            return None
        self.failed = max(self.failed, int(number))
        self._store.set(f"heard/{number}/{self._rank}", "")
        return PeerError(f"rank {rank} failed, so rank {self._rank} stops as well. There:\n{text}")

    def _report(self, error: BaseException) -> str:
        message = _WHERE_TORCH_SAW_IT.sub("", str(error)).partition(". This is typically")[0].strip()
        missed = f"rank {self._rank} has lost touch with another process ({message}).\n"
        try:
            places, silent = self._locate_ranks()
        except RuntimeError:
            return missed + f"The group's store is gone as well, so nobody can be asked. It was at {self._failed_at}"
        lines = [
            f"  rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {place}"
            for place, ranks in places.items()
        ]
        return missed + "\n".join([*lines, *([_SILENT] if silent else []), _ADVICE])

    def _locate_ranks(self) -> tuple[dict[str, list[int]], set[int]]:
        """Ask everybody; the ranks at each place, and those that do not answer."""
        assert self._failed_at is not None
        answer = f"answer/{self._number}"
        self._store.set("asked", answer)
        self._store.set(f"{answer}/{self._rank}", self._failed_at)
        deadline, silent = time.monotonic() + self._pause + ANSWER_S, set(range(self._size))
        while silent and time.monotonic() < deadline:
            silent -= {rank for rank in silent if self._store.check([f"{answer}/{rank}"])}
            time.sleep(_POLL_S)
        places: dict[str, list[int]] = {}
        for rank in range(self._size):
            key = f"place/{rank}" if rank in silent else f"{answer}/{rank}"
            place = self._store.get(key).decode() if self._store.check([key]) else "nothing"
            if rank in silent:
                place = f"does not answer. Last known: {place}"
            places.setdefault(place, []).append(rank)
        return places, silent
