"""A damaged step log: the intact part is read, and the damage is reported."""

from __future__ import annotations

import os
from contextlib import closing
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.step_logs import append, block_ends, steps, write
from trainstack.step_log import log_path, read_step_log
from trainstack.step_log.format import HEAD, MAGIC, Kind, next_chain
from trainstack.trainer.recording import log_file
from trainstack.trainer.recording.log_file import LogFile


def made(run: Path) -> Path:
    """A log of three blocks of 5 steps."""
    write(run, (1, 5), (6, 10), (11, 15))
    return log_path(run, 0)


def test_a_flipped_bit_is_detected_at_any_place(tmp_path: Path) -> None:
    """Each byte of the second block of steps: kind, length, payload and chain."""
    path = made(tmp_path)
    whole, ends = path.read_bytes(), block_ends(path)
    for place in range(ends[1], ends[2]):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        log = read_step_log(tmp_path)
        assert log.entries["step"].tolist() == [1, 2, 3, 4, 5], place
        assert log.damage is not None
        assert f"byte {ends[1]}" in log.damage


@pytest.mark.parametrize("place", range(0, 8, 3))
def test_a_file_with_another_beginning_is_refused(place: int, tmp_path: Path) -> None:
    path = made(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:place] + b"\0" + whole[place + 1 :])

    log = read_step_log(tmp_path)
    assert log.damage == "it does not begin as a step log does"
    assert len(log.entries) == 0


def test_a_truncated_block_is_detected(tmp_path: Path) -> None:
    path = made(tmp_path)
    whole, ends = path.read_bytes(), block_ends(path)
    for size in range(ends[2] + 1, ends[3], 7):
        path.write_bytes(whole[:size])
        log = read_step_log(tmp_path)
        assert log.entries["step"].tolist() == list(range(1, 11)), size
        assert log.damage == f"the block at byte {ends[2]} is cut off"


def test_blocks_in_another_order_are_detected(tmp_path: Path) -> None:
    path = made(tmp_path)
    whole, ends = path.read_bytes(), block_ends(path)
    path.write_bytes(whole[: ends[1]] + whole[ends[2] : ends[3]] + whole[ends[1] : ends[2]])

    log = read_step_log(tmp_path)
    assert log.entries["step"].tolist() == [1, 2, 3, 4, 5]
    assert log.damage is not None
    assert "not the one that was written there" in log.damage


def test_a_missing_block_is_detected(tmp_path: Path) -> None:
    path = made(tmp_path)
    whole, ends = path.read_bytes(), block_ends(path)
    path.write_bytes(whole[: ends[1]] + whole[ends[2] :])

    assert read_step_log(tmp_path).damage is not None


def test_an_appended_forgery_is_detected(tmp_path: Path) -> None:
    """The block is well-formed, and has the chain of another place."""
    path = made(tmp_path)
    payload = steps(16, 16).tobytes()
    head = HEAD.pack(Kind.STEPS, len(payload))
    with path.open("ab") as file:
        file.write(head + payload + next_chain(b"\0" * 16, head, payload))

    log = read_step_log(tmp_path)
    assert log.entries["step"][-1] == 15
    assert log.damage is not None


def test_blocks_with_a_right_chain_and_wrong_content_are_refused(tmp_path: Path) -> None:
    wrong = [
        (Kind.STEPS, b"\0" * 47),
        (Kind.DETAILS, b"\0" * 9),
        (Kind.START, b"{}"),
        (Kind.START, b"[" * 100_000),
        (Kind.CHECKPOINT, b"\xff"),
        (Kind.NAMES, b"[1]"),
    ]
    for number, (kind, payload) in enumerate(wrong):
        run = tmp_path / str(number)
        append(run, (Kind.STEPS, steps(1, 2).tobytes()), (kind, payload))
        log = read_step_log(run)
        assert len(log.entries) == 2, kind
        assert log.damage is not None
        assert "was not written by trainstack" in log.damage


def test_steps_that_do_not_increase_are_damage(tmp_path: Path) -> None:
    append(tmp_path, (Kind.STEPS, steps(1, 5).tobytes()), (Kind.STEPS, steps(4, 6).tobytes()))
    assert read_step_log(tmp_path).damage == "the steps of segment 0 are not in order"


def test_a_replaced_log_is_a_contradiction(tmp_path: Path) -> None:
    """A checkpoint has the chain of the log. A resume finds another log in its place."""
    head = write(tmp_path, (1, 5))
    write(tmp_path, (6, 7), resumed=5, head=head)
    assert read_step_log(tmp_path).contradictions == []

    other = tmp_path / "other"
    append(other, (Kind.STEPS, steps(1, 5, loss=0.0).tobytes()))
    write(other, (6, 7), resumed=5, head=head)
    (found,) = read_step_log(other).contradictions
    assert "segment 1 resumed a checkpoint of global step 5" in found


def test_a_resume_moves_a_partial_block_to_another_file(tmp_path: Path) -> None:
    path = made(tmp_path)
    whole, ends = path.read_bytes(), block_ends(path)
    for size in (ends[2] + 1, ends[2] + HEAD.size, ends[3] - 1):
        path.write_bytes(whole[:size])
        for cut in path.parent.glob("*.cut-*"):
            cut.unlink()
        write(tmp_path, (11, 12), resumed=10)

        log = read_step_log(tmp_path)
        assert log.damage is None, size
        assert log.entries["step"].tolist() == list(range(1, 13))
        assert log.segments[1].cut == f"the block at byte {ends[2]} is cut off"
        assert path.with_suffix(".cut-1").read_bytes() == whole[ends[2] : size]


@pytest.mark.parametrize("content", [b"", b"TSS", b"something else", MAGIC + b"\1"])
def test_a_file_without_an_intact_block_is_renamed(content: bytes, tmp_path: Path) -> None:
    path = log_path(tmp_path, 0)
    path.parent.mkdir()
    path.write_bytes(content)
    write(tmp_path, (1, 2))

    log = read_step_log(tmp_path)
    assert (log.damage, len(log.entries)) == (None, 2)
    assert path.with_suffix(".cut-1").read_bytes() == content


def test_a_log_that_is_killed_within_each_write_is_continued(tmp_path: Path) -> None:
    """Each write is truncated, as after a kill."""
    path = log_path(tmp_path, 0)
    for step in range(1, 30, 2):
        append(tmp_path, (Kind.STEPS, steps(step, step + 1).tobytes()), resumed=step - 1)
        size = path.stat().st_size
        os.truncate(path, size - step)
    log = read_step_log(tmp_path)
    assert len(log.segments) == 15
    assert len(list(path.parent.glob("*.cut-*"))) == 14


def test_a_write_that_the_system_splits_gives_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = FileIO.write

    class Slow(FileIO):
        def write(self, data: Any) -> int:
            return write(self, data[:100])

    monkeypatch.setattr(log_file, "FileIO", Slow)
    append(tmp_path, (Kind.STEPS, steps(1, 20).tobytes()))
    assert len(read_step_log(tmp_path).entries) == 20


def test_the_chain_depends_on_kind_and_length() -> None:
    heads = [HEAD.pack(kind, length) for kind in (Kind.STEPS, Kind.NAMES) for length in (2, 3)]
    assert len({next_chain(b"chain", head, b"payload") for head in heads}) == 4
    assert next_chain(b"other", heads[0], b"payload") != next_chain(b"chain", heads[0], b"payload")


def test_a_log_recognizes_its_chain_values(tmp_path: Path) -> None:
    head = write(tmp_path, (1, 5))
    with closing(LogFile(log_path(tmp_path, 0))) as file:
        assert file.has_head(head)
        assert not file.has_head("00" * 16)
