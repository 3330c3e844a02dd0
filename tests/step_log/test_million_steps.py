"""A log of a million steps: its size, and the CPU time of reading it."""

from __future__ import annotations

import time
from pathlib import Path

from tests.helpers.step_logs import append, steps
from trainstack.step_log import log_path, read_step_log
from trainstack.step_log.format import Kind, pack_details

STEPS, LOG_EVERY = 1_000_000, 50


def test_a_million_steps_are_small_and_read_at_once(tmp_path: Path) -> None:
    """The log has a block of steps and one of details at each log point, as by default. Reading takes about 0.5 s."""
    entries = steps(1, STEPS)
    blocks = list[tuple[Kind, bytes]]()
    for first in range(0, STEPS, LOG_EVERY):
        blocks.append((Kind.STEPS, entries[first : first + LOG_EVERY].tobytes()))
        blocks.append((Kind.DETAILS, pack_details(first + LOG_EVERY, 1, [2])))
    append(tmp_path, *blocks)
    assert log_path(tmp_path, 0).stat().st_size <= 64 * STEPS

    began = time.process_time()
    log = read_step_log(tmp_path)
    details = log.steps_with_details()
    seconds = time.process_time() - began
    assert len(log.entries) == STEPS
    assert details == list(range(LOG_EVERY, STEPS + 1, LOG_EVERY))
    assert seconds < 5
