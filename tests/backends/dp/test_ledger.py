"""After any end of a process, the ledger has at least the steps that it took, and at most a block more."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backends.dp.support import make_accountant
from tests.helpers.patience import patience
from trainstack import _files
from trainstack.backends.dp import Accountant, SpendLedger
from trainstack.backends.dp import ledger_store as ledger_file
from trainstack.backends.dp.ledger_chain import LedgerChain
from trainstack.backends.dp.ledger_store import FileStore
from trainstack.errors import PrivacyLedgerError

RUN, SIGMA, Q, BLOCK = "run-a", 1.0, 0.02, 4
CALLS = [(ledger_file, name) for name in ("make_directories", "write", "sync", "cut", "sync_directory")]
CALLS += [(_files, "sync_directory")]


class Crash(BaseException):
    """The end of the process, as far as code that handles exceptions can tell."""


def make_ledger(path: Path) -> SpendLedger:
    return SpendLedger(path, block=BLOCK)


def total(path: Path, run: str = RUN) -> int:
    """The count that a new process reads."""
    return sum(steps for _, _, steps in SpendLedger(path).spent(run))


def charge(ledger: SpendLedger, steps: int) -> None:
    for _ in range(steps):
        ledger.charge(RUN, SIGMA, Q)


def test_steps_are_recorded_in_blocks_and_unused_ones_returned(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "privacy.ledger"
    ledger = make_ledger(path)
    assert (ledger.spent(RUN), path.exists()) == ([], False)
    charge(ledger, 5)
    assert ledger.spent(RUN) == [(SIGMA, Q, 5)]
    assert (total(path), ledger.reserved(RUN, SIGMA, Q)) == (8, 3)
    ledger.settle()
    assert (total(path), ledger.reserved(RUN, SIGMA, Q)) == (5, 0)
    ledger.settle()
    charge(ledger, 1)
    assert (ledger.spent(RUN), total(path)) == ([(SIGMA, Q, 6)], 9)


def test_a_block_costs_one_synced_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = instrument(monkeypatch, lambda *_: None, [(ledger_file, "sync")])
    ledger = SpendLedger(tmp_path / "privacy.ledger")
    charge(ledger, 160)
    assert syncs[0] == len((tmp_path / "privacy.ledger").read_bytes().splitlines()) == 10


def test_other_noise_and_other_runs_are_counted_apart(tmp_path: Path) -> None:
    ledger = make_ledger(tmp_path / "privacy.ledger")
    charge(ledger, 2)
    ledger.charge(RUN, 2.0, Q)
    ledger.charge("run-b", SIGMA, Q)
    assert ledger.spent(RUN) == [(SIGMA, Q, 2), (2.0, Q, 1)]
    assert ledger.spent("run-b") == [(SIGMA, Q, 1)]
    ledger.settle()
    assert (total(tmp_path / "privacy.ledger"), total(tmp_path / "privacy.ledger", "run-b")) == (3, 1)


def test_processes_at_the_same_time_add_up(tmp_path: Path) -> None:
    path = tmp_path / "privacy.ledger"
    first, second = make_ledger(path), make_ledger(path)
    for _ in range(3):
        charge(first, 3)
        charge(second, 5)
    first.settle()
    second.settle()
    assert total(path) == 24 == first.spent(RUN)[0][2]


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_does_not_take_its_parents_steps(tmp_path: Path) -> None:
    path = tmp_path / "privacy.ledger"
    ledger = make_ledger(path)
    charge(ledger, 1)
    child = os.fork()
    if child == 0:
        charge(ledger, 3)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    charge(ledger, 3)
    assert total(path) >= 7


# --- possible damage of the file


@given(cut=st.integers(1, 200))
@settings(max_examples=30)
def test_a_torn_last_line_is_cut_off(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("torn") / "privacy.ledger"
    charge(make_ledger(path), 2 * BLOCK)
    data = path.read_bytes()
    last = len(data.splitlines(keepends=True)[-1])
    path.write_bytes(data[: -min(cut, last)])
    assert total(path) == BLOCK
    charge(make_ledger(path), 1)
    assert total(path) == 2 * BLOCK
    assert path.read_bytes().endswith(b"\n")


@pytest.mark.parametrize("line", [0, 1])
def test_a_line_that_was_altered_is_refused(tmp_path: Path, line: int) -> None:
    path = tmp_path / "privacy.ledger"
    charge(make_ledger(path), 2 * BLOCK)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line] = lines[line].replace(b'"steps":4', b'"steps":1')
    path.write_bytes(b"".join(lines))
    for use in (lambda ledger: ledger.spent(RUN), lambda ledger: charge(ledger, 1)):
        with pytest.raises(PrivacyLedgerError, match=r"is damaged in the line .* Put an undamaged copy"):
            use(make_ledger(path))


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "privacy.ledger"
    LedgerChain(FileStore(path), lambda _: None).append(lambda: [{"loss": 0.5}])
    with pytest.raises(PrivacyLedgerError, match="is not a privacy ledger"):
        make_ledger(path).spent(RUN)


@pytest.mark.parametrize("change", [lambda path: path.write_bytes(b""), Path.unlink], ids=["emptied", "deleted"])
def test_a_file_that_disappears_during_a_run_stops_it(tmp_path: Path, change: Callable[[Path], Any]) -> None:
    path = tmp_path / "privacy.ledger"
    ledger = make_ledger(path)
    charge(ledger, 1)
    change(path)
    with pytest.raises(PrivacyLedgerError):
        ledger.spent(RUN)
    with pytest.raises(PrivacyLedgerError, match="has become shorter"):
        charge(ledger, BLOCK)


# --- every point at which a process may end


def instrument(
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[int, str, tuple[Any, ...]], None],
    calls: Sequence[tuple[ModuleType, str]] = CALLS,
) -> list[int]:
    """Call `before(number, name, arguments)` ahead of every call that changes the file system."""
    count = [0]
    for module, name in calls:
        original = getattr(module, name)

        def wrapped(*args: Any, name: str = name, original: Callable[..., Any] = original) -> Any:
            count[0] += 1
            before(count[0], name, args)
            return original(*args)

        monkeypatch.setattr(module, name, wrapped)
    return count


def train(path: Path, taken: list[int]) -> None:
    """A run of 11 steps with a checkpoint after the 6th and a clean end."""
    ledger = make_ledger(path)
    for step in range(1, 12):
        charge(ledger, 1)
        taken[0] = step
        if step in (6, 11):
            ledger.settle()


@pytest.mark.parametrize("torn", [False, True], ids=["before the call", "in the middle of a write"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), Crash()], ids=["failure", "crash"])
def test_an_end_at_any_call_never_undercounts(tmp_path: Path, torn: bool, error: BaseException) -> None:
    for point in range(1, 60):
        path = tmp_path / str(point) / "privacy.ledger"
        taken = [0]

        def fail(number: int, name: str, args: tuple[Any, ...], point: int = point) -> None:
            if number == point:
                if torn and name == "write":
                    os.write(args[0], args[1][: len(args[1]) // 2])
                raise error

        with pytest.MonkeyPatch.context() as patch:
            count = instrument(patch, fail)
            try:
                train(path, taken)
            except (PrivacyLedgerError, Crash):
                assert count[0] == point
        assert taken[0] <= total(path) <= taken[0] + BLOCK
        charge(make_ledger(path), 1)  # and the next run continues
        assert taken[0] + 1 <= total(path) <= taken[0] + 2 * BLOCK
        if count[0] < point:
            assert (taken[0], point > 10) == (11, True)
            return
    pytest.fail("a run has more calls than the test has points")


def resume(directory: Path) -> Accountant:
    """A run that continues from the checkpoint in `directory`, if there is one."""
    run = make_accountant(SpendLedger(directory / "privacy.ledger"))
    if (directory / "checkpoint.json").exists():
        run.update_state(json.loads((directory / "checkpoint.json").read_text()))
    return run


def save(run: Accountant, directory: Path) -> None:
    run.settle()
    (directory / "new").write_text(json.dumps(run.get_state()))
    (directory / "new").replace(directory / "checkpoint.json")


def train_until_killed(directory: Path) -> None:
    run = resume(directory)
    truth = os.open(directory / "truth", os.O_WRONLY | os.O_APPEND)
    while True:
        run.charge()
        os.write(truth, b".")  # the step itself: from here on its result may have been seen
        if run.steps % 7 == 0:
            save(run, directory)


def wait_for(steps: int, truth: Path) -> None:
    deadline = time.monotonic() + patience(30)
    while truth.stat().st_size < steps:
        assert time.monotonic() < deadline, "the process takes no steps"
        time.sleep(0.0005)


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))])
def test_a_killed_run_reports_at_least_the_steps_it_took(tmp_path: Path, seed: int) -> None:
    truth, moments = tmp_path / "truth", random.Random(seed)
    truth.touch()
    save(resume(tmp_path), tmp_path)
    for kill in range(1, 31):
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                train_until_killed(tmp_path)
            os._exit(1)
        wait_for(truth.stat().st_size + moments.randrange(25), truth)
        time.sleep(moments.uniform(0.0, 0.003))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert truth.stat().st_size <= resume(tmp_path).steps <= truth.stat().st_size + 16 * kill
