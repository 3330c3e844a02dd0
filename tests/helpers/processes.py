"""Call one function in several ranks, and read the result of each."""

from __future__ import annotations

import functools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.helpers.patience import patience
from tools.ranks.pool import RankPool, world_environment

ROOT = Path(__file__).resolve().parents[2]


def hears_ctrl_c() -> None:
    """For `preexec_fn`: a shell starts background processes, and all below them, with Ctrl-C ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def free_port() -> int:
    """A free port of the loopback interface.

    It is below the ports that systems give to connections, and each worker of pytest has its own range. Else a
    port that is free now could be another world's by the time of its use, and the two would mix.
    """
    low = 20_000 + 1000 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 12)
    while True:
        port = low + secrets.randbelow(1000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def run_agents(
    nodes: int,
    per_node: int,
    function: Callable[..., Any],
    *extra: str,
    timeout: float = 60.0,
    elastic: bool = False,
    **options: Any,
) -> list[Any]:
    """The same through `torch.distributed.run`: one agent a node, which meet over c10d on the loopback interface.

    With `elastic` the run may continue with fewer nodes, the last node kills itself, and only rank 0 has to answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={1 if elastic else nodes}:{nodes}",
            f"--nproc-per-node={per_node}",
        ]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=test", *extra]
        command += ["-m", "tools.ranks.process", name_of(function), json.dumps(options), folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        agents = []
        for node in range(nodes):
            conf = f"--rdzv-conf=is_host={int(node == 0)},last_call_timeout=3,keep_alive_interval=1"
            dies = {"TRAINSTACK_TEST_DIES": "1"} if elastic and node == nodes - 1 else {}
            mine = [*command[:5], conf, *command[5:]]
            agents.append(
                subprocess.Popen(
                    mine, cwd=ROOT, env={**environment, **dies}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
                )
            )
        try:
            errors = [agent.communicate(timeout=patience(timeout))[1].decode() for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
        answers = [Path(folder) / f"{rank}.json" for rank in range(1 if elastic else nodes * per_node)]
        missing = [answer.name for answer in answers if not answer.exists()]
        assert not missing, f"no {missing}:\n" + "\n".join(error[-3000:] for error in errors)
        return [json.loads(answer.read_text()) for answer in answers]


def run_world(
    size: int,
    function: Callable[..., Any],
    *,
    timeout: float = 30.0,
    fresh: bool = False,
    may_fail: bool = False,
    **options: Any,
) -> list[Any]:
    """Call a function of `tests.helpers.workers` in `size` ranks; returns the result of each rank.

    Args:
        size: the number of ranks.
        function: it takes and returns JSON values, and is found by its module and its name.
        timeout: in seconds, on an idle machine.
        fresh: use new ranks, and end them; for cases that kill ranks or leave them in a bad state.
            Other cases run in the ranks of the pool.
        may_fail: a rank that raises or dies gives a dict with its exit status and the end of its stderr.
        options: of the function.
    """
    with tempfile.TemporaryDirectory() as folder:
        errors = [Path(folder) / f"{rank}.stderr" for rank in range(size)]
        statuses = rank_pool().run(
            {
                "function": name_of(function),
                "options": options,
                "folder": folder,
                "places": [
                    {"environment": environment, "errors": str(path)}
                    for environment, path in zip(world_environment(size, free_port()), errors, strict=True)
                ],
                "timeout_s": patience(timeout),
                "fresh": fresh,
            }
        )
        results = []
        for rank, status in enumerate(statuses):
            answer = Path(folder) / f"{rank}.json"
            error = errors[rank].read_text(errors="replace")
            if answer.exists():
                results.append(json.loads(answer.read_text()))
            elif may_fail:
                results.append({"exit": status, "stderr": error[-6000:]})
            else:
                said = "\n".join(
                    f"rank {r}: {path.read_text(errors='replace')[-4000:]}" for r, path in enumerate(errors)
                )
                raise AssertionError(f"rank {rank} ended with {status}:\n{said}")
        return results


def name_of(function: Callable[..., Any]) -> str:
    """ "module:name", by which another process finds the function."""
    return f"{function.__module__}:{function.__qualname__}"


@functools.cache
def rank_pool() -> RankPool:
    """The pool of this process: pytest-xdist has one for each of its workers."""
    return RankPool(ROOT, ["tests.helpers.modules"])
