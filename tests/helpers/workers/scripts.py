"""A program in a fork of the rank pool's server."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import warnings
from pathlib import Path


def run_program(arguments: list[str], folder: str, cwd: str, environment: dict[str, str]) -> int:
    """Do as `python ARGUMENTS` does; the exit code, below 0 for a signal. `folder` gets the output."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number in (1, 2):
        os.dup2(os.open(Path(folder, str(number)), os.O_WRONLY | os.O_CREAT), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _set_warnings(arguments)
    _run(arguments)
    sys.exit()  # with exit handlers


def _set_warnings(arguments: list[str]) -> None:
    """The filters of a new interpreter: the pool's server has those of `-W error`."""
    if arguments[:2] == ["-W", "error"]:
        del arguments[:2]
        return
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)


def _run(arguments: list[str]) -> None:
    how, *rest = arguments
    if how == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(how).parent)
        runpy.run_path(how, run_name="__main__")
