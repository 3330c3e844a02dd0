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
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.helpers.patience import patience
from tools.ranks.pool import RankPool, world_environment
from tools.ranks.process import load, work

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
    """The same through `torch.distributed.run` on several nodes: one agent a node, which meet over c10d on loopback.

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


def run_agent(size: int, function: Callable[..., Any], *extra: str, timeout: float = 60.0, **options: Any) -> list[Any]:
    """The same through `torch.distributed.run` on one node. Agent and ranks are forked, so they import no torch."""
    import torch._dynamo  # noqa: F401 - which optimizers import when they are made
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, get_args_parser

    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder) / "agent.stderr"
        arguments = [f"--nproc-per-node={size}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
        arguments += ["--rdzv-conf=is_host=1", *extra, "--start-method=fork", "unused"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: other threads are not forked
            agent = os.fork()
        if not agent:
            try:
                warnings.simplefilter("ignore", DeprecationWarning)
                for number, target, mode in ((1, os.devnull, os.O_WRONLY), (2, str(errors), os.O_WRONLY | os.O_CREAT)):
                    os.dup2(os.open(target, mode), number)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                os.chdir(ROOT)
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL)
                config = config_from_args(get_args_parser().parse_args(arguments))[0]
                elastic_launch(config, work_as_rank)(name_of(function), options, Path(folder))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(1)
        deadline = time.monotonic() + patience(timeout)
        while os.waitpid(agent, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(agent, signal.SIGKILL)
            time.sleep(0.01)
        answers = [Path(folder) / f"{rank}.json" for rank in range(size)]
        missing = [answer.name for answer in answers if not answer.exists()]
        assert not missing, f"no {missing}:\n{errors.read_text()[-6000:]}"
        return [json.loads(answer.read_text()) for answer in answers]


def work_as_rank(function: str, options: dict[str, Any], folder: Path) -> None:
    """In a rank that was forked from an agent: modules that note the rank are imported again."""
    for name in [name for name in sys.modules if name.startswith("tests.helpers.workers")]:
        del sys.modules[name]
    work(load(function), options, folder)


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
        fresh: use new ranks, and end them; for cases that kill ranks or leave them in a bad state. Other cases run in
            the ranks of the pool.
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
