"""`RankPool`: one server forks ranks and keeps them for the next case.

The server has imported torch, so a rank starts in a fraction of a second. A rank that ran a case runs the next one of
the same world size, unless the case failed, came late or left something behind: then all ranks of this world are
replaced. Cases that ask for fresh ranks get new ones, which end with the case.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_POLL_S = 0.005


class RankPool:
    """The server, seen from tests and tools.

    Args:
        root: the working directory of the ranks.
        preload: modules that the server imports, so that ranks need not.

    Attributes:
        left: why ranks were replaced, one list of names a case.
    """

    def __init__(self, root: Path, preload: Sequence[str] = ()) -> None:
        self.left: list[list[str]] = []
        self._jobs = 0
        self._server = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tools.ranks.pool", *preload],
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._server.kill)

    def run(self, job: dict[str, Any]) -> list[int]:
        """Run one case; the exit statuses of its ranks, 0 for ranks that are kept.

        Args:
            job: "function" ("module:name"), "options", "folder" for results, "places" (environment and file for stderr
                of each rank), "timeout_s" for the whole case, "fresh" for new ranks.
        """
        self.start(job)
        return self.finish()

    def start(self, job: dict[str, Any]) -> None:
        """Begin a case; nothing else may begin before `finish`."""
        assert self._server.stdin is not None
        self._jobs += 1
        self._server.stdin.write(json.dumps({**job, "number": self._jobs}) + "\n")
        self._server.stdin.flush()

    def finish(self) -> list[int]:
        """Wait for the case that was started; returns the result of `run`."""
        assert self._server.stdout is not None
        answer: dict[str, Any] = {"number": 0}
        while answer["number"] != self._jobs:  # an interrupted test has not read its answer
            line = self._server.stdout.readline()
            assert line, "the server of the rank pool has ended"
            answer = json.loads(line)
        if answer["left"]:
            self.left.append(answer["left"])
        statuses: list[int] = answer["statuses"]
        return statuses


def world_environment(size: int, port: int) -> list[dict[str, str]]:
    """The environment of each of `size` ranks on this machine."""
    world = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


class _Rank:
    """A forked process and the socket on which it takes jobs."""

    def __init__(self, others: list[_Rank]) -> None:
        self.channel, theirs = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            # A copy of another rank's socket would hide from that rank that the server has ended.
            for rank in [*others, self]:
                rank.channel.close()
            _serve_jobs(theirs)
        theirs.close()
        self.channel.setblocking(False)
        self.status: int | None = None
        self.said = ""

    def send(self, message: Any) -> None:
        with suppress(BrokenPipeError):
            self.channel.sendall((json.dumps(message) + "\n").encode())

    def hears(self) -> str | None:
        """The next line of the rank, if there is one."""
        with suppress(BlockingIOError, ConnectionResetError):
            self.said += self.channel.recv(65536).decode()
        line, newline, rest = self.said.partition("\n")
        if not newline:
            return None
        self.said = rest
        return line

    def has_ended(self) -> bool:
        if self.status is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if ended else None
        return self.status is not None


class _Server:
    def __init__(self) -> None:
        self._kept: dict[int, tuple[str, list[_Rank]]] = {}

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        ranks = self._ranks(job)
        for rank, place in zip(ranks, job["places"], strict=True):
            rank.send({**job, **place})
        deadline = time.monotonic() + job["timeout_s"]
        _answers(ranks, deadline)  # all have imported the function, so that no rank begins long before another
        for rank in ranks:
            rank.send("go")
        answers = _answers(ranks, deadline)
        left = sorted({name for answer in answers if answer for name in json.loads(answer)})
        if job["fresh"] or left or any(answer is None for answer in answers):
            self._kept = {size: kept for size, kept in self._kept.items() if kept[1] is not ranks}
            _end(ranks)
        statuses = [0 if answer is not None else rank.status for rank, answer in zip(ranks, answers, strict=True)]
        return {"number": job["number"], "statuses": statuses, "left": left}

    def _ranks(self, job: dict[str, Any]) -> list[_Rank]:
        """Kept ranks, or new ones. Rank 0 keeps its store, and so its port; each group takes another prefix."""
        size, port = len(job["places"]), job["places"][0]["environment"]["MASTER_PORT"]
        if not job["fresh"] and size in self._kept:
            port, ranks = self._kept[size]
            for place in job["places"]:
                place["environment"]["MASTER_PORT"] = port
            return ranks
        ranks = []
        for _ in range(size):
            ranks.append(_Rank([*ranks, *(rank for _, kept in self._kept.values() for rank in kept)]))
        if not job["fresh"]:
            self._kept[size] = (port, ranks)
        return ranks


def _answers(ranks: list[_Rank], deadline: float) -> list[str | None]:
    """The next line of each rank; None for one that has ended instead. Late ranks print a traceback and are killed."""
    answers: list[str | None] = [None] * len(ranks)
    asked = 0
    while True:
        waiting = False
        for number, rank in enumerate(ranks):
            if answers[number] is None:
                ended = rank.has_ended()  # before the last look at the socket
                answers[number] = rank.hears()
                waiting |= answers[number] is None and not ended
        if not waiting:
            return answers
        if time.monotonic() > deadline:
            for rank, answer in zip(ranks, answers, strict=True):
                if answer is None and not rank.has_ended():
                    os.kill(rank.pid, signal.SIGKILL if asked else signal.SIGABRT)
            asked, deadline = asked + 1, time.monotonic() + 1.0
        time.sleep(_POLL_S)


def _end(ranks: list[_Rank]) -> None:
    """Close the sockets, upon which ranks end, and kill those that do not."""
    for rank in ranks:
        rank.channel.close()
    deadline = time.monotonic() + 5
    while alive := [rank for rank in ranks if not rank.has_ended()]:
        if time.monotonic() > deadline:
            for rank in alive:
                os.kill(rank.pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _serve_jobs(channel: socket.socket) -> None:
    """The work of a rank: one job after the other, until the server closes the socket."""
    from tools.ranks import process as rank_process

    random_state = rank_process.RandomState()
    home = os.getcwd()
    lines = channel.makefile("r")
    for line in lines:
        job = json.loads(line)
        _enter(job)
        os.chdir(home)
        random_state.restore()
        function = rank_process.load(job["function"])
        gc.freeze()  # a collection then looks at the objects of this case only, not at all of torch
        before = rank_process.state_of_process()
        channel.sendall(b"ready\n")
        lines.readline()
        rank_process.work(function, job["options"], Path(job["folder"]))
        if job["fresh"]:
            channel.sendall(b"[]\n")
            os._exit(0)
        rank_process.leave_group()
        left = rank_process.differences(before, rank_process.state_of_process())
        channel.sendall((json.dumps(left) + "\n").encode())
    os._exit(0)


def _enter(job: dict[str, Any]) -> None:
    """Take the environment of this case, and its file for stderr."""
    os.environ.clear()
    os.environ.update(job["environment"])
    for number, name, mode in (
        (0, os.devnull, os.O_RDONLY),
        (1, os.devnull, os.O_WRONLY),
        (2, job["errors"], os.O_WRONLY | os.O_CREAT),
    ):
        descriptor = os.open(name, mode)
        os.dup2(descriptor, number)
        os.close(descriptor)
    faulthandler.enable(2)


def main() -> None:
    """Serve until the input ends; the arguments name modules to import first."""
    import torch._dynamo  # noqa: F401 - which optimizers import when they are made

    import tools.ranks.process  # noqa: F401

    for name in sys.argv[1:]:
        importlib.import_module(name)
    server = _Server()
    for line in sys.stdin:
        print(json.dumps(server.run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
