"""Plugin of pytest: it runs chosen tests in a given order, and records outcomes and the lines that each test runs.

The environment variable `MUTANTS_JOB` names a JSON file with "tests" (ids in their order, or null for three cases of
each parametrised test, those that start processes last) and "results" (a file that gets one JSON object a test).
`MUTANTS_TRACE` names a folder: then all processes of a test append the lines that they run to a file in this folder,
and null means all cases.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

_GENERATION, _LINES = "generation", "lines"


def start_tracing() -> None:
    """Record the lines of the library in this process and its forks."""
    folder = Path(os.environ["MUTANTS_TRACE"])
    prefix = os.environ["MUTANTS_SOURCE"] + os.sep
    descriptor = os.open(folder / _LINES, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with open(folder / _GENERATION, "r+b") as file:
        generation = mmap.mmap(file.fileno(), 1)  # shared with forks and other processes
    seen: set[tuple[str, int]] = set()
    last = [generation[0]]

    def on_call(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(prefix):
            return None
        if generation[0] != last[0]:  # the next test has begun
            last[0] = generation[0]
            seen.clear()
        return on_line(frame, event, argument)

    def on_line(frame: FrameType, event: str, argument: object) -> Any:
        line = (frame.f_code.co_filename, frame.f_lineno)
        if event in ("call", "line") and line not in seen:  # a call counts as the line of `def`, for its defaults
            seen.add(line)
            try:
                os.write(descriptor, f"{line[0][len(prefix) :]}:{line[1]}\n".encode())
            except OSError:  # the process has closed the descriptors that it does not know
                return None
        return on_line

    sys.settrace(on_call)
    threading.settrace(on_call)


class Recorder:
    """The hooks of one session."""

    def __init__(self, job: dict[str, Any], folder: Path | None) -> None:
        self._order = None if job["tests"] is None else {test: index for index, test in enumerate(job["tests"])}
        self._results, self._folder = Path(job["results"]), folder
        self._outcome = "passed"
        self._like: dict[str, list[str]] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        order = self._representatives_first(items) if self._order is None else self._order
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in order])
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])

    def _representatives_first(self, items: list[pytest.Item]) -> dict[str, int]:
        """The first and the last case and one between them of each parametrised test; if it is traced, then the others.

        Tests that start processes come last.
        """
        functions: dict[str, list[str]] = {}
        for item in items:
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item.nodeid)
        for cases in functions.values():
            kept = sorted({0, len(cases) // 2, len(cases) - 1})
            for index, following in zip(kept, [*kept[1:], len(cases)], strict=True):
                self._like[cases[index]] = cases[index + 1 : following]
        others = [item.nodeid for item in items if item.nodeid not in self._like and self._folder is not None]
        several = {item.nodeid for item in items if any(map(item.get_closest_marker, ("processes", "distributed")))}
        return {test: index for index, test in enumerate(sorted([*self._like, *others], key=several.__contains__))}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._outcome = "passed"
        if self._folder is not None:
            (self._folder / _LINES).write_bytes(b"")
            with open(self._folder / _GENERATION, "r+b") as file:
                number = file.read(1)[0]
                file.seek(0)
                file.write(bytes([(number + 1) % 256]))
        began = time.monotonic()
        try:
            return (yield)
        finally:
            result = {"test": item.nodeid, "outcome": self._outcome, "seconds": round(time.monotonic() - began, 3)}
            if self._folder is not None:
                result |= {"lines": self._lines(), "like": self._like.get(item.nodeid, [])}
            with self._results.open("a") as file:
                file.write(json.dumps(result) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed" and self._outcome != "failed":
            self._outcome = report.outcome

    def _lines(self) -> dict[str, list[int]]:
        assert self._folder is not None
        found: dict[str, set[int]] = {}
        for line in (self._folder / _LINES).read_text().split():
            path, _, number = line.rpartition(":")
            found.setdefault(path, set()).add(int(number))
        return {path: sorted(numbers) for path, numbers in sorted(found.items())}


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder of this job."""
    trace = os.environ.get("MUTANTS_TRACE")
    job = json.loads(Path(os.environ["MUTANTS_JOB"]).read_text())
    config.pluginmanager.register(Recorder(job, Path(trace) if trace else None))
    if trace:
        start_tracing()
