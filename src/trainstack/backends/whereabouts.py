"""Where a process is in its code, in one line: for the error that tells which rank has kept the others waiting."""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import tempfile
import traceback
from collections.abc import Iterable
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

_OURS = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_PYTHON = str(Path(os.__file__).parent) + os.sep
_WRAPPERS = ("together", "hook", "announced")  # stand around everything

_THREAD = re.compile(r"hread 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class Place(NamedTuple):
    """A line of a stack."""

    file: str
    line: int
    function: str


def of_thread(thread: int) -> str:
    """Where the thread with this ident is now; "" if it is gone.

    A thread that runs changes its frames while another one walks them in Python, at which CPython may crash.
    `faulthandler` walks them in one go.
    """
    with suppress(OSError), tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return _line(reversed(_frames_of(thread, file.read().decode(errors="replace"))))
    return ""


def _frames_of(thread: int, dump: str) -> list[Place]:
    """What a dump of `faulthandler` says of one thread, the innermost frame first."""
    for part in dump.split("\n\n"):
        head, *lines = part.splitlines() or [""]
        found = _THREAD.search(head)
        if found and int(found[1], 16) == thread:
            return [Place(m[1], int(m[2]), m[3]) for line in lines if (m := _FRAME.match(line))]
    return []


def of_traceback(raised: TracebackType | None) -> str:
    """Where an exception comes from."""
    frames = traceback.walk_tb(raised)
    return _line(Place(frame.f_code.co_filename, number, frame.f_code.co_name) for frame, number in frames)


def _line(stack: Iterable[Place]) -> str:
    """`train > train_epoch > ... > train_step, at train.py:41: time.sleep(60)`: what is neither torch's nor Python's,
    from the first function of this library on."""
    places = [place for place in stack if _tells(place.file)]
    first = next((at for at, place in enumerate(places) if place.file.startswith(_OURS)), 0)
    if not places:
        return ""
    file, number, _ = places[-1]
    called = (_bare(place.function) for place in places[first:] if place.function not in _WRAPPERS)
    way = " > ".join(name for name, _ in groupby(called))
    source = linecache.getline(file, number).partition("  # ")[0].strip()
    return f"{way}, at {file}:{number}" + (f": {source}" if source else "")


def _bare(name: str) -> str:
    return name if name.startswith("__") else name.removeprefix("_")


def _tells(file: str) -> bool:
    if file.startswith(_TORCH) or file.startswith("<frozen "):
        return False
    return not file.startswith(_PYTHON) or "-packages" in file
