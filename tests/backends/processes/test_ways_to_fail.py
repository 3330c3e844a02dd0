"""No rank waits for a failed rank longer than its timeout: dozens of ways to fail, under three launchers.

`python tools/failure_times.py` prints the times.
"""

from __future__ import annotations

import pytest

from tests.helpers.failing_run import TIMEOUT_S
from tools.failure_times import cases, measure_case, name_of

pytestmark = pytest.mark.distributed

SPARE_S, SLOW_S = 7.0, 60.0  # the second for a busy machine
LAUNCHER_S = 35.0  # torchrun waits 30 s for a process that ignores SIGTERM
FAST = [("plain", "RuntimeError", "optimizers", 1)]


def is_in_time(case: tuple[str, str, str, int]) -> None:
    times = measure_case(case)
    said = times["printed"][-4000:]
    assert times["other_s"] is not None, said
    assert 0 <= times["other_s"] < TIMEOUT_S + SPARE_S + SLOW_S, said
    assert times["all_s"] is not None, said
    assert times["all_s"] < TIMEOUT_S + SPARE_S + SLOW_S + LAUNCHER_S, said


@pytest.mark.parametrize("case", FAST, ids=name_of)
def test_the_other_rank_ends_in_time(case: tuple[str, str, str, int]) -> None:
    is_in_time(case)


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in cases() if case not in FAST], ids=name_of)
def test_the_other_rank_ends_in_time_always(case: tuple[str, str, str, int]) -> None:
    is_in_time(case)


def test_there_are_enough_ways() -> None:
    found = cases()
    assert len(found) >= 45
    assert {launcher for launcher, *_ in found} == {"plain", "torchrun", "launch"}
    assert {rank for *_, rank in found} == {0, 1}
