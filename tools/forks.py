"""Run scripts, each in a fork of this process, which has imported torch already: half of the cost of a short script.

Standard input holds a JSON object a line: the script, the folder to run it in, and the seconds it may take. Its output
goes to files in the folder; its exit status is printed.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import tempfile

import torch._dynamo  # noqa: F401 - which optimizers import when they are made

import trainstack  # noqa: F401 - all the scripts begin with it


def main() -> None:
    """Serve until the input ends."""
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            enter(job["folder"], job["timeout_s"])
            runpy.run_path(job["script"], run_name="__main__")
            return  # and exit as a script does, by its exit handlers
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def enter(folder: str, timeout_s: int) -> None:
    """The setup that the system makes for a process: a folder, streams, an end."""
    signal.alarm(timeout_s)
    os.chdir(folder)
    os.environ["TMPDIR"], tempfile.tempdir = folder, None
    sys.path[0] = folder
    modes = ((0, os.devnull, os.O_RDONLY), (1, "stdout.txt", os.O_WRONLY), (2, "stderr.txt", os.O_WRONLY))
    for number, name, mode in modes:
        os.dup2(os.open(name, mode | os.O_CREAT), number)


if __name__ == "__main__":
    main()
