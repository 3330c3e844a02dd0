"""The pool in which distributed cases share their ranks: each case begins with clean processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers import modules
from tests.helpers.processes import rank_pool, run_world
from tests.helpers.workers import RANK, training

pytestmark = pytest.mark.distributed


def leave(what: str = "nothing") -> dict[str, Any]:
    """Use a group, then leave a change in the process. Returns the process number and the first random number."""
    drawn = torch.rand(1).item()
    if what != "a killed rank":  # whose peer would wait for it at the end
        dist.init_process_group("gloo", init_method=f"file://{os.environ['RENDEZVOUS']}", rank=RANK, world_size=2)
    left = {"pid": os.getpid(), "drawn": drawn, "left": os.environ.get("LEFT"), "folder": os.getcwd()}
    if what == "a thread":
        threading.Thread(target=time.sleep, args=(60,), name="forgotten", daemon=True).start()
    if what == "a variable":
        os.environ["LEFT"] = "yes"
    if what == "a folder":
        os.chdir("/")
    if what == "a signal handler":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if what == "a patched name":
        modules.numbers = None  # type: ignore[assignment]
    if what == "a default of torch":
        torch.set_default_dtype(torch.float64)
    if what == "a killed rank" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "an error":
        raise ZeroDivisionError("divides by zero")
    return left


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, what: str, **options: Any) -> list[Any]:
    monkeypatch.setenv("RENDEZVOUS", str(folder / f"{time.monotonic_ns()}"))
    return run_world(2, leave, what=what, **options)


def test_cases_share_their_ranks_and_draw_the_same_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = run(monkeypatch, tmp_path, "nothing")

    assert run(monkeypatch, tmp_path, "nothing") == first
    assert [rank["pid"] for rank in run(monkeypatch, tmp_path, "nothing", fresh=True)] != [r["pid"] for r in first]


def test_a_training_leaves_its_ranks_to_the_next_case() -> None:
    before = len(rank_pool().left)

    run_world(2, training.few, count=3)

    assert rank_pool().left[before:] == []


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("a thread", "threads"),
        ("a variable", "environment"),
        ("a folder", "working directory"),
        ("a signal handler", "handler of SIGTERM"),
        ("a patched name", "tests.helpers.modules.numbers"),
        ("a default of torch", "default dtype"),
    ],
)
def test_ranks_that_keep_something_of_a_case_are_replaced(
    what: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = run(monkeypatch, tmp_path, what)

    assert rank_pool().left[-1] == [name]
    second = run(monkeypatch, tmp_path, "nothing")
    for before, after in zip(first, second, strict=True):
        assert after["pid"] != before["pid"]
        assert (after["left"], after["drawn"]) == (None, before["drawn"])


@pytest.mark.parametrize("what", ["a killed rank", "an error"])
def test_ranks_of_a_case_that_failed_are_replaced(what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = run(monkeypatch, tmp_path, "nothing")
    failed = run(monkeypatch, tmp_path, what, may_fail=True)

    assert failed[1]["exit"] == (-signal.SIGKILL if what == "a killed rank" else 1)
    assert not {rank["pid"] for rank in run(monkeypatch, tmp_path, "nothing")} & {rank["pid"] for rank in first}


def test_a_hanging_case_is_ended_with_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.helpers.processes.patience", lambda seconds: seconds)

    for rank in run_world(2, hang, timeout=2.0, may_fail=True):
        assert rank["exit"] == -signal.SIGABRT
        assert "in hang" in rank["stderr"]


def test_the_answer_of_an_interrupted_test_is_dropped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Interrupted:
        def readline(self) -> str:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rank_pool()._server, "stdout", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            run(monkeypatch, tmp_path, "nothing")
    answers = run(monkeypatch, tmp_path, "nothing", fresh=True)

    assert [rank["left"] for rank in answers] == [None, None]


def hang() -> None:
    time.sleep(3600)
