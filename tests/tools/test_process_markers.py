"""A test without a marker cannot start a process. The tests of this file have no marker."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.helpers.processes import run_world
from tools.ranks.pool import RankPool

STARTS: dict[str, Callable[[], object]] = {
    "subprocess": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
    "multiprocessing": lambda: multiprocessing.Process(target=os.getpid).start(),
    "fork": lambda: os.fork() or os._exit(0),
    "new ranks": lambda: run_world(1, os.getpid),
    "ranks of an earlier test": lambda: RankPool.start(object.__new__(RankPool), {}),
}


@pytest.mark.parametrize("name", STARTS)
def test_a_test_without_a_marker_starts_no_process(name: str) -> None:
    with pytest.raises(pytest.fail.Exception, match="mark it with"):
        STARTS[name]()
