"""Any damage to a file of a checkpoint is noticed, and the checkpoint before it is used."""

from __future__ import annotations

import logging
import random
from functools import partial
from pathlib import Path

import pytest

from tests.checkpointing.support import flip_bit, make_checkpoint, mark_of
from trainstack.checkpointing import (
    DefaultCheckpointer,
    DefaultCheckpointerArguments,
    read_checkpoint,
    verify_checkpoint,
    write_checkpoint,
)
from trainstack.errors import CheckpointDamagedError

FILES = ("MANIFEST.json", "model.safetensors", "state.safetensors", "state.json", "index.json")


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A directory with two checkpoints, of which the second is to be damaged."""
    write_checkpoint(make_checkpoint(1, step=1), tmp_path, "checkpoint-000000001")
    write_checkpoint(make_checkpoint(2, step=2), tmp_path, "checkpoint-000000002")
    return tmp_path


def expect_noticed(directory: Path, file: str, caplog: pytest.LogCaptureFixture) -> None:
    second = directory / "checkpoint-000000002"
    for use in (verify_checkpoint, read_checkpoint, partial(read_checkpoint, mapped=True)):
        with pytest.raises(CheckpointDamagedError, match=file):
            use(second)
    checkpointer = DefaultCheckpointer(DefaultCheckpointerArguments(save_dir=str(directory)))
    with pytest.raises(CheckpointDamagedError):
        checkpointer.load(second)
    for resume in (True, "auto", directory):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "trainstack"):
            assert mark_of(checkpointer.load(resume)) == 1
        assert "checkpoint-000000002" in caplog.text
        assert file in caplog.text


@pytest.mark.spec("F116")
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("length", ["0", "1", "half", "size-1"])
def test_truncation_is_noticed(two: Path, file: str, length: str, caplog: pytest.LogCaptureFixture) -> None:
    path = two / "checkpoint-000000002" / file
    data = path.read_bytes()
    path.write_bytes(data[: {"0": 0, "1": 1, "half": len(data) // 2, "size-1": len(data) - 1}[length]])
    expect_noticed(two, file, caplog)


@pytest.mark.parametrize("file", FILES)
def test_growth_and_removal_are_noticed(two: Path, file: str, caplog: pytest.LogCaptureFixture) -> None:
    path = two / "checkpoint-000000002" / file
    data = path.read_bytes()
    path.write_bytes(data + b"\n")
    expect_noticed(two, file, caplog)
    path.unlink()
    expect_noticed(two, file, caplog)


@pytest.mark.parametrize("file", FILES)
def test_one_flipped_bit_anywhere_is_noticed(two: Path, file: str, caplog: pytest.LogCaptureFixture) -> None:
    path = two / "checkpoint-000000002" / file
    size = path.stat().st_size
    draw = random.Random(0)
    positions = range(size) if file == "MANIFEST.json" else [0, 3, 9, 40, size - 1, *draw.sample(range(size), 40)]
    for position in positions:
        bit = draw.randrange(8)
        flip_bit(path, position, bit)
        with pytest.raises(CheckpointDamagedError, match=file):
            read_checkpoint(path.parent)
        with pytest.raises(CheckpointDamagedError, match=file):
            verify_checkpoint(path.parent)
        flip_bit(path, position, bit)
    assert mark_of(read_checkpoint(path.parent)) == 2
    flip_bit(path, size // 2, 3)
    expect_noticed(two, file, caplog)


def test_an_error_names_all_checkpoints_if_all_are_damaged(two: Path) -> None:
    flip_bit(two / "checkpoint-000000001" / "state.json", 5)
    flip_bit(two / "checkpoint-000000002" / "MANIFEST.json", 5)
    checkpointer = DefaultCheckpointer(DefaultCheckpointerArguments(save_dir=str(two), log_level="ERROR"))
    for resume in (True, "auto", two):
        with pytest.raises(CheckpointDamagedError) as caught:
            checkpointer.load(resume)
        assert "checkpoint-000000001" in str(caught.value)
        assert "checkpoint-000000002" in str(caught.value)


def test_log_level_silences_the_warning(two: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip_bit(two / "checkpoint-000000002" / "state.json", 5)
    checkpointer = DefaultCheckpointer(DefaultCheckpointerArguments(save_dir=str(two), log_level="ERROR"))
    assert mark_of(checkpointer.load(True)) == 1
    assert caplog.text == ""
