"""One ledger for all runs on a dataset: its sum, its budget, its chain, and copies of it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tests.backends.dp.support import make_plan
from trainstack.backends.dp import (
    Accountant,
    LedgerStore,
    OpenLedger,
    SharedUse,
    SpendLedger,
    best_of_epsilon,
    epsilon_of,
    register_ledger_store,
)
from trainstack.backends.dp import ledger_store as ledger_file
from trainstack.backends.dp.ledger_chain import MAX_LEDGER_BYTES, MAX_LINE_BYTES, LedgerChain, _digest
from trainstack.backends.dp.ledger_store import FileStore
from trainstack.errors import ConfigurationError, PrivacyBudgetError, PrivacyLedgerError

pytestmark = pytest.mark.usefixtures("unprobed")

SIGMA, Q = 1.0, 0.02
USE = SharedUse(name="patients", records=200)


def shared(path: Path, **changes: Any) -> SpendLedger:
    return SpendLedger(path, shared=SharedUse(**{"name": "patients", "records": 200, **changes}))


def accountant(ledger: SpendLedger, **given: Any) -> Accountant:
    plan, args = make_plan(**{"noise_multiplier": SIGMA, **given})
    return Accountant(plan, args, ledger)


def spend(run: Accountant, steps: int) -> Accountant:
    for _ in range(steps):
        run.charge()
    return run


def through_json(run: Accountant) -> dict[str, Any]:
    return dict(json.loads(json.dumps(run.get_state(), allow_nan=False)))


# --- the sum


def test_the_sum_is_that_of_all_runs_by_composition(tmp_path: Path) -> None:
    path = tmp_path / "dataset.ledger"
    spend(accountant(shared(path)), 30).settle()
    spend(accountant(shared(path), noise_multiplier=2.0), 50).settle()
    ledger = shared(path)
    assert ledger.spent() == [(1.0, Q, 30), (2.0, Q, 50)]
    assert sorted(ledger.runs().values()) == [30, 50]
    both = [(1.0, Q, 30), (2.0, Q, 50)]
    statement_of_both = epsilon_of(ledger.spent(), 1e-5, "rdp")
    assert statement_of_both == epsilon_of(both, 1e-5, "rdp") > epsilon_of(both[:1], 1e-5, "rdp")


def test_no_run_exceeds_the_budget_of_its_ledger(tmp_path: Path) -> None:
    path = tmp_path / "dataset.ledger"
    limit = epsilon_of([(SIGMA, Q, 50)], 1e-5, "rdp") * (1 + 1e-9)
    first = spend(accountant(shared(path, budget=(limit, 1e-5))), 30)
    first.settle()
    other = accountant(shared(path))  # which names no budget
    assert other.steps_allowed(100) == 20
    spend(other, 20)
    with pytest.raises(PrivacyBudgetError, match=r"budget of the privacy ledger .* after the steps of 2 runs"):
        other.charge()
    other.settle()
    assert shared(path).spent() == [(SIGMA, Q, 50)]
    with pytest.raises(PrivacyLedgerError, match="has the budget epsilon"):
        shared(path, budget=(2 * limit, 1e-5)).check_use()
    SpendLedger(path).set_budget(2 * limit, 1e-5)
    assert accountant(shared(path)).steps_allowed(100) > 20


def test_concurrent_runs_never_exceed_the_budget_together(tmp_path: Path) -> None:
    path = tmp_path / "dataset.ledger"
    limit = epsilon_of([(SIGMA, Q, 50)], 1e-5, "rdp") * (1 + 1e-9)
    runs = [accountant(shared(path, budget=(limit, 1e-5))) for _ in range(3)]
    taken = 0
    with contextlib.suppress(PrivacyBudgetError):
        for step in range(300):
            runs[step % 3].charge()
            taken += 1
    assert taken <= sum(SpendLedger(path).runs().values()) == 50


@pytest.mark.parametrize("change", [{"records": 201}, {"name": "customers"}])
def test_another_dataset_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "dataset.ledger"
    spend(accountant(shared(path)), 1)
    with pytest.raises(PrivacyLedgerError, match="that of the dataset patients with 200 records"):
        accountant(shared(path, **change)).on_fresh_start(retry=False)
    shared(path, name=None).check_use()


def test_the_first_name_of_a_dataset_holds_for_later_runs(tmp_path: Path) -> None:
    path = tmp_path / "dataset.ledger"
    spend(accountant(shared(path, name=None)), 1)
    spend(accountant(shared(path)), 1)
    assert SpendLedger(path).runs()
    found = SpendLedger(path)
    found.runs()
    assert found.dataset == ("patients", 200)
    with pytest.raises(PrivacyLedgerError, match="that of the dataset patients"):
        shared(path, name="customers").check_use()


def test_a_retry_continues_only_the_run_of_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "dataset.ledger"
    mine = spend(accountant(shared(path, folder="/mine")), 5)
    theirs = spend(accountant(shared(path, folder="/theirs")), 7)
    for folder, run in (("/mine", mine), ("/theirs", theirs)):
        again = accountant(shared(path, folder=folder))
        again.on_fresh_start(retry=True)
        assert again.run == run.run
    fresh = accountant(shared(path, folder="/third"))
    fresh.on_fresh_start(retry=True)
    assert fresh.steps == 0


def test_a_run_without_a_guarantee_voids_the_sum(tmp_path: Path) -> None:
    path = tmp_path / "dataset.ledger"
    run = accountant(shared(path))
    run.overrides = ("the seed is known",)
    spend(run, 20)
    assert shared(path).runs() == {run.run: 32}
    ledger = shared(path)
    ledger.runs()
    assert ledger.voided == {run.run: "the seed is known"}


def test_a_run_carries_its_steps_into_a_dataset_ledger(tmp_path: Path) -> None:
    own = SpendLedger(tmp_path / "run.ledger")
    first = spend(accountant(own), 20)
    first.settle()
    plan, args = make_plan(noise_multiplier=SIGMA)
    resumed = Accountant(plan, args, shared(tmp_path / "dataset.ledger"), earlier_ledger=SpendLedger(own.path))
    resumed.update_state(through_json(first))
    spend(resumed, 4).settle()
    assert shared(tmp_path / "dataset.ledger").spent() == [(SIGMA, Q, 24)]
    with pytest.raises(PrivacyLedgerError, match="write ledger="):  # the own ledger says that it was left
        accountant(SpendLedger(own.path)).update_state(through_json(resumed))


# --- the chain


def test_an_older_copy_of_the_ledger_is_recognised_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "privacy.ledger"
    run = spend(accountant(SpendLedger(path)), 20)
    run.settle()
    older = path.read_bytes()
    spend(run, 40).settle()
    state = through_json(run)
    state["history"], state["clippings"] = [[SIGMA, Q, 20]], []  # the older copy covers these steps
    path.write_bytes(older)
    with pytest.raises(PrivacyLedgerError, match=r"lacks the newest line .* it is an older copy"):
        accountant(SpendLedger(path)).update_state(state)
    reported = accountant(SpendLedger(path), on_unsafe="report")
    reported.update_state(state)
    assert "an older copy" in reported.overrides[0]


def test_lines_cannot_be_removed_or_exchanged(tmp_path: Path) -> None:
    path = tmp_path / "privacy.ledger"
    spend(accountant(SpendLedger(path)), 60)
    lines = path.read_bytes().splitlines(keepends=True)
    for changed in (lines[1:], [lines[0], *lines[2:]], [lines[1], lines[0], *lines[2:]], [lines[0], *lines]):
        path.write_bytes(b"".join(changed))
        with pytest.raises(PrivacyLedgerError, match="is damaged in the line"):
            SpendLedger(path).spent()


@pytest.mark.parametrize("extra", [0, 1])
def test_a_line_that_is_too_long_is_damage(extra: int, tmp_path: Path) -> None:
    path, head = tmp_path / "privacy.ledger", 33  # bytes of a digest and a space
    record = {"prev": "", "text": ""}
    record["text"] = "x" * (MAX_LINE_BYTES - head - len(json.dumps(record)) + extra)
    text = json.dumps(record)
    path.write_text(f"{_digest(text)} {text}\n")
    chain = LedgerChain(FileStore(path), lambda _: None)
    with pytest.raises(PrivacyLedgerError, match="is damaged in the line") if extra else contextlib.nullcontext():
        chain.read_new()


def test_a_ledger_without_a_chain_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "privacy.ledger"
    text = '{"q":0.02,"run":"r","sigma":1.0,"steps":16}'
    path.write_text(f"{xxhash.xxh3_64_hexdigest(text.encode())} {text}\n", encoding="utf-8")
    ledger = SpendLedger(path)
    ledger.charge("r", SIGMA, Q)
    ledger.settle()
    assert SpendLedger(path).spent("r") == [(SIGMA, Q, 17)]
    old_line = path.read_bytes().splitlines(keepends=True)[0]
    path.write_bytes(path.read_bytes() + old_line)
    with pytest.raises(PrivacyLedgerError, match="damaged"):
        SpendLedger(path).spent("r")


@pytest.mark.parametrize("size", [4 << 40, MAX_LEDGER_BYTES - 1], ids=["4 TiB", "1 GiB"])
def test_a_huge_sparse_file_is_refused_at_once(size: int, tmp_path: Path) -> None:
    path = tmp_path / "privacy.ledger"
    with path.open("wb") as file:
        try:
            file.truncate(size)
        except OSError:
            pytest.skip("the file system has no such files")
    begin = time.monotonic()
    with pytest.raises(PrivacyLedgerError, match=r"bytes, more than|damaged"):
        SpendLedger(path).spent()
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    "record",
    [{"run": "r", "sigma": 1.0, "q": 2.0, "steps": 1}, {"run": "r", "sigma": 1.0, "q": 0.1, "steps": -1}, {"steps": 1}],
)
def test_lines_that_no_run_has_written_are_refused(record: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "privacy.ledger"
    with contextlib.suppress(PrivacyLedgerError):
        LedgerChain(FileStore(path), lambda _: None).append(lambda: [record])
    with pytest.raises(PrivacyLedgerError, match="is not a privacy ledger"):
        SpendLedger(path).spent()


# --- copies


def test_each_copy_of_a_copied_folder_names_the_other(tmp_path: Path) -> None:
    first = spend(accountant(SpendLedger(tmp_path / "one" / "privacy.ledger")), 20)
    first.settle()
    state = through_json(first)
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    copy = SpendLedger(tmp_path / "other" / "privacy.ledger")
    expected = f"Copied at step 20 from {tmp_path / 'one' / 'privacy.ledger'}; steps of the other copy after that"
    assert [words[: len(expected)] for words in copy.copies(first.run)] == [expected]  # before its first step
    branch = accountant(copy)
    branch.update_state(state)
    spend(branch, 30).settle()
    spend(first, 30).settle()
    again = SpendLedger(copy.path).copies(first.run)
    assert [words[: len(expected)] for words in again] == [expected]
    (told,) = first.ledger.copies(first.run) if first.ledger else []
    assert told.startswith(f"Copied at step 20 to {tmp_path / 'other' / 'privacy.ledger'}")
    assert (branch.steps, first.steps) == (50, 50)


def test_a_renamed_folder_is_not_a_copy(tmp_path: Path) -> None:
    run = spend(accountant(SpendLedger(tmp_path / "one" / "privacy.ledger")), 20)
    run.settle()
    (tmp_path / "one").rename(tmp_path / "renamed")
    moved = SpendLedger(tmp_path / "renamed" / "privacy.ledger")
    assert moved.copies(run.run) == []
    moved.charge(run.run, SIGMA, Q)
    assert SpendLedger(moved.path).copies(run.run) == []


def test_a_copy_without_its_original_says_moved_or_copied(tmp_path: Path) -> None:
    run = spend(accountant(SpendLedger(tmp_path / "one" / "privacy.ledger")), 20)
    run.settle()
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    shutil.rmtree(tmp_path / "one")
    (words,) = SpendLedger(tmp_path / "other" / "privacy.ledger").copies(run.run)
    assert words.startswith("Moved or copied at step 20 from ")


# --- T-2 and T-15


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_waits_for_another_that_writes_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, half, asked = (tmp_path / name for name in ("privacy.ledger", "half", "asked"))
    child = os.fork()
    if child == 0:

        def slowly(descriptor: int, data: bytes) -> None:
            os.write(descriptor, data[:20])
            half.touch()
            while not asked.exists():
                time.sleep(0.005)
            time.sleep(0.05)
            os.write(descriptor, data[20:])

        monkeypatch.setattr(ledger_file, "write", slowly)
        with contextlib.suppress(BaseException):
            SpendLedger(path, block=1).charge("child", SIGMA, Q)
            os._exit(0)
        os._exit(1)
    while not half.exists():
        time.sleep(0.005)
    fcntl = pytest.importorskip("fcntl")
    lock = fcntl.flock

    def noted(*args: int) -> None:
        asked.touch()
        lock(*args)

    monkeypatch.setattr(fcntl, "flock", noted)
    SpendLedger(path, block=1).charge("parent", SIGMA, Q)
    assert os.waitpid(child, 0)[1] == 0
    assert SpendLedger(path).runs() == {"parent": 1, "child": 1}


def test_a_ledger_that_could_not_be_settled_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "privacy.ledger"
    ledger = SpendLedger(path)
    charges = 3
    for _ in range(charges):
        ledger.charge("r", SIGMA, Q)

    def fail(_: int) -> None:
        monkeypatch.undo()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(ledger_file, "sync", fail)
    with pytest.raises(PrivacyLedgerError, match="Input/output error"):
        ledger.settle()
    for _ in range(20):
        ledger.charge("r", SIGMA, Q)
        charges += 1
    assert sum(SpendLedger(path).runs().values()) >= charges


def test_a_run_that_returns_to_a_ledger_charges_it_again(tmp_path: Path) -> None:
    def moved(path: Path) -> dict[str, str]:
        ledger = SpendLedger(path)
        ledger.runs()  # reads the file
        return ledger.moved

    first, second = tmp_path / "a", tmp_path / "b"
    SpendLedger(first).charge("r", SIGMA, Q)
    SpendLedger(second).carry_from(SpendLedger(first), "r")
    assert (moved(first), moved(second)) == ({"r": str(second)}, {})

    SpendLedger(first).carry_from(SpendLedger(second), "r")
    assert (moved(first), moved(second)) == ({}, {"r": str(first)})


# --- stores


class Memory(LedgerStore, OpenLedger):
    """A ledger in memory."""

    kept: dict[str, bytes] = {}  # noqa: RUF012

    def __init__(self, address: str) -> None:
        self.address = address

    def exists(self) -> bool:
        return self.address in self.kept

    @contextlib.contextmanager
    def open(self, *, write: bool) -> Any:
        yield self

    def size(self) -> int:
        return len(self.kept.get(self.address, b""))

    def read(self, begin: int, count: int) -> bytes:
        return self.kept.get(self.address, b"")[begin : begin + count]

    def append(self, data: bytes) -> None:
        self.kept[self.address] = self.kept.get(self.address, b"") + data

    def cut(self, size: int) -> None:
        self.kept[self.address] = self.kept[self.address][:size]


def test_a_registered_store_keeps_a_ledger() -> None:
    with pytest.raises(ConfigurationError, match="no ledger store 'memory' is registered"):
        SpendLedger("memory://patients")
    register_ledger_store("memory", Memory)
    spend(accountant(SpendLedger("memory://patients", shared=USE)), 5).settle()
    assert SpendLedger("memory://patients").spent() == [(SIGMA, Q, 5)]
    with pytest.raises(ConfigurationError, match="registered already"):
        register_ledger_store("memory", FileStore)


# --- the best of K runs


@pytest.mark.parametrize("mean_runs", [1.0, 10.0, 100.0])
def test_the_cost_of_the_best_run_follows_the_theorem(mean_runs: float) -> None:
    """Theorem 6 of Papernot and Steinke (2022) for Gaussian steps on all records, whose curve is a / (2 sigma^2)."""
    sigma, steps, delta = 8.0, 10, 1e-6
    rate = steps / (2 * sigma**2)
    orders = [1 + n / 100 for n in range(1, 100_00)]

    def delta_at(epsilon: float) -> float:
        return math.exp(min(0.0, *((a - 1) * (rate * a - epsilon + math.log1p(-1 / a)) - math.log(a) for a in orders)))

    def whole(a: float) -> float:
        return rate * a + mean_runs * delta_at(math.log1p(1 / (a - 1))) + math.log(mean_runs) / (a - 1)

    coarse = orders[::25]
    by_hand = min(whole(a) + math.log1p(-1 / a) - (math.log(delta) + math.log(a)) / (a - 1) for a in coarse)
    found = best_of_epsilon([(sigma, 1.0, steps)], delta, mean_runs)
    assert by_hand * 0.98 < found < by_hand * 1.05
    one = epsilon_of([(sigma, 1.0, steps)], delta, "rdp")
    assert one <= found
    assert mean_runs == 1.0 or found < epsilon_of([(sigma, 1.0, int(steps * mean_runs))], delta, "rdp")


def test_the_best_of_runs_without_noise_has_no_bound() -> None:
    assert best_of_epsilon([(0.0, 0.1, 1)], 1e-5, 3.0) == math.inf
    with pytest.raises(ConfigurationError, match="mean_runs"):
        best_of_epsilon([(1.0, 0.1, 1)], 1e-5, 0.0)
