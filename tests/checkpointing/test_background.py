"""Saving in the background writes the state at the call of `save`, and reports each failure."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpointing.support import make_checkpoint, mark_of
from trainstack.checkpointing import (
    DefaultCheckpointer,
    DefaultCheckpointerArguments,
    default_checkpointer,
    filesystem,
    list_checkpoints,
    write_checkpoint,
)
from trainstack.checkpointing.async_writer import HostBuffers
from trainstack.errors import CheckpointError

FULL = OSError(errno.ENOSPC, "No space left on device")


class Gate:
    """Holds every write to a file until it is opened; may fail the write then."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self._write = filesystem.write

    def write(self, *args: Any) -> None:
        self.reached.set()
        assert self.opened.wait(20)
        if self.error is not None:
            raise self.error
        self._write(*args)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    monkeypatch.setattr(filesystem, "write", made.write)
    yield made
    made.opened.set()


def in_background(directory: Path) -> DefaultCheckpointer:
    return DefaultCheckpointer(DefaultCheckpointerArguments(save_dir=str(directory), async_save=True))


def test_changes_after_save_returned_are_not_in_the_checkpoint(tmp_path: Path, gate: Gate) -> None:
    one, state = in_background(tmp_path), make_checkpoint(1, step=1)
    assert state.module_interface_state is not None
    assert state.trainer_state is not None
    state.trainer_state["seen"] = [1, 2]
    one.save(state, 1)
    assert gate.reached.wait(20)
    for tensor in state.module_interface_state.values():
        tensor.fill_(9.0)
    state.trainer_state["mark"] = 9
    state.trainer_state["seen"].append(3)
    gate.opened.set()

    loaded = one.load(True)
    assert mark_of(loaded) == 1
    assert loaded.trainer_state is not None
    assert loaded.trainer_state["seen"] == [1, 2]


def test_the_files_are_those_of_a_save_in_the_foreground(tmp_path: Path) -> None:
    state = make_checkpoint(3, step=3)
    one = in_background(tmp_path / "a")
    path = one.save(state, 3)
    one.finish()
    other = write_checkpoint(state, tmp_path / "b", "checkpoint-000000003")

    assert path == str(tmp_path / "a" / "checkpoint-000000003")
    for name in ("model.safetensors", "state.safetensors", "state.json"):
        assert (Path(path) / name).read_bytes() == (other / name).read_bytes()


@pytest.mark.parametrize("then", ["save", "save_model", "load"])
def test_nothing_else_begins_before_the_running_save_has_ended(
    tmp_path: Path, gate: Gate, then: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = in_background(tmp_path)
    with caplog.at_level(logging.INFO, logger="trainstack"):
        one.save(make_checkpoint(1, step=1), 1)
        assert gate.reached.wait(20)
        assert not caplog.messages, "it is not saved before it is on the disk"
        opener = threading.Timer(0.1, gate.opened.set)
        opener.start()
        {
            "save": lambda: one.save(make_checkpoint(2, step=2), 2),
            "save_model": lambda: one.save_model({"w": torch.ones(1)}, 1),
            "load": lambda: one.load(True),
        }[then]()
        opener.join()
        assert caplog.messages[0] == f"saved {tmp_path / 'checkpoint-000000001'}"
        assert (" s for the save before" in caplog.text) is (then != "load")
        one.finish()
    assert [info.sequence for info in list_checkpoints(tmp_path)] == ([1] if then == "load" else [1, 2])


@pytest.mark.parametrize("ask", ["poll", "save", "save_model", "load", "finish"])
def test_a_failure_is_raised_once_with_its_cause(tmp_path: Path, gate: Gate, ask: str) -> None:
    one, woken = in_background(tmp_path), threading.Event()
    one.watch(woken.set)
    one.save(make_checkpoint(1, step=1), 1)
    one.poll()
    gate.error = FULL
    gate.opened.set()
    assert woken.wait(20)

    asked = {
        "poll": one.poll,
        "save": lambda: one.save(make_checkpoint(2, step=2), 2),
        "save_model": lambda: one.save_model({}, 1),
        "load": lambda: one.load(True),
        "finish": one.finish,
    }[ask]
    with pytest.raises(CheckpointError, match="checkpoint-000000001 could not be written") as raised:
        asked()
    assert raised.value.__cause__ is FULL
    gate.error = None
    one.save(make_checkpoint(3, step=3), 3)
    assert mark_of(one.load(True)) == 3


def test_an_unexpected_failure_is_named_as_the_cause(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    one = in_background(tmp_path)
    one.save(make_checkpoint(1, step=1), 1)
    gate.error = MemoryError("no more")
    gate.opened.set()
    with pytest.raises(CheckpointError, match="saving checkpoint-000000001 failed in the background: MemoryError"):
        one.finish()
    assert "saving checkpoint-000000001 in the background failed: no more" in caplog.text
    assert not list(tmp_path.iterdir())


def test_an_abandoned_save_leaves_no_trace(tmp_path: Path, gate: Gate) -> None:
    one = in_background(tmp_path)
    gate.opened.set()
    one.save(make_checkpoint(1, step=1), 1)
    one.finish()
    gate.reached.clear()
    gate.opened.clear()
    one.save(make_checkpoint(2, step=2), 2)
    assert gate.reached.wait(20)
    one.abandon()
    gate.opened.set()
    one.finish()

    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-000000001", "last"]
    assert mark_of(one.load(True)) == 1
    one.save(make_checkpoint(3, step=3), 3)
    assert mark_of(one.load(True)) == 3


def test_memory_is_taken_once_and_given_back_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[list[int]] = []
    commit = default_checkpointer.commit

    def recording(payload: Any, *args: Any) -> Path:
        places.append([tensor.data_ptr() for part in payload.parts.values() for _, tensor in part.tensors])
        return commit(payload, *args)

    monkeypatch.setattr(default_checkpointer, "commit", recording)
    one = in_background(tmp_path)
    for mark in (1, 2):
        one.save(make_checkpoint(mark, step=mark), mark)
    one.finish()
    assert places[0] == places[1]
    assert len(set(places[0])) == len(places[0])

    allocated: list[Any] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: allocated.append(args) or empty(*args, **kwargs))
    one.save(make_checkpoint(3, step=3), 3)
    assert len(allocated) == len(places[0])
    one.finish()


def test_buffers_hold_copies_and_are_reused_for_equal_layouts() -> None:
    buffers = HostBuffers()
    live = {"a": torch.arange(6.0).reshape(2, 3).t(), "b": torch.tensor(True), "c": torch.empty(0, dtype=torch.int16)}
    first = buffers.copy(live)
    live["a"].zero_()
    assert torch.equal(first["a"], torch.arange(6.0).reshape(2, 3).t())
    assert first["a"].is_contiguous()
    again = buffers.copy(live)
    assert [again[name].data_ptr() for name in live] == [first[name].data_ptr() for name in live]
    other = buffers.copy({"a": torch.ones(5), "b": torch.tensor(7)})
    assert other["a"].tolist() == [1.0] * 5
    assert other["b"].item() == 7
    assert sorted(other) == ["a", "b"]
