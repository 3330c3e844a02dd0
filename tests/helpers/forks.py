"""Processes of a test, forked off one that has imported torch: half of what a short training costs is that import.

Standard input holds a JSON object a line: for each process its environment and the file for its errors, the arguments
they all get, and the seconds they may take. What ends later says where it is, and is killed. Their exit statuses are
printed, as a list.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from typing import Any

MODULE = "tests.helpers.workers"


class Forks:
    """The process that forks, seen from the tests."""

    def __init__(self, root: str) -> None:
        command = [sys.executable, "-W", "error", "-m", "tests.helpers.forks"]
        self._server = subprocess.Popen(
            command,
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._server.kill)

    def run(self, places: list[dict[str, Any]], arguments: list[str], timeout_s: float) -> list[int]:
        """Run `tests.helpers.workers` with `arguments` in each of `places`; their exit statuses."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps([places, arguments, timeout_s]) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, "the process that forks has ended"
        statuses: list[int] = json.loads(answer)
        return statuses


def main() -> None:
    """Serve until the input ends."""
    import torch._dynamo  # noqa: F401 - which optimizers import when they are made

    import tests.helpers.modules  # noqa: F401 - and with it trainstack

    for line in sys.stdin:
        places, arguments, timeout_s = json.loads(line)
        children = []
        for place in places:
            child = os.fork()
            if not child:
                enter(place, arguments)
                runpy.run_module(MODULE, run_name="__main__", alter_sys=True)
                return  # and exit as a module does, by its exit handlers
            children.append(child)
        print(json.dumps(statuses_of(children, timeout_s)), flush=True)


def enter(place: dict[str, Any], arguments: list[str]) -> None:
    """What the system does for a process that starts: an environment, arguments, streams of its own."""
    os.environ.clear()
    os.environ.update(place["environment"])
    sys.argv[1:] = arguments
    for number, name, mode in (
        (0, os.devnull, os.O_RDONLY),
        (1, os.devnull, os.O_WRONLY),
        (2, place["errors"], os.O_WRONLY | os.O_CREAT),
    ):
        os.dup2(os.open(name, mode), number)
    faulthandler.enable(2)


def statuses_of(children: list[int], timeout_s: float) -> list[int]:
    """Wait for all of them, and kill those that are late."""
    deadline, statuses, asked = time.monotonic() + timeout_s, dict[int, int](), set[int]()
    while len(statuses) < len(children):
        for child in children:
            ended, status = os.waitpid(child, os.WNOHANG) if child not in statuses else (0, 0)
            if ended:
                statuses[child] = os.waitstatus_to_exitcode(status)
            elif child not in statuses and time.monotonic() > deadline:
                os.kill(child, signal.SIGABRT if child not in asked else signal.SIGKILL)
                asked.add(child)
        if asked:
            time.sleep(1)
        time.sleep(0.005)
    return [statuses[child] for child in children]


if __name__ == "__main__":
    main()
