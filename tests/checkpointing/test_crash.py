"""A save that is interrupted anywhere leaves a directory from which training continues."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.checkpointing.support import make_checkpoint, mark_of
from trainstack.checkpointing import (
    Checkpoint,
    DefaultCheckpointer,
    DefaultCheckpointerArguments,
    filesystem,
    list_checkpoints,
    write_checkpoint,
)
from trainstack.errors import CheckpointError

FULL = OSError(errno.ENOSPC, "No space left on device")
CALLS = ["make_directory", "open_new", "write", "sync_file", "sync_directory", "rename", "remove_tree"]
CALLS += ["replace", "remove_file"]
POINTS = range(1, 40)
NAMES = {"new name": "checkpoint-000000002", "same name": "checkpoint-000000001"}


class Crash(BaseException):
    """The end of the process, as far as code that handles exceptions can tell."""


def instrument(monkeypatch: pytest.MonkeyPatch, before: Callable[[int, str, tuple[Any, ...]], None]) -> list[int]:
    """Call `before(number, name, arguments)` ahead of every call that touches the file system."""
    count = [0]
    for name in CALLS:
        original = getattr(filesystem, name)

        def wrapped(*args: Any, name: str = name, original: Callable[..., Any] = original) -> Any:
            count[0] += 1
            before(count[0], name, args)
            return original(*args)

        monkeypatch.setattr(filesystem, name, wrapped)
    return count


def newest(directory: Path) -> int:
    arguments = DefaultCheckpointerArguments(save_dir=str(directory))
    return mark_of(DefaultCheckpointer(arguments).load(True))


def save_next(directory: Path, mark: int) -> None:
    checkpointer = DefaultCheckpointer(DefaultCheckpointerArguments(save_dir=str(directory)))
    checkpointer.save(make_checkpoint(mark, step=mark), index=mark)


def save(mark: int, directory: Path, name: str, in_background: bool) -> None:
    """Write a checkpoint and wait for it."""
    if not in_background:
        write_checkpoint(make_checkpoint(mark), directory, name)
        return
    checkpointer = DefaultCheckpointer(DefaultCheckpointerArguments(save_dir=str(directory), async_save=True))
    checkpointer.save(make_checkpoint(mark, step=int(name[-9:])), index=mark)
    checkpointer.finish()


def expect_recovery(directory: Path) -> None:
    """The next run continues, and removes everything that the last one left."""
    save_next(directory, 7)
    assert newest(directory) == 7
    assert not list(directory.glob(".*"))


def test_files_reach_the_disk_before_the_name_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(make_checkpoint(1), tmp_path, "a")
    events: list[str] = []

    def record(number: int, name: str, args: tuple[Any, ...]) -> None:
        target = Path(args[0].name if name in ("sync_file", "write") else args[0])
        short = target.name[:4] if target.name.startswith(".") else target.name
        if name != "write":
            events.append(f"{name} {short}")

    instrument(monkeypatch, record)
    write_checkpoint(make_checkpoint(2), tmp_path, "a")
    assert events == [
        "make_directory .tmp",
        "open_new model.safetensors",
        "sync_file model.safetensors",
        "open_new state.safetensors",
        "sync_file state.safetensors",
        "open_new state.json",
        "sync_file state.json",
        "open_new index.json",
        "sync_file index.json",
        "open_new MANIFEST.json",
        "sync_file MANIFEST.json",
        "sync_directory .tmp",
        "rename a",
        "rename .tmp",
        f"sync_directory {tmp_path.name}",
        "rename .old",
        f"sync_directory {tmp_path.name}",
        "remove_tree .tmp",
    ]


@pytest.mark.processes
@pytest.mark.spec("F116")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("in_background", "name"),
    [
        (False, NAMES["same name"]),
        (True, NAMES["new name"]),
        pytest.param(False, NAMES["new name"], marks=pytest.mark.long),
        pytest.param(True, NAMES["same name"], marks=pytest.mark.long),
    ],
)
def test_a_death_before_any_call_loses_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, in_background: bool
) -> None:
    for point in POINTS:
        directory = tmp_path / str(point)
        write_checkpoint(make_checkpoint(1), directory, "checkpoint-000000001")
        child = os.fork()
        if child == 0:  # ends without exit handlers, as after a kill
            instrument(monkeypatch, lambda number, *_, point=point: os._exit(9) if number == point else None)
            save(2, directory, name, in_background)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert newest(directory) in (1, 2)
        if status == 0:
            assert newest(directory) == 2
            assert point > 20
            break
        expect_recovery(directory)
    else:
        pytest.fail("a save has more calls than the test has points")


def ways_to_fail() -> Iterator[Any]:
    """All cases in the foreground; in the background two that differ in each parameter, the others with `--long`."""
    for background, lasting, (error, what), name in itertools.product(
        (False, True), (False, True), ((FULL, "full"), (Crash(), "crash")), NAMES
    ):
        words = "background" if background else "foreground", "for good" if lasting else "once", what, name
        short = lasting == (what == "full") == (name == "new name")
        marks = [pytest.mark.slow, *([] if short else [pytest.mark.long])] if background else []
        yield pytest.param(NAMES[name], error, lasting, background, id="-".join(words), marks=marks)


@pytest.mark.spec("F116")
@pytest.mark.parametrize(("name", "error", "lasting", "in_background"), list(ways_to_fail()))
def test_a_failure_of_any_call_loses_no_checkpoint(
    tmp_path: Path, name: str, error: BaseException, lasting: bool, in_background: bool
) -> None:
    for point in POINTS:
        directory = tmp_path / str(point)
        write_checkpoint(make_checkpoint(1), directory, "checkpoint-000000001")

        def fail(number: int, *_: Any, point: int = point) -> None:
            if number == point or (lasting and number > point):
                raise error

        with pytest.MonkeyPatch.context() as patch:
            count = instrument(patch, fail)
            raised: BaseException | None = None
            try:
                save(2, directory, name, in_background)
            except (CheckpointError, Crash) as caught:
                raised = error if caught.__cause__ is error and error is not FULL else caught
        assert newest(directory) in ((1, 2) if raised else (2,))
        if isinstance(raised, CheckpointError):
            assert raised.__cause__ is FULL
            assert "No space left on device. Earlier checkpoints are intact" in str(raised)
            assert lasting or not list(directory.glob(".tmp-*"))
        if count[0] < point:
            break
        expect_recovery(directory)
    else:
        pytest.fail("a save has more calls than the test has points")


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_dies_saving_keeps_a_best_checkpoint(tmp_path: Path) -> None:
    """Older checkpoints, the previous best among them, are deleted last."""
    arguments: dict[str, Any] = {"keep_last": 1, "keep_best": 1, "monitor": "val/accuracy"}
    before = tmp_path / "before"
    for mark, accuracy in ((1, 0.8), (2, 0.5)):
        made = DefaultCheckpointerArguments(save_dir=str(before), **arguments)
        DefaultCheckpointer(made).save(measured(mark, accuracy), index=mark)
    for point in range(1, 80):
        directory = tmp_path / str(point)
        shutil.copytree(before, directory)
        made = DefaultCheckpointerArguments(save_dir=str(directory), **arguments)
        child = os.fork()
        if child == 0:
            with pytest.MonkeyPatch.context() as patch:
                instrument(patch, lambda number, *_, point=point: os._exit(9) if number == point else None)
                DefaultCheckpointer(made).save(measured(3, 0.9), index=3)
                os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        best, last = (mark_of(DefaultCheckpointer(made).load(which)) for which in ("best", "last"))
        assert (best, last) in ((1, 2), (3, 3))
        if status == 0:
            assert best == 3
            assert [info.global_step for info in list_checkpoints(directory)] == [3]
            assert point > 25
            break
    else:
        pytest.fail("a save has more calls than the test has points")


def measured(mark: int, accuracy: float) -> Checkpoint:
    return dataclasses.replace(make_checkpoint(mark, step=mark), metadata={"metrics": {"val/accuracy": accuracy}})


def save_for_ever(directory: Path, in_background: bool, said: int) -> None:
    """Write the number of each checkpoint that was saved to the pipe `said`."""
    made = DefaultCheckpointerArguments(save_dir=str(directory), async_save=in_background)
    checkpointer = DefaultCheckpointer(made)
    for mark in itertools.count(1):
        checkpointer.save(make_checkpoint(mark, step=mark % 3), index=0)
        os.write(said, b"%d\n" % mark)


@pytest.mark.processes
@pytest.mark.spec("F116")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("in_background", [False, True], ids=["foreground", "background"])
def test_a_killed_process_loses_nothing_that_it_said_was_saved(tmp_path: Path, in_background: bool) -> None:
    for kill in range(4):
        heard, said_to = os.pipe()
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                save_for_ever(tmp_path, in_background, said_to)
            os._exit(1)
        os.close(said_to)
        with open(heard) as pipe:
            said = [int(pipe.readline()) for _ in range(1 + in_background)]
            time.sleep(0.05 + 0.037 * kill)
            os.kill(child, signal.SIGKILL)
            said += [int(line) for line in pipe]
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        surely = said[-1] - in_background  # the next save begins when the last one is safe
        assert surely <= newest(tmp_path) <= said[-1] + 1
    expect_recovery(tmp_path)
