"""torch's elastic agent in a thread, where it can be observed, interrupted and abandoned.

The agent may wait without limit: a request to the rendezvous store of a lost host has no timeout, and neither has the
event by which it releases its processes if one of them is killed at that moment (torch 2.13.0, `MultiprocessContext`).
In the main thread not even a signal could end such a wait.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from trainstack.launching.worker import work

_STORE = ("_call_store", "num_nodes_waiting")
"""Functions of the agent that make requests to the rendezvous store (torch 2.13.0)."""

_WAITS_FOR_HOSTS = ("_exit_barrier", "_rendezvous", "shutdown")
"""Functions of the agent that wait for other machines, with timeouts (torch 2.13.0). Its processes may have ended."""


_ENDS_WORKERS = ("_close", "_join_procs_with_timeout")
"""Functions that have sent SIGTERM to the processes, and wait up to 30 s before SIGKILL (torch 2.13.0)."""


class AgentThread(threading.Thread):
    """Runs the agent, which starts, observes and restarts the processes.

    Args:
        config: a `LaunchConfig` of torch.
        call: the pickled function with its arguments.
        output: the streams of the processes that are shown.

    Attributes:
        error: the exception of the agent; None if it succeeded, or has not ended.
    """

    def __init__(self, config: Any, call: bytes, output: str) -> None:
        super().__init__(name="trainstack-launch-agent", daemon=True)
        self.error: BaseException | None = None
        self._config, self._call, self._output = config, call, output
        self._call_seen: tuple[int, float] | None = None

    def run(self) -> None:
        from torch.distributed.launcher.api import elastic_launch

        try:
            elastic_launch(self._config, work)(self._call, self._output)
        except BaseException as error:
            self.error = error

    def interrupt(self, number: int) -> None:
        """Make the agent forward the signal to its processes and end, as if it had received the signal."""
        from torch.distributed.elastic.multiprocessing import SignalException

        def init(error: SignalException) -> None:
            SignalException.__init__(error, f"launch() got {stopped.name}", stopped)

        stopped = signal.Signals(number)
        raised = type("Interrupted", (SignalException,), {"__init__": init})  # CPython calls it without arguments
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), ctypes.py_object(raised))

    def seconds_in_store(self) -> float:
        """Seconds since the current request of the agent to the rendezvous store was first seen by this method."""
        frame = next((frame for frame in self._frames() if frame.f_code.co_name in _STORE), None)
        now = time.monotonic()
        if frame is None:
            self._call_seen = None
            return 0.0
        if self._call_seen is None or self._call_seen[0] != id(frame):
            self._call_seen = (id(frame), now)
        return now - self._call_seen[1]

    @property
    def waits_for_hosts(self) -> bool:
        """Whether the agent waits for the agents of other machines."""
        return any(frame.f_code.co_name in _WAITS_FOR_HOSTS for frame in self._frames())

    @property
    def is_ending_workers(self) -> bool:
        """Whether the agent has sent its processes a signal and waits for their end."""
        return any(frame.f_code.co_name in _ENDS_WORKERS for frame in self._frames())

    def worker_pids(self) -> set[int]:
        """The running processes, including those that still import the script; empty if the agent has ended.

        The agent keeps them in a private attribute (torch 2.13.0). It is read from the stack, because torch makes the
        agent internally. Processes are not joined here: the agent does that, and a second join would remove their exit
        codes.
        """
        for frame in self._frames():
            context = getattr(frame.f_locals.get("self"), "_pcontext", None)
            processes = getattr(getattr(context, "_pc", None), "processes", None)
            if processes is not None:
                popens = [process._popen for process in processes]
                return {popen.pid for popen in popens if popen is not None and popen.returncode is None}
        return set()

    def _frames(self) -> list[FrameType]:
        frame, found = sys._current_frames().get(self.ident or 0), []
        while frame is not None:
            found.append(frame)
            frame = frame.f_back
        return found
