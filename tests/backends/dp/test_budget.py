"""The accountant charges before the step, stops at the budget, and continues after a resume."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from tests.backends.dp.support import make_accountant
from trainstack.backends.dp import Accountant, SpendLedger, epsilon_of
from trainstack.backends.dp.budget import NO_LEDGER
from trainstack.errors import CheckpointMismatchError, PrivacyBudgetError, PrivacyLedgerError


def spend(accountant: Accountant, steps: int) -> Accountant:
    for _ in range(steps):
        accountant.charge()
    return accountant


def spend_all(accountant: Accountant) -> int:
    steps = 0
    while accountant.allows():
        accountant.charge()
        steps += 1
    return steps


def test_unused_steps_of_an_early_stop_keep_their_planned_noise(ledger: SpendLedger) -> None:
    first = spend(make_accountant(ledger, noise_multiplier=0.5), 3)
    first.plan_unused(7)
    again = make_accountant(SpendLedger(ledger.path), noise_multiplier=4.0, allow_plan_change=True, max_epsilon=50.0)
    again.update_state(through_json(first))
    assert again.unused == [(0.5, 0.02, 7)]
    again.plan_steps(5)
    assert again._stated == [(0.5, 0.02, 10), (4.0, 0.02, 5)]
    planned = make_accountant(SpendLedger(ledger.path), noise_multiplier=0.5, allow_plan_change=True)
    planned.update_state(through_json(again))
    assert planned.plan_steps(2) == [(0.5, 0.02, 10)]  # more steps of the same noise are recorded than planned now
    spend(again, 2)
    assert (again.unused, again.history) == ([(0.5, 0.02, 7)], [(0.5, 0.02, 3), (4.0, 0.02, 2)])
    whole = epsilon_of([(0.5, 0.02, 10), (4.0, 0.02, 2)], 1e-5, "rdp")
    tight = make_accountant(
        SpendLedger(ledger.path), noise_multiplier=4.0, allow_plan_change=True, max_epsilon=whole - 1e-3
    )
    tight.update_state(through_json(again))
    assert not tight.allows()
    same = make_accountant(SpendLedger(ledger.path), noise_multiplier=0.5, allow_plan_change=True)
    same.update_state(through_json(again))
    assert spend(same, 4).unused == [(0.5, 0.02, 3)]


def through_json(accountant: Accountant) -> dict[str, Any]:
    return dict(json.loads(json.dumps(accountant.get_state(), allow_nan=False)))


@pytest.fixture
def ledger(tmp_path: Path) -> SpendLedger:
    return SpendLedger(tmp_path / "privacy.ledger")


def another(ledger: SpendLedger) -> SpendLedger:
    """The same file, as a process that starts later opens it."""
    return SpendLedger(ledger.path)


def test_epsilon_is_that_of_the_steps_charged() -> None:
    accountant = make_accountant()
    assert (accountant.steps, accountant.epsilon(), accountant.history) == (0, 0.0, [])
    spend(accountant, 7)
    assert accountant.history == [(1.0, 0.02, 7)]
    assert accountant.epsilon() == epsilon_of([(1.0, 0.02, 7)], 1e-5, "rdp")


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
@pytest.mark.parametrize("with_ledger", [False, True], ids=["alone", "with a ledger"])
def test_a_run_stops_at_the_last_step_within_its_budget(accountant: str, with_ledger: bool, tmp_path: Path) -> None:
    ledger = SpendLedger(tmp_path / "privacy.ledger") if with_ledger else None
    run = make_accountant(ledger, max_epsilon=2.0, accountant=accountant, steps=1000)
    steps = spend_all(run)
    beyond = epsilon_of([(1.0, 0.02, steps + 1)], 1e-5, accountant)
    assert run.epsilon() <= 2.0 < beyond
    with pytest.raises(PrivacyBudgetError, match=rf"after {steps} steps, and one more would exceed max_epsilon=2\.0"):
        run.charge()
    assert run.steps == steps


def test_a_spent_budget_stays_spent_after_a_resume(ledger: SpendLedger) -> None:
    spent = make_accountant(ledger, max_epsilon=2.0)
    spend_all(spent)
    for other in (None, another(ledger)):
        resumed = make_accountant(other, max_epsilon=2.0)
        assert resumed.allows()
        resumed.update_state(through_json(spent))
        assert not resumed.allows()
        with pytest.raises(PrivacyBudgetError):
            resumed.charge()
        assert resumed.epsilon() == spent.epsilon() <= 2.0


def test_a_run_may_exceed_its_plan_within_its_budget() -> None:
    planned_well = spend_all(make_accountant(max_epsilon=2.0, steps=1000))
    assert spend_all(make_accountant(max_epsilon=2.0, steps=10)) == planned_well > 10


def test_a_target_allows_exactly_the_planned_steps_and_hardly_more() -> None:
    run = make_accountant(noise_multiplier=None, target_epsilon=2.0, steps=300)
    assert run.allows(300)
    assert 300 <= spend_all(run) < 310


def test_without_a_budget_nothing_stops_a_run() -> None:
    run = make_accountant(noise_multiplier=0.0)
    assert run.allows(10**9)
    assert spend(run, 1).epsilon() == float("inf")


def test_an_interrupted_run_spends_as_much_as_an_unbroken_one(ledger: SpendLedger) -> None:
    whole = spend_all(make_accountant(max_epsilon=2.0))
    for other in (False, True):
        state, steps = None, 0
        for piece in random.Random(1).choices(range(1, 40), k=50):
            run = make_accountant(another(ledger) if other else None, max_epsilon=2.0)
            if state is not None:
                run.update_state(state)
            piece = min(piece, whole - steps)
            spend(run, piece)
            run.settle()
            state, steps = through_json(run), steps + piece
        assert (steps, run.steps, run.allows()) == (whole, whole, False)


def test_steps_that_a_crash_counts_twice_never_exceed_the_budget(ledger: SpendLedger) -> None:
    killed = make_accountant(ledger, max_epsilon=2.0)
    most = spend_all(make_accountant(max_epsilon=2.0))
    spend(killed, most - 3)
    resumed = make_accountant(another(ledger), max_epsilon=2.0)
    resumed.update_state(through_json(killed))
    assert resumed.steps + spend_all(resumed) >= most
    assert (resumed.steps, resumed.epsilon() <= 2.0) == (most, True)


# --- the state


def test_the_state_is_plain_and_holds_no_random_state() -> None:
    run = spend(make_accountant(), 3)
    assert run.get_state() == {
        "run": run.run,
        "plan": {"noise_multiplier": 1.0, "sample_rate": 0.02, "delta": 1e-5},
        "history": [[1.0, 0.02, 3]],
        "clippings": [[1.0, 0.02, 3, ""]],
        "before": [],
        "initial_weights": run.initial_weights,
        "overrides": [],
        "unused": [],
    }


def test_two_runs_have_two_names() -> None:
    assert make_accountant().run != make_accountant().run


@pytest.mark.parametrize("state", [None, {}, {"history": []}, {"plan": {}, "history": [], "overrides": []}])
def test_a_checkpoint_without_its_spent_steps_is_refused(state: dict[str, Any] | None) -> None:
    with pytest.raises(CheckpointMismatchError, match="so their epsilon is unknown"):
        make_accountant().update_state(state)


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"noise_multiplier": 1.1}, r"noise_multiplier was 1\.0, is 1\.1"),
    ({"batch": 5}, r"sample_rate was 0\.02, is 0\.025"),
    ({"delta": 1e-6}, "delta was 1e-05, is 1e-06"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_another_plan_is_refused_unless_it_is_allowed(change: dict[str, Any], words: str) -> None:
    state = through_json(spend(make_accountant(), 5))
    with pytest.raises(CheckpointMismatchError, match=words):
        make_accountant(**change).update_state(state)
    changed = make_accountant(**change, allow_plan_change=True)
    changed.update_state(state)
    spend(changed, 2)
    assert changed.steps == 7
    assert changed.epsilon() == epsilon_of(changed.history, changed.plan.delta, "rdp")


def test_both_parts_of_a_changed_plan_count_against_the_budget() -> None:
    state = through_json(spend(make_accountant(), 50))
    changed = make_accountant(noise_multiplier=2.0, max_epsilon=2.0, allow_plan_change=True)
    assert changed.allows(100)
    changed.update_state(state)
    steps = spend_all(changed)
    assert changed.history == [(1.0, 0.02, 50), (2.0, 0.02, steps)]
    assert changed.epsilon() <= 2.0 < epsilon_of([(1.0, 0.02, 50), (2.0, 0.02, steps + 1)], 1e-5, "rdp")


# --- with a ledger


def test_steps_after_the_checkpoint_that_were_lost_stay_spent(
    ledger: SpendLedger, caplog: pytest.LogCaptureFixture
) -> None:
    first = spend(make_accountant(ledger), 5)
    state = through_json(first)
    spend(first, 20)  # and then it is killed
    resumed = make_accountant(another(ledger))
    with caplog.at_level(logging.WARNING, "trainstack"):
        resumed.update_state(state)
    assert 25 <= resumed.steps <= 25 + 16
    assert f"{resumed.steps - 5} private steps after the checkpoint are spent too" in caplog.text


def test_a_clean_end_returns_the_unused_steps(ledger: SpendLedger, caplog: pytest.LogCaptureFixture) -> None:
    first = spend(make_accountant(ledger), 5)
    first.settle()
    resumed = make_accountant(another(ledger))
    resumed.update_state(through_json(first))
    assert (resumed.steps, caplog.text) == (5, "")


def test_branches_from_one_checkpoint_share_one_budget(ledger: SpendLedger) -> None:
    trunk = spend(make_accountant(ledger, max_epsilon=2.0), 10)
    trunk.settle()
    state = through_json(trunk)
    branches = []
    for steps in (20, 30):
        branch = make_accountant(another(ledger), max_epsilon=2.0)
        branch.update_state(state)
        spend(branch, steps).settle()
        branches.append(branch)
    last = make_accountant(another(ledger), max_epsilon=2.0)
    last.update_state(state)
    assert last.steps == 60 == branches[0].steps == trunk.steps
    assert 60 + spend_all(last) == spend_all(make_accountant(max_epsilon=2.0))
    assert not branches[0].allows()


def test_two_runs_at_the_same_time_do_not_share(ledger: SpendLedger) -> None:
    one, other = make_accountant(ledger), make_accountant(another(ledger))
    spend(one, 3)
    spend(other, 4)
    assert (one.steps, other.steps) == (3, 4)


@pytest.mark.parametrize("kept", [None, 1], ids=["missing", "an older copy"])
def test_a_checkpoint_without_its_ledger_is_refused(kept: int | None, tmp_path: Path, ledger: SpendLedger) -> None:
    first = spend(make_accountant(ledger), 40)
    first.settle()
    lines = Path(ledger.path).read_bytes().splitlines(keepends=True)
    elsewhere = tmp_path / "elsewhere" / "privacy.ledger"
    if kept is not None:
        elsewhere.parent.mkdir()
        elsewhere.write_bytes(b"".join(lines[:kept]))
    with pytest.raises(PrivacyLedgerError, match=r"lacks \d+ of the 40 steps .*Copy the ledger file of the run"):
        make_accountant(SpendLedger(elsewhere)).update_state(through_json(first))


def test_without_its_ledger_a_run_continues_only_without_a_guarantee(tmp_path: Path, ledger: SpendLedger) -> None:
    first = spend(make_accountant(ledger), 40)
    new = SpendLedger(tmp_path / "new.ledger")
    resumed = make_accountant(new, on_unsafe="report")
    resumed.update_state(through_json(first))
    assert (resumed.steps, resumed.overrides) == (40, (NO_LEDGER,))
    spend(resumed, 2)
    again = make_accountant(another(new))  # the new ledger has the known steps; unknown ones remain possible
    again.update_state(through_json(resumed))
    assert again.steps >= 42
    assert again.overrides == (NO_LEDGER,)


def test_a_step_that_cannot_be_recorded_is_not_spent(ledger: SpendLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    run = make_accountant(ledger)
    monkeypatch.setattr("trainstack.backends.dp.ledger_store.write", full)
    with pytest.raises(PrivacyLedgerError, match=r"cannot be used: No space left on device\. No private step is taken"):
        run.charge()
    assert run.steps == 0
