"""Run a part of a test in separate processes, which are forks of a server that has imported the trainer."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.conformance.adapter import NotOfferedError, load

ROOT = Path(__file__).resolve().parents[2]
NOT_OFFERED = "__not_offered__"


class ProcessFailedError(Exception):
    """A process ended without a result; `signal` is the signal that ended it, or None."""

    def __init__(self, text: str, signal: int | None = None) -> None:
        super().__init__(text)
        self.signal = signal


def in_processes(count: int, trainer: str, part: str, timeout: float = 90.0, **options: Any) -> list[Any]:
    """Run `part`, a "module:function" of `cases/`, in `count` processes that form a world; returns the results by rank.

    Raises:
        NotOfferedError: a process raised it.
        ProcessFailedError: a process ended without a result; the message has the end of its output.
    """
    context = multiprocessing.get_context("forkserver")
    # The first optimizer of a process imports torch._dynamo.
    context.set_forkserver_preload([f"tools.conformance.adapters.{trainer}", "torch._dynamo"])
    with tempfile.TemporaryDirectory() as folder:
        answers = [Path(folder) / f"{rank}.json" for rank in range(count)]
        port = _free_port()
        places = [_place(rank, count, port) for rank in range(count)]
        children = [
            context.Process(target=_child, args=(trainer, part, options, answer, place), daemon=True)
            for answer, place in zip(answers, places, strict=True)
        ]
        for child in children:
            child.start()
        try:
            for child in children:
                child.join(timeout)
            if any(child.is_alive() for child in children):
                raise ProcessFailedError(f"hangs for {timeout:.0f} s")
        finally:
            for child in children:
                child.kill()
                child.join()
        return [_answer(child.exitcode or 0, answer) for child, answer in zip(children, answers, strict=True)]


def _answer(code: int, answer: Path) -> Any:
    if not answer.exists():
        said = answer.with_suffix(".log").read_text(errors="replace").split("\n")
        text = " ".join(" ".join(said[-4:]).split())[-200:]
        raise ProcessFailedError(f"ended with {code}: {text}", -code if code < 0 else None)
    result = json.loads(answer.read_text())
    if isinstance(result, dict) and NOT_OFFERED in result:
        raise NotOfferedError(result[NOT_OFFERED])
    return result


def _place(rank: int, count: int, port: int) -> dict[str, str]:
    """The variables of torchrun for a process; empty for a single process."""
    if count == 1:
        return {}
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": 0}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "conformance"}
    return {name: str(value) for name, value in place.items()}


def _free_port() -> int:
    """A free port of the loopback interface."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _child(trainer: str, part: str, options: Mapping[str, Any], answer: Path, place: Mapping[str, str]) -> None:
    """The work of a process. `os._exit` ends it, because gloo may abort a process that exits normally."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    log = os.open(answer.with_suffix(".log"), os.O_CREAT | os.O_WRONLY, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(place)
    module, function = part.split(":")
    run = getattr(importlib.import_module(f"tools.conformance.cases.{module}"), function)
    try:
        result = run(load(trainer), **options)
    except NotOfferedError as error:
        result = {NOT_OFFERED: str(error)}
    answer.write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)
