"""A step log returns its entries, details and segments, and the steps that a resume has repeated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.step_logs import append, steps, write
from trainstack.errors import CheckpointNotFoundError
from trainstack.step_log import ABSENT, ENTRY, Flag, ranks_of, read_step_log, reading
from trainstack.step_log.format import Kind, pack_details, to_json


def test_entries_are_read_bit_by_bit(tmp_path: Path) -> None:
    written = steps(1, 40)
    written["loss"][3:6] = np.nan, np.inf, -0.0
    head = append(tmp_path, (Kind.STEPS, written[:25].tobytes()), (Kind.STEPS, written[25:].tobytes()))

    log = read_step_log(tmp_path)
    assert log.entries.tobytes() == written.tobytes()
    assert ENTRY.itemsize <= 64
    assert (log.damage, log.contradictions, log.repeated) == (None, [], {})
    assert log.segments[0].backend == "sp"
    assert log.entry(7)["samples"] == 7 * 7919
    assert log.entry(41) is None
    assert len(log.heads) == 3
    assert log.heads[-1] == head


def test_details_are_found_by_step(tmp_path: Path) -> None:
    append(
        tmp_path,
        (Kind.STEPS, steps(1, 3).tobytes()),
        (Kind.DETAILS, pack_details(1, None, [5])),
        (Kind.DETAILS, pack_details(2, 0, [6], [[1], [ABSENT], [3]])),
        (Kind.NAMES, to_json(["w", "added"])),
        (Kind.DETAILS, pack_details(3, 9, [7], [[1, 2], [3, 4], [5, 6]], names=1)),
    )

    log = read_step_log(tmp_path)
    assert log.steps_with_details() == [1, 2, 3]
    first, second, third = (log.details(step) for step in (1, 2, 3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert (first.batch, first.generators, list(first.parameters)) == (None, {"torch": 5}, [])
    assert (second.batch, second.weights.tolist()) == (0, [ABSENT])
    assert list(third.parameters) == ["w", "added"]
    assert third.optimizer_states.tolist() == [5, 6]
    assert log.details(4) is None


def test_segments_without_a_common_step_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for segment in range(30):
        write(tmp_path, (2 * segment + 1, 2 * segment + 4), resumed=2 * segment)
    compared: list[int] = []
    monkeypatch.setattr(reading, "_differences", lambda one, other: compared.append(len(one)) or ())
    assert read_step_log(tmp_path).entries["step"].tolist() == list(range(1, 63))
    assert len(compared) < 60


def test_a_resumed_run_replaces_the_steps_that_it_makes_again(tmp_path: Path) -> None:
    write(tmp_path, (1, 10), details=(2, 8))
    write(tmp_path, (6, 7), resumed=5)

    log = read_step_log(tmp_path)
    assert log.entries["step"].tolist() == list(range(1, 8))
    assert log.origins.tolist() == [0] * 5 + [1] * 2
    assert [start.resumed_step for start in log.segments] == [0, 5]
    assert log.repeated == {}
    assert log.steps_with_details() == [2]  # step 8 was removed and not repeated
    assert log.details(8) is None


def test_a_repeated_step_with_other_bits_is_reported(tmp_path: Path) -> None:
    write(tmp_path, (1, 10))
    changed = steps(6, 12)
    changed["loss"][1] = np.nextafter(changed["loss"][1], 1)
    changed["samples"][2] += 1
    changed["flags"][3] |= Flag.SKIPPED
    changed["norm"][4] += 1
    changed["flags"][4] &= ~np.uint32(Flag.NORM)  # measured in only one of the two
    append(tmp_path, (Kind.STEPS, changed.tobytes()), resumed=5)

    assert read_step_log(tmp_path).repeated == {7: ("loss",), 8: ("samples",), 9: ("flags",)}


def test_a_third_segment_is_compared_with_both_before(tmp_path: Path) -> None:
    changed = steps(6, 10)
    changed["rates"][4] = 12
    append(tmp_path, (Kind.STEPS, np.concatenate([steps(1, 5), changed]).tobytes()))
    write(tmp_path, (6, 7), resumed=5)  # and was killed
    write(tmp_path, (6, 10), resumed=5)

    log = read_step_log(tmp_path)
    assert log.repeated == {10: ("rates",)}
    assert log.entries["step"].tolist() == list(range(1, 11))


def test_steps_repeated_on_other_ranks_may_differ(tmp_path: Path) -> None:
    write(tmp_path, (1, 4), size=2)
    append(tmp_path, (Kind.STEPS, steps(3, 4, samples=0).tobytes()), resumed=2, size=1)

    assert read_step_log(tmp_path).repeated == {}


def test_a_removed_rank_loses_the_repeated_steps(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, (1, 10), rank=rank, size=2)
    write(tmp_path, (7, 12), rank=0, resumed=6, size=1)

    assert ranks_of(tmp_path) == [0, 1]
    assert read_step_log(tmp_path, 0).entries["step"].tolist() == list(range(1, 13))
    assert read_step_log(tmp_path, 1).entries["step"].tolist() == list(range(1, 7))


def test_a_run_without_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"there is no step log .*rank-00000\.log.*record='steps'"):
        read_step_log(tmp_path)
    assert ranks_of(tmp_path) == []
