"""One rank: it runs a worker function, and the rank pool checks which state the function left."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import logging
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

_CHECKED_MODULES = re.compile(r"(trainstack|tests|tools)(\..*)?|torch\.distributed")
"""A worker function that replaces a global name in one of these leaves its process unfit for the next case."""


def load(function: str) -> Callable[..., Any]:
    """The function of "module:name"."""
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def work(function: Callable[..., Any], options: dict[str, Any], folder: Path) -> None:
    """Call the function and write the result to `folder`; returns when all ranks have come so far.

    Results go through files because gloo may abort a process at its end, when all work is done.
    """
    rank = os.environ["RANK"]
    result = function(**options)
    aside = folder / f"{rank}.tmp"
    aside.write_text(json.dumps(result))
    aside.replace(folder / f"{rank}.json")
    sys.stderr.flush()
    if dist.is_initialized() and not (isinstance(result, dict) and result.get("error")):
        dist.barrier()


def leave_group() -> None:
    """Destroy the process group, after the modules that still hold it."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.pop("GLOO_SOCKET_IFNAME", None)  # the layer sets it until the trainer closes
    sys.excepthook = sys.__excepthook__  # torch 2.13 replaces it whenever it makes a group


class RandomState:
    """The state of the three generators when a rank starts. Each case begins with it."""

    def __init__(self) -> None:
        self._python, self._numpy, self._torch = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def restore(self) -> None:
        """Set the generators to this state."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)


def state_of_process() -> dict[str, Any]:
    """Everything a case could leave behind for the next one."""
    state: dict[str, Any] = {
        "process group": dist.is_initialized(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "child processes": len(multiprocessing.active_children()),
        "working directory": os.getcwd(),
        "environment": dict(os.environ),
        "default dtype": torch.get_default_dtype(),
        "gradient mode": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "threads of torch": torch.get_num_threads(),
        "excepthook": sys.excepthook,
    }
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM):
        state[f"handler of {number.name}"] = signal.getsignal(number)
    for name in ("", "trainstack"):
        logger = logging.getLogger(name)
        state[f"logger {name!r}"] = (logger.level, logger.propagate, tuple(logger.handlers))
    for name, module in list(sys.modules.items()):
        if module is not None and _CHECKED_MODULES.fullmatch(name):
            state |= {f"{name}.{key}": value for key, value in vars(module).items() if not key.startswith("__")}
    return state


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names whose values have changed. A module that was imported in the meantime adds names and changes none."""
    return [name for name, value in before.items() if not _is_same(value, after.get(name))]


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and isinstance(one, (int, float, str, list, tuple, dict)) and bool(one == other)


def main() -> NoReturn:
    """`python -m tools.ranks.process FUNCTION OPTIONS FOLDER`, as a launcher starts it."""
    faulthandler.enable()
    function, options, folder = sys.argv[1:]
    work(load(function), json.loads(options), Path(folder))
    os._exit(0)


if __name__ == "__main__":
    main()
