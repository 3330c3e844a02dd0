"""Loader workers ignore signals, and end after the pass, with their loader or with their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection, forkserver, resource_tracker
from typing import Any

from trainstack.errors import annotate

LOOK_S = 5.0
"""Seconds between two checks of a worker's parent. They are needed if siblings hold the parent's pipe open; torch uses
the same interval (`MP_STATUS_CHECK_INTERVAL`)."""
EXIT_WAIT_S = 1.0
"""Seconds to wait for the exit code of a worker whose pipe has closed. It normally follows within milliseconds."""

_GROUP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")


def group_signals() -> list[signal.Signals]:
    """The signals that terminals, launchers and schedulers send to whole groups of processes."""
    return [getattr(signal, name) for name in _GROUP_SIGNALS if hasattr(signal, name)]


@contextmanager
def signals_wait(context: Any) -> Iterator[None]:
    """A block in which started processes begin with these signals blocked. This process gets the signals after it.

    A spawned worker has no handler until Python has started in it, so a signal would kill it in its first seconds.

    Args:
        context: the `multiprocessing` context in which the processes start; None for the default one.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    method = (context or multiprocessing).get_start_method()
    if method != "fork":
        resource_tracker.ensure_running()  # a later start would unblock SIGTERM and SIGINT (Python 3.11)
    if method == "forkserver":
        forkserver.ensure_running()  # a later start would pass the mask to all processes that it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, group_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """In a worker, ignore signals to the whole group, so that the parent can finish its step."""
    for number in group_signals():
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, group_signals())


def end_with_parent() -> None:
    """In a worker, end the process as soon as the parent has ended, also if it ended before this call.

    torch 2.13.0 compares the parent's id with the id that it reads when the worker has started. If the parent dies
    during the start, that is already the id of init, and the worker would run forever.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    watch = threading.Thread(target=_watch, args=(parent.sentinel, os.getppid()), name="parent", daemon=True)
    watch.start()


def _watch(sentinel: int, parent: int) -> None:
    while not connection.wait([sentinel], LOOK_S):
        if os.getppid() != parent:
            break
    os._exit(1)  # without clean-up, which could block; nothing uses the worker any more


def end_workers(iterator: Any, shut_down: Callable[[], None]) -> None:
    """Let torch end the workers of `iterator`, and kill those that still run.

    torch sends a SIGTERM to a worker that does not end within seconds, and workers ignore that signal.
    """
    try:
        shut_down()
    finally:
        for worker in getattr(iterator, "_workers", ()):  # private, checked on torch 2.13.0
            if worker.is_alive():
                worker.kill()


def explain_death(error: BaseException, iterator: Any) -> None:
    """Add a note to `error`, raised by the iterator of a loader, if a worker has died.

    The error of torch may be only a consequence, such as a ConnectionResetError without a text.
    """
    for worker in getattr(iterator, "_workers", ()):  # private, checked on torch 2.13.0
        if isinstance(error, EOFError | OSError):  # the pipe closes before the process ends
            worker.join(EXIT_WAIT_S)
        code = worker.exitcode
        if code == -signal.SIGKILL:
            annotate(
                error,
                f"a loader worker (pid {worker.pid}) was ended by SIGKILL, probably by the out-of-memory killer of the "
                "system: look for the pid in `dmesg`, or at the memory limit of the container or the job. Fewer "
                "workers (num_workers), a smaller prefetch_factor, or samples that are read from files need less "
                "memory.",
            )
        elif code is not None and code < 0:
            annotate(error, f"a loader worker (pid {worker.pid}) was ended by signal {-code}.")
        elif code:
            annotate(error, f"a loader worker (pid {worker.pid}) ended with exit code {code}.")
