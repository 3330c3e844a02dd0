"""Run each script in a fork of this process, which has imported torch: this halves the time of a short script.

Each line of standard input is a JSON object with the script, its folder and its time-out in seconds. The output of a
script is written to files in the folder, and its exit status is printed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import sys
import tempfile
from pathlib import Path

import torch._dynamo  # noqa: F401 - optimizers import it when they are made

import trainstack
from trainstack.backends.dp.epsilon import import_opacus
from trainstack.errors import MissingExtraError

_NOT_LOADED = ("compat", "sklearn", "testing")
"""Packages of the library that few scripts use."""


def preload() -> None:
    """Import the modules that the library imports when they are used, and the accountant of opacus.

    A short script needs as much time for these imports as for its trainings.
    """
    library = Path(trainstack.__file__).parent
    for path in sorted(library.rglob("[!_]*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if parts[0] not in _NOT_LOADED:
            with contextlib.suppress(ImportError):  # a package of an extra is not installed
                importlib.import_module(".".join(("trainstack", *parts)))
    with contextlib.suppress(MissingExtraError):
        import_opacus("opacus.accountants.analysis.rdp")


def main() -> None:
    """Serve until the input ends."""
    preload()
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            enter(job["folder"], job["timeout_s"])
            runpy.run_path(job["script"], run_name="__main__")
            return  # exit as a script does, with exit handlers
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def enter(folder: str, timeout_s: int) -> None:
    """Set up the process like a new one: folder, streams, time-out."""
    signal.alarm(timeout_s)
    os.chdir(folder)
    os.environ["TMPDIR"], tempfile.tempdir = folder, None
    sys.path[0] = folder
    modes = ((0, os.devnull, os.O_RDONLY), (1, "stdout.txt", os.O_WRONLY), (2, "stderr.txt", os.O_WRONLY))
    for number, name, mode in modes:
        os.dup2(os.open(name, mode | os.O_CREAT), number)


if __name__ == "__main__":
    main()
