"""Where a process is in its code, in one line: for the error that tells which rank has kept the others waiting."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from types import FrameType, TracebackType

import torch

_OURS = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_PYTHON = str(Path(os.__file__).parent) + os.sep
_WRAPPERS = ("together", "hook", "announced")  # stand around everything


def of_thread(thread: int) -> str:
    """Where the thread with this ident is now; "" if it is gone."""
    frame = sys._current_frames().get(thread)
    return "" if frame is None else _line(reversed(list(traceback.walk_stack(frame))))


def of_traceback(raised: TracebackType | None) -> str:
    """Where an exception comes from."""
    return _line(traceback.walk_tb(raised))


def _line(stack: Iterable[tuple[FrameType, int]]) -> str:
    """`train > train_epoch > ... > train_step, at train.py:41: time.sleep(60)`: what is neither torch's nor Python's,
    from the first function of this library on."""
    frames = [(frame.f_code, number) for frame, number in stack if _tells(frame.f_code.co_filename)]
    first = next((at for at, (code, _) in enumerate(frames) if code.co_filename.startswith(_OURS)), 0)
    if not frames:
        return ""
    code, number = frames[-1]
    called = (_bare(one.co_name) for one, _ in frames[first:] if one.co_name not in _WRAPPERS)
    way = " > ".join(name for name, _ in groupby(called))
    source = linecache.getline(code.co_filename, number).partition("  # ")[0].strip()
    return f"{way}, at {code.co_filename}:{number}" + (f": {source}" if source else "")


def _bare(name: str) -> str:
    return name if name.startswith("__") else name.removeprefix("_")


def _tells(file: str) -> bool:
    if file.startswith(_TORCH) or file.startswith("<frozen "):
        return False
    return not file.startswith(_PYTHON) or "-packages" in file
