"""`launch(fn, nproc=2)` runs a function in several processes of this machine.

torch's elastic agent, on which torchrun is based, starts, observes and restarts them. This module adds results and
failures that do not depend on exit codes, timeouts that are kept, and a complete cleanup.
"""

from __future__ import annotations

import logging
import math
import os
import random
import secrets
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from trainstack._store import TOKEN
from trainstack.errors import LaunchError
from trainstack.launching.agent import AgentThread
from trainstack.launching.loopback import register_loopback_rendezvous
from trainstack.launching.options import LaunchOptions, check_not_in_worker, check_options, pickle_call
from trainstack.launching.watchdog import WorkerWatchdog, launch_error
from trainstack.launching.worker import MONITOR_S, finished_attempt

T = TypeVar("T")

_LOOK_S = 0.1
_HEARS_S = 2.0
"""After this time the processes get a signal directly, because the agent waits in C and has not forwarded it."""

_STORE_S = 60.0
"""The timeout of one request of the agent to the rendezvous store, which has none in torch."""

_SPARE_S = 30.0
"""Time for the agent to notice the end of its processes, on a busy machine."""

_LOGS_OF_FAILURE = ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn")


def launch(
    fn: Callable[..., T],
    *args: Any,
    nproc: int | None = None,
    nnodes: str | int = "1",
    node_rank: int | None = None,
    rdzv_endpoint: str | None = None,
    max_restarts: int = 0,
    rank_output: str | os.PathLike[str] = "only_error",
    timeout_s: float | None = None,
    grace_s: float = 10.0,
    env: Mapping[str, str] | None = None,
) -> list[T]:
    """Call `fn(*args)` in `nproc` new processes that find each other as under torchrun, and wait for them.

    `fn`, `args` and the results of `fn` are pickled. So `fn` is a function of a module or of the script itself, and a
    script calls `launch` below `if __name__ == "__main__":`. From a notebook, import `fn` from a file.

    Args:
        fn: the function to run in each process.
        args: its arguments, the same for every process.
        nproc: processes on this machine; by default one for each accelerator.
        nnodes: machines: `"2"`, or `"1:4"` to continue with any number from 1 to 4. Call `launch` on each of them.
        node_rank: 0 on the machine that `rdzv_endpoint` names, another number elsewhere; by default it is detected. The
            machines assign the ranks among themselves.
        rdzv_endpoint: `"host:port"` of the rendezvous of several machines; on one machine a free port is found.
        max_restarts: the number of restarts of all processes after one has failed.
        rank_output: the visible output of processes other than the first of this machine: `"only_error"` (stderr),
            `"all"` or `"ignore"`. Another value is the path of a folder, such as `"logs"`, which gets
            `{rank}_std.log` and `{rank}_err.log` of every process instead.
        timeout_s: seconds after which all processes are ended, if they are still running.
        grace_s: seconds for processes to save and end, after one has failed or a signal has arrived, until they are
            killed.
        env: variables to set in the processes.

    Returns:
        The results of `fn`, one for each process of this machine, by rank.

    Raises:
        ConfigurationError: an argument is wrong, or `fn` cannot be pickled.
        LaunchError: a process failed; it names the rank and contains the traceback.

    Examples:
        >>> if __name__ == "__main__":
        ...     results = ts.launch(print, "trained", nproc=2)
        trained
    """
    check_not_in_worker("launch()")
    order = check_options(nproc, nnodes, node_rank, rdzv_endpoint, max_restarts, rank_output, timeout_s, grace_s, env)
    call, name = pickle_call(fn, args, "launch"), getattr(fn, "__qualname__", repr(fn))
    with _run_environment(order) as run:
        stopped = _run(call, name, order, run)
        boxes = finished_attempt(run, order.nproc) if stopped is None else None
        results = [box.result() for box in boxes or ()]
    if stopped is not None:  # the caller's handlers are restored, so they can handle the signal
        signal.raise_signal(stopped)
        raise LaunchError(f"launch({name}) was stopped by {signal.Signals(stopped).name}; its processes are ended.")
    return results


def _run(call: bytes, name: str, order: LaunchOptions, run: Path) -> int | None:
    """Run the agent to the end. Returns the number of a signal that stopped it, or None."""
    from torch.distributed.elastic.multiprocessing import SignalException

    agent = AgentThread(_config(order, run), call, order.output)
    watch = WorkerWatchdog(name, run, order.grace_s, order.timeout_s, agent.worker_pids)
    with _taken_signals() as asked:
        watch.start()
        agent.start()
        try:
            stuck = _wait(agent, watch, order, asked)
        finally:
            watch.stop()
            if agent.is_alive():
                watch.end()
    if asked or isinstance(agent.error, SignalException):
        return asked[0] if asked else int(agent.error.sigval)  # type: ignore[union-attr]
    if finished_attempt(run, order.nproc) is None:
        expired = order.timeout_s if watch.expired else None
        raise launch_error(name, run, agent.error, expired, watch, stuck) from None
    return None


def _wait(agent: AgentThread, watch: WorkerWatchdog, order: LaunchOptions, asked: list[int]) -> str:
    """Wait for the agent, forward a signal to it, and abandon it if it is stuck. Returns the reason, otherwise ""."""
    patience = Patience()
    while agent.is_alive():
        agent.join(_LOOK_S)
        if asked and patience.since("asked", True) == 0:
            agent.interrupt(asked[0])
        if asked and patience.since("asked", True) > _HEARS_S and not agent.is_ending_workers:
            watch.send_once(asked[0])
        if patience.since("ending", agent.is_ending_workers) > order.grace_s:
            watch.kill()
        if agent.seconds_in_store() > _STORE_S:
            return f"the rendezvous at {order.endpoint} does not answer: its host is down or disconnected"
        if patience.since("asked", bool(asked)) > order.grace_s + _SPARE_S:
            return "the agent did not end its processes"
        if patience.since("expired", watch.expired) > order.grace_s + _SPARE_S:
            return "the agent did not end its processes"
        if patience.since("gone", watch.all_gone and not agent.waits_for_hosts) > _SPARE_S:
            return "all processes have ended, and the agent did not notice"
    return ""


class Patience:
    """Measures for how long conditions have been true without interruption."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def since(self, name: str, is_true: bool) -> float:
        """Seconds since the condition `name` was first seen to be true; 0 at the first time, and if it is not true."""
        if not is_true:
            self._since.pop(name, None)
            return 0.0
        return time.monotonic() - self._since.setdefault(name, time.monotonic())


@contextmanager
def _taken_signals() -> Iterator[list[int]]:
    """A block that collects signals for the processes in the list. The handlers are restored afterwards."""
    asked: list[int] = []
    handlers = _handlers()
    for number in handlers:
        signal.signal(number, lambda number, frame: asked.append(number))
    try:
        yield asked
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _config(order: LaunchOptions, run: Path) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    meeting: dict[str, Any] = {} if order.is_host is None else {"is_host": order.is_host}
    if order.timeout_s is not None:
        meeting["join_timeout"] = math.ceil(order.timeout_s)
        # 60 s is torch's value; the agent waits up to twice this time for a host that does not come
        meeting["read_timeout"] = min(60, meeting["join_timeout"])
    newer: dict[str, Any] = {}
    if "shutdown_timeout" in LaunchConfig.__dataclass_fields__:  # newer than torch 2.10
        newer["shutdown_timeout"] = math.ceil(order.grace_s)
    return LaunchConfig(
        min_nodes=order.min_nodes,
        max_nodes=order.max_nodes,
        nproc_per_node=order.nproc,
        logs_specs=DefaultLogsSpecs(log_dir=str(run)),
        run_id=uuid.uuid4().hex if order.max_nodes == 1 else "trainstack",
        rdzv_backend="c10d" if order.max_nodes > 1 else register_loopback_rendezvous(),
        rdzv_endpoint=order.endpoint,
        rdzv_configs=meeting,
        max_restarts=order.max_restarts,
        monitor_interval=MONITOR_S,
        start_method="spawn",
        local_addr=order.local_addr,
        **newer,
    )


@contextmanager
def _run_environment(order: LaunchOptions) -> Iterator[Path]:
    """A folder for the run and the variables of its processes. Afterwards everything is restored.

    The variables are set here because a new process reads OMP_NUM_THREADS when it imports torch, before it gets
    anything else. The agent draws from `random` and sets another variable, so both are restored.
    """
    made = dict(order.env)
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        made.setdefault("OMP_NUM_THREADS", str(max(1, cores // order.nproc)))
    made.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(order.grace_s)))  # a trainer reads it
    # The agent's store would keep the addresses of ended processes, for which the new ones would wait. With several
    # machines, a later agent would wait for an address that is written in the first round only (torch 2.13.0).
    if order.may_restart or order.max_nodes > 1:
        made.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if order.max_nodes == 1:
        made.setdefault(TOKEN, secrets.token_hex(16))  # a process without it is refused at the rendezvous
    before = {name: os.environ.get(name) for name in (*made, "TORCHELASTIC_SIGNALS_TO_HANDLE")}
    drawn = random.getstate()
    run = Path(tempfile.mkdtemp(prefix="trainstack-launch-"))
    quiet = [logging.getLogger(name) for name in _LOGS_OF_FAILURE]
    for logger in quiet:  # LaunchError has all of it, and torch's formatter would import its compiler, for seconds
        logger.addFilter(_nothing)
    try:
        os.environ.update(made)
        yield run
    finally:
        for logger in quiet:
            logger.removeFilter(_nothing)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        random.setstate(drawn)
        shutil.rmtree(run, ignore_errors=True)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def _handlers() -> dict[int, Any]:
    """The handlers of this process for the signals that are forwarded. Only the main thread can change them.

    An ignored signal remains ignored. SIGUSR1, which schedulers send before a time limit, is forwarded if it would end
    this process.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
    found = {number: signal.getsignal(number) for name in names if (number := getattr(signal, name, None)) is not None}
    if found.get(getattr(signal, "SIGUSR1", 0), signal.SIG_DFL) != signal.SIG_DFL:
        del found[signal.SIGUSR1]
    return {number: handler for number, handler in found.items() if handler not in (None, signal.SIG_IGN)}
