"""Distinguishing games: from the outputs of a private run, an attacker guesses whether one record was in its data."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from scipy import stats

from tools.attacks.neighbours import caveats
from tools.attacks.runs import Kind, Outcome, Settings, make_records, play, unprobed
from trainstack.auditing.canary_bounds import privacy_profile

ERROR = 1e-3
"""The probability that a correct library fails one game."""

SETTINGS = Settings(dataset_size=20, batch=20, epochs=4, sigma=2.0, delta=0.02, lr=0.1)
"""Four steps with every record: a Gaussian mechanism with mu = 1, where 200 guesses detect a movement of 2 C."""

TARGET = 0
"""The attacker guesses whether this record is in the data. It is the first, so it shifts the indices of all others."""


def best_accuracy(epsilon: float, delta: float) -> float:
    """The largest accuracy of any attacker who tosses a fair coin between neighbours, under (epsilon, delta)."""
    if epsilon > 700:
        return 1.0
    return min(1.0, (math.exp(epsilon) + delta) / (1 + math.exp(epsilon)))


def accepted_count(guesses: int, accuracy: float) -> int:
    """The smallest k with `P[Binomial(guesses, accuracy) > k] <= ERROR`."""
    return int(stats.binom.isf(ERROR, guesses, accuracy))


def proved_epsilon(right: int, guesses: int, delta: float) -> float:
    """A lower bound of epsilon from right guesses, with a confidence of 95 % (Clopper and Pearson 1934)."""
    low = float(stats.beta.ppf(0.05, right, guesses - right + 1)) if right else 0.0
    return max(0.0, math.log((low - delta) / (1 - low))) if low > 0.5 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """A game about one kind of user code.

    Attributes:
        kind: the user code.
        settings: of the private runs.
        data: makes the dataset with the record, or without it.
        prepare: computes the prior knowledge of the attacker, and returns a function from the outcome of a run to a
            guess; None if the library refuses the user code.
    """

    kind: Kind
    settings: Settings
    data: Callable[[bool], Any]
    prepare: Callable[[Game], Callable[[Outcome], bool] | None]
    guesses: int | None = None
    """The number of guesses of a published attack; None for the number of the command line."""
    probe_each: bool = True
    """Whether each run compares neighbours before it trains, which takes half of the time of a short run. Otherwise
    only the runs of `prepare` do, with the record and without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a game.

    Attributes:
        outcome: `"refused"`, `"stated"` or `"trained"`.
        mode: the gradient mode.
        epsilon, delta: as stated; None without a guarantee.
        right, guesses: the numbers of right and of all guesses.
        accepted: the largest number of right guesses that the stated guarantee allows.
        reason: the refusal, or the statement's caveat.
    """

    outcome: str
    mode: str = "-"
    epsilon: float | None = None
    delta: float | None = None
    right: int = 0
    guesses: int = 0
    accepted: int = 0
    reason: str = ""

    @property
    def holds(self) -> bool:
        """Whether the guarantee holds, or none was given."""
        return self.outcome != "trained" or self.right <= self.accepted

    @property
    def proved(self) -> float:
        """The lower bound of epsilon from the guesses."""
        return proved_epsilon(self.right, self.guesses, self.delta or 0.0) if self.guesses else 0.0


def play_game(game: Game, guesses: int) -> Verdict:
    """Toss a coin, train with or without the record, guess; `guesses` times."""
    guess = game.prepare(game)
    if guess is None:
        return Verdict(outcome="refused")
    right, outcome = 0, None
    for _ in range(guesses):
        present = bool(secrets.randbits(1))
        with nullcontext() if game.probe_each else unprobed():
            outcome = play(game.kind, game.data(present), game.settings)
        if outcome.refused is not None:
            return Verdict(outcome="refused", reason=outcome.refused)
        if outcome.statement.epsilon is None or (notes := caveats(outcome, game.settings)):
            reasons = (*outcome.statement.overrides, *notes)
            return Verdict(outcome="stated", mode=outcome.statement.grad_mode, reason=reasons[0])
        right += guess(outcome) == present
    assert outcome is not None
    statement = outcome.statement
    accuracy = min(best_accuracy(statement.epsilon, statement.delta), _mechanism_accuracy(statement.history))
    return Verdict(
        outcome="trained",
        mode=statement.grad_mode,
        epsilon=statement.epsilon,
        delta=statement.delta,
        right=right,
        guesses=guesses,
        accepted=accepted_count(guesses, accuracy),
    )


def _mechanism_accuracy(history: Any) -> float:
    """The largest accuracy against the stated mechanism, which is below that of one (epsilon, delta)."""
    if len(history) != 1:
        return 1.0
    return 0.5 + float(privacy_profile(*history[0])[0]) / 2


def game_of(kind: Kind) -> Game:
    """A game about a kind of `tools.attacks`; the attacker guesses the nearer of two runs without noise."""
    records = make_records(SETTINGS.dataset_size, TARGET)
    return Game(
        kind=kind,
        settings=SETTINGS,
        data=lambda present: records if present else records.without(TARGET),
        prepare=nearest_run,
        probe_each=False,
    )


def nearest_run(game: Game) -> Callable[[Outcome], bool] | None:
    """Train without noise, with the record and without it, and guess the one whose weights are nearer.

    The attacker knows the code, the seeds and all other records. For sums with Gaussian noise it is the most powerful
    test.
    """
    silent = replace(game.settings, sigma=0.0)
    absent, present = (play(game.kind, game.data(there), silent) for there in (False, True))
    if absent.refused is not None or present.refused is not None:
        return None
    return lambda outcome: bool(
        (outcome.moved - absent.moved).square().sum() > (outcome.moved - present.moved).square().sum()
    )
