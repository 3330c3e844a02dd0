"""A statement is true, in words and as JSON, and never has an epsilon that does not hold."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.backends.dp.support import make_plan
from trainstack.backends import build_trainer_backend
from trainstack.backends.dp import (
    PrivacyStatement,
    epsilon_of,
    fixed_order_epsilon,
    no_guarantee,
    private_statement,
)
from trainstack.backends.dp.modes.selection import MODES
from trainstack.backends.privacy_statement import round_up
from trainstack.errors import ConfigurationError


def make_statement(
    history: list[tuple[float, float, int]] | None = None,
    overrides: tuple[str, ...] = (),
    mode: str = "vmap",
    **given: Any,
) -> PrivacyStatement:
    plan, args = make_plan(**{"noise_multiplier": 1.0, **given})
    history = [(1.0, 0.02, 82)] if history is None else history
    return private_statement(
        plan, args, history, max_grad_norm=[1.5], grad_mode=mode, world_size=2, overrides=overrides
    )


def test_the_numbers_are_those_of_the_accounts() -> None:
    statement = make_statement(max_epsilon=3.0)
    history = [(1.0, 0.02, 82)]
    assert statement.epsilon == epsilon_of(history, 1e-5, "rdp")
    assert statement.fixed_order_epsilon == fixed_order_epsilon(history, 1e-5)
    assert (statement.delta, statement.steps, statement.planned_steps) == (1e-5, 82, 100)
    assert (statement.expected_batch_size, statement.dataset_size, statement.max_grad_norm) == (4, 200, (1.5,))
    assert statement.replace_one == (2 * statement.epsilon, (1 + math.exp(statement.epsilon)) * 1e-5)


def test_the_text_has_all_assumptions_of_the_guarantee() -> None:
    statement = make_statement(max_epsilon=3.0, accountant="prv")
    assert statement.text.splitlines()[0] == (
        f"The training is (epsilon {round_up(statement.epsilon or 0)}, delta 1e-05)-differentially private for one "
        "item of the training data set."
    )
    for words in (
        "Steps: 82 taken, 100 planned; budget epsilon 3",
        "Poisson samples of 4 in 200 items (a public number) on average",
        "clipped to 1.5 (flat)",
        "noise multiplier 1 and rate 0.02 for 82 steps",
        "Accountant: prv of opacus, an upper bound, as a rule at most 0.01 above the truth",
        "Neighbours: one item added or removed, the rest unchanged",
        "One item replaced: epsilon ",
        "Batches of a fixed order would give: epsilon ",
        "Covered:\n    - the weights after every step",
        "Not covered:\n    - validation and tests on private data",
        "Randomness: generators seeded by the operating system, for masks, noise, train_step and data sets, ",
        "per-sample gradients by vmap, processes: 2",
        "Versions: trainstack ",
    ):
        assert words in statement.text


def test_a_run_that_its_budget_stopped_says_so() -> None:
    stopped = make_statement(max_epsilon=epsilon_of([(1.0, 0.02, 82)], 1e-5, "rdp"))
    assert stopped.stopped_by_budget
    assert "which the next step would exceed" in stopped.text
    assert not make_statement(max_epsilon=3.0).stopped_by_budget


def test_the_choices_of_the_user_are_stated() -> None:
    statement = make_statement(secure=True, clipping="automatic")
    assert "operating system's entropy" in statement.text
    assert "training loss" not in statement.text
    assert "(automatic)" in statement.text
    assert "no budget" in statement.text
    logged = make_statement(log_train_loss=True, public_validation=True)
    without_noise = "the training loss and values that train_step logs, which were recorded without noise"
    assert f"Not covered:\n    - {without_noise}\n" in logged.text
    assert "validation and tests, whose data were declared public" in logged.text.partition("Not covered")[0]


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_states_why_losses_depend_on_one_record(mode: str) -> None:
    compared = mode in ("hooks", "ghost")
    text = make_statement(mode=mode).text
    assert ("Losses: each step compares the loss of the batch" in text) is compared
    assert ("Losses: each record's loss is computed from that record alone" in text) is not compared
    assert ("no layer mixes records" in text) is compared


def test_the_library_that_computed_epsilon_is_among_the_versions() -> None:
    pytest.importorskip("dp_accounting")
    assert ", dp-accounting " in make_statement(accountant="pld").text
    assert "dp-accounting" not in make_statement().text


def test_before_the_first_step_nothing_is_spent() -> None:
    statement = make_statement([])
    assert statement.epsilon == 0.0
    assert "(epsilon 0, delta 1e-05)" in statement.text
    assert "no step yet" in statement.text


VOID: list[tuple[dict[str, Any], str]] = [
    ({"overrides": ("BatchNorm mixes records",)}, "NOT PRIVATE: BatchNorm mixes records."),
    ({"debug_seed": 0}, "NOT PRIVATE: whoever knows debug_seed knows"),
    ({"noise_multiplier": 0.0, "history": [(0.0, 0.02, 3)]}, "NOT PRIVATE: steps were taken without noise."),
    ({"overrides": ("one", "two")}, "NOT PRIVATE: one; two."),
]


@pytest.mark.parametrize(("given", "words"), VOID)
def test_no_epsilon_is_stated_where_none_holds(given: dict[str, Any], words: str) -> None:
    statement = make_statement(**given)
    assert statement.text.startswith(words)
    assert (statement.epsilon, statement.delta, statement.fixed_order_epsilon, statement.replace_one) == (None,) * 4
    assert "(epsilon" not in statement.text
    assert "would give" not in statement.text
    assert statement.covered == ()
    stored = json.loads(statement.to_json())
    assert (stored["epsilon"], stored["delta"], stored["fixed_order_epsilon"]) == (None, None, None)


def test_a_stack_without_privacy_guarantees_nothing() -> None:
    statement = no_guarantee("sp-amp")
    assert statement.text == (
        "NOT PRIVATE: backend 'sp-amp' has no privacy layer, so no limit of the leakage is known."
    )
    assert (statement.epsilon, statement.steps) == (None, 0)
    assert build_trainer_backend("sp-amp").privacy_statement() == statement
    assert PrivacyStatement.from_json(statement.to_json()) == statement


@pytest.mark.parametrize("given", [{}, *(given for given, _ in VOID)])
def test_a_statement_comes_back_from_json_as_it_was(given: dict[str, Any]) -> None:
    statement = make_statement(**given)
    again = PrivacyStatement.from_json(statement.to_json())
    assert again == statement
    assert again.text == statement.text


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "color": "red"}', '{"format": 1}'])
def test_text_other_than_a_statement_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="This is not a privacy statement"):
        PrivacyStatement.from_json(text)


def test_a_statement_cannot_be_altered() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_statement().epsilon = 0.1  # type: ignore[misc]


@given(st.floats(1e-6, 1e6))
def test_epsilon_is_never_rounded_down(epsilon: float) -> None:
    shown = float(round_up(epsilon))
    assert epsilon <= shown <= epsilon * 1.001 + 1e-12
