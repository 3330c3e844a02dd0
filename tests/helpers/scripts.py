"""Run programs in forks of a process that has imported torch, which saves seconds for each."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.helpers.processes import run_world
from tests.helpers.workers.scripts import run_program


def run_python(
    *arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None, timeout: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """The result of `subprocess.run([sys.executable, *arguments], capture_output=True, text=True)`.

    For programs that work the same if torch and trainstack are imported already.

    Args:
        arguments: a script or `-c` and code, optionally after `-W error`, and the program's arguments.
        cwd, env: as of `subprocess.run`.
        timeout: in seconds, on an idle machine.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {"cwd": str(cwd or Path.cwd()), "environment": dict(os.environ if env is None else env)}
        (code,) = run_world(
            1, run_program, fresh=True, timeout=timeout, arguments=[*arguments], folder=folder, **options
        )
        printed, said = (Path(folder, str(number)).read_text() for number in (1, 2))
        return subprocess.CompletedProcess([*arguments], code, printed, said)


def start_python(*arguments: str, **options: Any) -> Future[subprocess.CompletedProcess[str]]:
    """`run_python` in a thread, for tests that send signals to the program. Wait for its end before the next call."""
    threads = ThreadPoolExecutor(1)
    result = threads.submit(run_python, *arguments, **options)
    threads.shutdown(wait=False)
    return result


def wait_for_pid(path: Path, program: Future[subprocess.CompletedProcess[str]]) -> int:
    """The process id that a started program writes to `path`."""
    while not (path.exists() and (text := path.read_text())):
        assert not program.done(), program.result().stderr
        time.sleep(0.005)
    return int(text)
