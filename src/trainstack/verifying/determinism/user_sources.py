"""`SourceWatch` finds user code that gets values that no seed determines: the time, or random numbers of the system."""

from __future__ import annotations

import os
import random
import secrets
import sys
import sysconfig
import time
from collections.abc import Callable
from datetime import date
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

import trainstack


class Source(NamedTuple):
    """A call of user code.

    Attributes:
        called: the called function, as text.
        place: file, line and function of the user's code.
        remedy: the code to write instead.
    """

    called: str
    place: str
    remedy: str


_NO_TIME = "let nothing that is trained on depend on the time"
_SEED = "give a seed: numpy.random.default_rng(seed), random.Random(seed), torch.Generator().manual_seed(seed)"

_CLOCKS: frozenset[Any] = frozenset(
    getattr(time, f"{name}{unit}")
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time")
    for unit in ("", "_ns")
    if hasattr(time, f"{name}{unit}")
)
_PASSED_ON = frozenset({random.__file__, secrets.__file__, os.path.join(os.path.dirname(random.__file__), "uuid.py")})
"""Files of Python through which user code gets random numbers of the system."""


class SourceWatch:
    """A block that observes the calls of user code in this thread, including nested calls of the library.

    Attributes:
        found: the sources, each once, in the order of their first call.
    """

    def __init__(self) -> None:
        self.found: dict[Source, None] = {}
        paths = sysconfig.get_paths()
        folders = [os.path.dirname(trainstack.__file__), os.path.dirname(torch.__file__)]
        folders += [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
        self._others = tuple(os.path.join(os.path.realpath(folder), "") for folder in folders)
        self._of_user: dict[CodeType, bool] = {}
        self._seeds: Callable[..., Any] = random.Random.seed
        self._before: Any = None

    def __enter__(self) -> SourceWatch:
        self._before = sys.getprofile()
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _see(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call":
            found = _describe(called)
            if found is not None:
                self._note(frame, *found)
        elif event == "call" and frame.f_code is self._seeds.__code__ and frame.f_locals.get("a", 0) is None:
            self._note(frame.f_back, "random.Random without a seed", _SEED)

    def _note(self, frame: FrameType | None, called: str, remedy: str) -> None:
        while frame is not None and frame.f_code.co_filename in _PASSED_ON:
            frame = frame.f_back
        if frame is None or not self.is_of_user(frame.f_code):  # a call of a library, such as the time of a log line
            return
        self.found[Source(called, describe_place(frame), remedy)] = None

    def is_of_user(self, code: CodeType) -> bool:
        if code not in self._of_user:
            file = code.co_filename
            self._of_user[code] = not file.startswith("<") and not os.path.realpath(file).startswith(self._others)
        return self._of_user[code]

    def find_user_frame(self, frame: FrameType | None) -> FrameType | None:
        """The first frame of the user's code, from `frame` outwards; None if there is none."""
        while frame is not None and not self.is_of_user(frame.f_code):
            frame = frame.f_back
        return frame


def _describe(called: Any) -> tuple[str, str] | None:
    """The value of a built-in function that no seed determines, and a remedy; None for other functions."""
    if called is os.urandom:
        return "random numbers of the operating system (os.urandom)", _SEED
    name, owner = getattr(called, "__name__", ""), getattr(called, "__self__", None)
    if name in ("now", "utcnow", "today") and isinstance(owner, type) and issubclass(owner, date):
        return f"the time ({owner.__name__}.{name})", _NO_TIME
    if name == "seed" and isinstance(owner, torch.Generator):
        return "a random seed (torch.Generator.seed)", _SEED
    try:
        return (f"the time (time.{name})", _NO_TIME) if called in _CLOCKS else None
    except TypeError:  # a method of an object that has no hash
        return None


def describe_place(frame: FrameType) -> str:
    """File, line and function of a frame."""
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has only `co_name`
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {name}"
