"""Supervision of launched processes: timeouts, first failure, termination."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainstack.errors import LaunchError
from trainstack.launching.worker import WHERE_SIGNAL, FailureReport, ResultDir, list_attempts

_ANSWER_S = 5.0  # time for processes to report their places, or to end after SIGKILL

_logger = logging.getLogger("trainstack")


class WorkerWatchdog(threading.Thread):
    """Kills the remaining processes some time after one has failed, ends all at the timeout, and logs restarts.

    torch's agent asks the others to stop, and waits half a minute for those that are stuck in a collective and ignore
    it.

    Args:
        name: of the function, for the log.
        run: the folder of the run.
        grace_s: from the first lost process until the rest are killed.
        timeout_s: for the whole run.
        worker_pids: returns the running processes, if the agent knows them.

    Attributes:
        expired: whether the timeout has passed.
        places: the places of the processes in their code at the timeout, by rank.
        all_gone: whether every process of the newest start has ended.
        left: the processes that ended first, if they wrote neither a result nor a report.
    """

    expired: bool
    all_gone: bool

    def __init__(
        self, name: str, run: Path, grace_s: float, timeout_s: float | None, worker_pids: Callable[[], set[int]]
    ) -> None:
        super().__init__(name="trainstack-launch-watch", daemon=True)
        self.expired = False
        self.places: dict[int, str] = {}
        self.all_gone = False
        self.left: list[ResultDir] = []
        self._name, self._run, self._grace_s = name, run, grace_s
        self._worker_pids = worker_pids
        self._sent = False
        self._starts = 1
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._lost: dict[Path, float] = {}
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.1):
            self._poll()

    def stop(self) -> None:
        """Stop the supervision."""
        self._done.set()
        self.join()

    def kill(self) -> None:
        """Kill every process, including those that still import the script."""
        self._send(signal.SIGKILL)

    def end(self) -> None:
        """Kill every remaining process, and wait for their end; one in a system call may take longer."""
        left = self._pids()
        self.kill()
        deadline = time.monotonic() + _ANSWER_S
        while any(map(_is_alive, left)) and time.monotonic() < deadline:
            time.sleep(0.02)

    def send_once(self, number: int) -> None:
        """Send a signal to every process, only at the first call."""
        if not self._sent:
            self._sent = True
            self._send(number)

    def _poll(self) -> None:
        starts = self._attempts()
        now, boxes = time.monotonic(), starts[-1] if starts else []
        if len(starts) > self._starts:
            self._starts = len(starts)
            said = _others(_reports(starts[-2])) or " A process ended without a word."
            _logger.warning("launch(%s): restart %d.%s", self._name, len(starts) - 1, said)
        if self._deadline is not None and now > self._deadline and not self.expired:
            self.places = locate(boxes)
            self.expired = True
            (self._run / "expired").touch()
            self._send(signal.SIGTERM)
        gone = [box for box in boxes if (pid := box.pid) is not None and not _is_alive(pid)]
        self.all_gone = len(gone) == len(boxes) > 0
        lost = [box for box in gone if not box.has_result]
        if lost or self.expired:
            start = boxes[0].path.parent if boxes else self._run
            if start not in self._lost:  # only before the rest are killed
                self.left = [] if _reports(boxes) else lost
            if now - self._lost.setdefault(start, now) > self._grace_s:
                self.kill()

    def _attempts(self) -> list[list[ResultDir]]:
        try:
            return list_attempts(self._run)
        except OSError:  # the agent creates or deletes one at this moment
            return []

    def _send(self, number: int) -> None:
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _pids(self) -> set[int]:
        known = {pid for boxes in self._attempts()[-1:] for box in boxes if (pid := box.pid) is not None}
        return known | self._worker_pids()


def launch_error(
    name: str, run: Path, failed: BaseException | None, timeout_s: float | None, watch: WorkerWatchdog, stuck: str
) -> LaunchError:
    """The error that names the process that failed first, with the reason.

    A process that ended without a report is the cause of the reports of the others. Otherwise the earliest report is.

    Args:
        name: of the function.
        run: the folder of the run.
        failed: the exception of the agent.
        timeout_s: the timeout that has passed; None if it has not.
        watch: of the processes.
        stuck: the reason why the agent was abandoned; "" if it was not.
    """
    boxes = (list_attempts(run) or [[]])[-1]
    reports = _reports(boxes)
    if timeout_s is not None:
        return LaunchError(
            f"launch({name}) was still running after timeout_s={timeout_s:g}; its processes are ended."
            + "".join(f"\n  rank {rank}: {place}" for rank, place in sorted(watch.places.items()))
            + _others(reports)
        )
    if stuck:
        return LaunchError(f"launch({name}): {stuck}. Its processes are ended.{_others(reports)}")
    failures: dict[int, Any] = getattr(failed, "failures", {})
    if watch.left and (failures or failed is None) and all(box.rank(-1) not in failures for box in watch.left):
        return _early_exit(name, watch.left[0], reports)
    silent = {rank: one for rank, one in failures.items() if all(said.rank != rank for said in reports)}
    if silent:
        rank, failure = next(iter(silent.items()))
        what = _describe_exit(failure.exitcode, boxes[failure.local_rank].pid is not None)
        return LaunchError(
            f"launch({name}): rank {rank} (process {failure.pid}) {what}{_others(reports)}",
            rank=rank,
            exitcode=failure.exitcode,
        )
    if reports:
        first, *rest = reports
        code = failures[first.rank].exitcode if first.rank in failures else None
        return LaunchError(
            f"launch({name}): rank {first.rank} raised {first.kind}: {first.message}\n\n{first.text}{_others(rest)}",
            rank=first.rank,
            exitcode=code,
            child_traceback=first.text,
        )
    return LaunchError(f"launch({name}): the processes could not be run: {type(failed).__name__}: {failed}")


def _early_exit(name: str, box: ResultDir, reports: list[FailureReport]) -> LaunchError:
    """For a process with exit code 0, which the agent does not count as failed: it names the ones killed later."""
    rank = box.rank(-1)
    return LaunchError(
        f"launch({name}): rank {rank} (process {box.pid}) left with exit code 0 before its function had returned."
        f"{_others(reports)}",
        rank=rank,
        exitcode=0,
    )


def _describe_exit(exitcode: int, reached_fn: bool) -> str:
    if exitcode < 0:
        with suppress(ValueError):
            ended = f"was ended by {signal.Signals(-exitcode).name}."
            return ended + (" The system does that when memory runs out." if exitcode == -signal.SIGKILL else "")
        return f"was ended by signal {-exitcode}."
    if reached_fn:
        return f"left with exit code {exitcode}, past every exception handler."
    return (
        f"left with exit code {exitcode} before it reached the function; its output shows the error. Most often the "
        "script that calls launch() cannot be imported, or calls it outside of `if __name__ == '__main__':`."
    )


def _reports(boxes: list[ResultDir]) -> list[FailureReport]:
    return sorted((said for box in boxes if (said := box.report()) is not None), key=lambda said: said.when)


def _others(reports: list[FailureReport]) -> str:
    return "".join(f"\nrank {said.rank} raised {said.kind}: {said.message}" for said in reports)


def _is_alive(pid: int) -> bool:
    """Whether the process runs. An ended process that was not joined does not."""
    try:
        os.kill(pid, 0)
        with suppress(OSError):  # a system without /proc
            return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except ProcessLookupError:
        return False
    return True


def locate(boxes: list[ResultDir]) -> dict[int, str]:
    """Ask every process for its place in its code. One that does not answer soon is stopped, or still imports.

    The answer is written by a signal handler in C, so a process that holds the GIL answers too.
    """
    began = time.monotonic()
    asked = {box: began for box in boxes if (pid := box.pid) is not None and _ask(pid)}
    while any(box.place() is None for box in asked) and time.monotonic() - began < _ANSWER_S:
        time.sleep(0.02)
    time.sleep(0.05)  # an answer consists of several writes
    places = {}
    for rank, box in enumerate(boxes):
        place = box.place() if box in asked else None
        silent = "does not answer; it has ended or is stopped"
        places[box.rank(rank)] = place or (silent if box.pid is not None else "has not come to the function yet")
    return places


def _ask(pid: int) -> bool:
    with suppress(OSError):
        os.kill(pid, WHERE_SIGNAL)
        return True
    return False
