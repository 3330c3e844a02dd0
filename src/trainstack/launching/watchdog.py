"""Supervision of launched processes: time limits, first failure, termination."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainstack.errors import LaunchError
from trainstack.launching.worker import FailureReport, ResultDir, list_attempts

_logger = logging.getLogger("trainstack")


class WorkerWatchdog(threading.Thread):
    """Kills what still runs some time after one process has failed, ends all when the time is over, tells of restarts.

    torch's agent asks the others to stop and waits half a minute for those that cannot hear it, stuck in a collective.

    Args:
        name: of the function, for the log.
        run: the folder of the run.
        grace_s: from the first loss until the rest are killed.
        timeout_s: for the whole run.
    """

    def __init__(self, name: str, run: Path, grace_s: float, timeout_s: float | None) -> None:
        super().__init__(name="trainstack-launch-watch", daemon=True)
        self.expired = False
        self._name, self._run, self._grace_s = name, run, grace_s
        self._starts = 1
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._lost: dict[Path, float] = {}
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.1):
            self._poll()

    def stop(self) -> None:
        """Look no more."""
        self._done.set()
        self.join()

    def kill(self) -> None:
        """End every process of the newest start."""
        self._send(signal.SIGKILL)

    def _poll(self) -> None:
        starts = self._attempts()
        now, boxes = time.monotonic(), starts[-1] if starts else []
        if len(starts) > self._starts:
            self._starts = len(starts)
            said = _others(_reports(starts[-2])) or " A process ended without a word."
            _logger.warning("launch(%s): restart %d.%s", self._name, len(starts) - 1, said)
        if self._deadline is not None and now > self._deadline and not self.expired:
            self.expired = True
            (self._run / "expired").touch()
            self._send(signal.SIGTERM)
        lost = any((pid := box.pid) is not None and not box.has_result and not _is_alive(pid) for box in boxes)
        if lost or (self.expired and boxes):
            since = self._lost.setdefault(boxes[0].path.parent, now)
            if now - since > self._grace_s:
                self.kill()

    def _attempts(self) -> list[list[ResultDir]]:
        try:
            return list_attempts(self._run)
        except OSError:  # the agent is just making or clearing one
            return []

    def _send(self, number: int) -> None:
        for pid in [pid for boxes in self._attempts()[-1:] for box in boxes if (pid := box.pid) is not None]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def launch_error(name: str, run: Path, failed: Exception | None, timeout_s: float | None) -> LaunchError:
    """Say which process failed first and why.

    A process that died without a word is the cause of what the others report. Else the earliest report is.
    """
    boxes = (list_attempts(run) or [[]])[-1]
    reports = _reports(boxes)
    if timeout_s is not None:
        return LaunchError(
            f"launch({name}) was still running after timeout_s={timeout_s:g}; its processes are ended."
            + _others(reports)
        )
    failures: dict[int, Any] = getattr(failed, "failures", {})
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


def _describe_exit(exitcode: int, reached_fn: bool) -> str:
    if exitcode < 0:
        with suppress(ValueError):
            ended = f"was ended by {signal.Signals(-exitcode).name}."
            return ended + (" The system does that when memory runs out." if exitcode == -signal.SIGKILL else "")
        return f"was ended by signal {-exitcode}."
    if reached_fn:
        return f"left with exit code {exitcode}, past every exception handler."
    return (
        f"left with exit code {exitcode} before it came to the function; its output shows the error. Most often the "
        "script that calls launch() cannot be imported, or calls it outside of `if __name__ == '__main__':`."
    )


def _reports(boxes: list[ResultDir]) -> list[FailureReport]:
    return sorted((said for box in boxes if (said := box.report()) is not None), key=lambda said: said.when)


def _others(reports: list[FailureReport]) -> str:
    return "".join(f"\nrank {said.rank} raised {said.kind}: {said.message}" for said in reports)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
