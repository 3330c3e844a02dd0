"""The main function of a launched process.

torch's agent makes a folder for each start of a process: `<run>/attempt_<restart>/<local rank>/`. It contains:

    pid      written first: pid, rank and the ident of the main thread, as numbers
    stack    the output of `faulthandler` after `WHERE_SIGNAL`
    result   the pickled return value; if it exists, the process has succeeded, with any exit code
    report   JSON: the exception and its traceback
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from multiprocessing import util
from pathlib import Path
from typing import Any, TextIO

from trainstack._files import atomic_write
from trainstack.backends.processes import watchdog as ranks_watchdog
from trainstack.errors import TrainstackError

# The interval at which the agent checks for ended processes. A process that fails because of another one waits some
# intervals, so that the other one is seen first.
MONITOR_S = 0.1
_YIELD_S = 5 * MONITOR_S
_EXIT_WITHIN_S = 5.0  # then the process is ended, even if threads or exit handlers hang

WHERE_SIGNAL = getattr(signal, "SIGRTMAX", 64) - 5
"""Asks a process for its place in its code. Not the last real-time signal, which debuggers use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """The failure of a process."""

    rank: int
    kind: str
    message: str
    text: str
    when: float


class ResultDir:
    """The folder of one start of one process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def pid(self) -> int | None:
        """The pid; None if the process has not written it yet."""
        text = self._read("pid")
        return int(text.split()[0]) if text else None

    def rank(self, otherwise: int) -> int:
        """The global rank of the process; `otherwise` if the process has not written it yet."""
        text = self._read("pid")
        return int(text.split()[1]) if text else otherwise

    def place(self) -> str | None:
        """The place of the main thread when the process was asked; None before it has answered."""
        dump, said = self._read("stack"), self._read("pid")
        frames = ranks_watchdog._frames_of(int(said.split()[2]), dump) if said else []
        frames = list(takewhile(lambda frame: frame.file != __file__, frames)) or frames  # innermost first
        return ranks_watchdog._line(reversed(frames)) if frames else None

    @property
    def has_result(self) -> bool:
        """Whether the process has written its result."""
        return (self.path / "result").exists()

    def result(self) -> Any:
        """The return value. Its pickle was written by the process that we started."""
        return pickle.loads((self.path / "result").read_bytes())

    def report(self) -> FailureReport | None:
        """The failure, if the process could report it."""
        text = self._read("report")
        return FailureReport(**json.loads(text)) if text else None

    def _read(self, name: str) -> str:
        try:
            return (self.path / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""


def list_attempts(run: Path) -> list[list[ResultDir]]:
    """The folders of all starts so far, oldest first, each by local rank."""
    starts = sorted(run.glob("*/attempt_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    return [
        [ResultDir(path) for path in sorted(start.iterdir(), key=lambda path: int(path.name)) if path.is_dir()]
        for start in starts
    ]


def finished_attempt(run: Path, nproc: int) -> list[ResultDir] | None:
    """The folders of the newest start in which all `nproc` processes have written results."""
    return next((a for a in reversed(list_attempts(run)) if len(a) == nproc and all(box.has_result for box in a)), None)


def work(call: bytes, output: str) -> None:
    """Call the user's function in a process of torch's agent, and write its result or its traceback to the folder."""
    box = ResultDir(Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent)
    if hasattr(faulthandler, "register"):  # not on Windows
        faulthandler.register(WHERE_SIGNAL, file=(box.path / "stack").open("w"))
    atomic_write(box.path / "pid", f"{os.getpid()} {os.environ['RANK']} {threading.get_ident()}".encode())
    run = box.path.parents[2]
    if (run / "expired").exists():
        os._exit(1)
    if finished_attempt(run, int(os.environ["LOCAL_WORLD_SIZE"])) is not None:
        return  # restarted after a process ended late: all results already exist
    _choose_output(output)
    try:
        fn, args = pickle.loads(call)
        try:
            result = fn(*args)
        except SystemExit as stop:
            if stop.code not in (None, 0):
                raise
            result = None
        atomic_write(box.path / "result", _pickled(result))
    except BaseException as error:
        _fail(box, error, shown=output not in ("all", "only_error", "ignore"))
    # torch waits until all processes have returned. Python's exit then runs this, after ending data loader workers.
    util.Finalize(None, _leave, args=(0,), exitpriority=-1000)


def _pickled(result: Any) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"the function given to launch() returned a {type(result).__name__}, which cannot be pickled ({error}). "
            "Return numbers, strings, tensors on the CPU, or containers of them; save models to files."
        ) from error


def _fail(box: ResultDir, error: BaseException, shown: bool) -> None:
    """Write the traceback and end the process, within a few seconds."""
    part = error.__traceback__  # show only the frames of the user's function
    while part is not None and part.tb_next is not None and part.tb_frame.f_code.co_filename == __file__:
        part = part.tb_next
    said = FailureReport(
        rank=int(os.environ["RANK"]),
        kind=type(error).__name__,
        message=str(error),
        text="".join(traceback.format_exception(type(error), error, part)),
        when=time.time(),
    )
    atomic_write(box.path / "report", json.dumps(asdict(said)).encode())
    if shown:
        sys.stderr.write(said.text)
    if isinstance(error, RuntimeError | TrainstackError) and int(os.environ["WORLD_SIZE"]) > 1:
        time.sleep(_YIELD_S)  # for an error such as "connection closed by peer", the peer's failure is the cause
    code = error.code if isinstance(error, SystemExit) else 130 if isinstance(error, KeyboardInterrupt) else 1
    _leave(code if isinstance(code, int) and 0 < code < 256 else 1, within_s=_EXIT_WITHIN_S)


def _leave(code: int, within_s: float | None = None) -> None:
    """End the process as Python does, but without tearing down modules.

    During the teardown, gloo's thread may release a finished collective, ask for the GIL, and abort the process:
    "terminate called without an active exception". So this runs threading's shutdown and the exit handlers, flushes
    buffers, and exits. The private functions were checked on Python 3.11.
    """
    if within_s is not None:
        timer = threading.Timer(within_s, os._exit, (code,))
        timer.daemon = True
        timer.start()
    with suppress(Exception):
        getattr(threading, "_shutdown")()  # noqa: B009 - called by Python's exit; missing in typeshed
    with suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def _choose_output(output: str) -> None:
    rank, first = os.environ["RANK"], os.environ["LOCAL_RANK"] == "0"
    if output == "all" or (first and output in ("only_error", "ignore")):
        return
    if output in ("only_error", "ignore"):
        _redirect(sys.stdout, Path(os.devnull))
        if output == "ignore":
            _redirect(sys.stderr, Path(os.devnull))
        return
    _redirect(sys.stdout, Path(output) / f"{rank}_std.log")
    _redirect(sys.stderr, Path(output) / f"{rank}_err.log")


def _redirect(stream: TextIO, path: Path) -> None:
    """Send a stream, and output of C code to its descriptor, to a file. After a restart it appends."""
    stream.flush()
    with path.open("wb" if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else "ab") as file:
        os.dup2(file.fileno(), stream.fileno())
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(line_buffering=True)  # so that the lines of a killed process are complete
