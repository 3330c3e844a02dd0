"""A short run of `make attacks`, and faults that it must find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from tools.attacks.__main__ import KINDS, SHORT_GUESSES, main
from tools.attacks.guessing import Verdict, accepted_count, best_accuracy, game_of, play_game, proved_epsilon
from tools.attacks.neighbours import FULL, RARE, influence_of
from tools.attacks.published import games
from tools.attacks.runs import Kind, UserModule, make_records, never_drawn, play
from tools.broken_privacy import broken as broken_privacy
from trainstack.backends.dp.mechanism import Mechanism

pytestmark = pytest.mark.slow


def kind_named(name: str) -> Kind:
    return next(kind for kind in KINDS if kind.name == name)


# --- the short form


@pytest.mark.parametrize("name", [kind.name for kind in KINDS if kind.short])
def test_a_record_changes_sums_by_at_most_the_clipping_norm(name: str) -> None:
    influence = influence_of(kind_named(name), short=True)
    assert influence.holds, influence


@pytest.mark.parametrize("game", games(short=True), ids=lambda game: game.kind.name[:4])
def test_published_attacks_guess_no_better_than_stated(game: Any) -> None:
    verdict = play_game(game, SHORT_GUESSES)
    assert verdict.holds, verdict


def test_guesses_on_final_weights_stay_within_the_statement() -> None:
    verdict = play_game(game_of(kind_named("dropout")), 24)
    assert verdict.outcome == "trained"
    assert verdict.holds, verdict


# --- faults that it must find


@contextmanager
def carried_sums() -> Iterator[None]:
    """A third of each step's sum is added to the next one."""
    real = Mechanism.release

    def release(self: Mechanism, work: Any) -> Any:
        sums = self.mode.sums
        for total, old in zip(sums, getattr(self, "carried", ()), strict=False):
            total.add_(old, alpha=1 / 3)
        self.carried = [total.clone() for total in sums]  # type: ignore[attr-defined]
        return real(self, work)

    with mock.patch.object(Mechanism, "release", release):
        yield


@contextmanager
def no_noise() -> Iterator[None]:
    with mock.patch.object(Mechanism, "_add_noise"):
        yield


@pytest.mark.parametrize("broken", [partial(broken_privacy, "clipped to 10 C"), carried_sums])
def test_a_broken_library_exceeds_the_clipping_norm(broken: Callable[[], Any]) -> None:
    with broken():
        influence = influence_of(kind_named("plain"), short=True)
    assert influence.outcome == "trained"
    assert not influence.holds


def test_a_library_that_refuses_private_modules_fails() -> None:
    refused = Kind(name="refused", module=kind_named("collate that centres").module, must_train=True)
    influence = influence_of(refused, short=True)
    assert influence.outcome == "refused"
    assert not influence.holds


def test_a_broken_library_loses_the_game() -> None:
    with no_noise():
        verdict = play_game(game_of(kind_named("plain")), 20)
    assert verdict.right == 20
    assert not verdict.holds
    assert verdict.proved > 1.5


class _SharedRandomness(UserModule):
    """The loss of each record depends on the records before it in the batch."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        shift = batch[0].detach().cumsum(0) - batch[0].detach()
        return torch.nn.functional.cross_entropy(self.net(batch[0] + shift), batch[1])


def test_coupled_records_are_refused_or_separated() -> None:
    assert influence_of(Kind(name="shared", module=_SharedRandomness), short=True).holds


def test_a_record_that_is_never_drawn_keeps_other_indices() -> None:
    records = make_records(FULL.dataset_size, RARE)
    with never_drawn(RARE) as steps:
        left_out = play(kind_named("plain"), records, FULL)
    assert steps == [1, 2, 3, 4]
    shorter = play(kind_named("plain"), records.without(RARE), FULL)
    torch.testing.assert_close(left_out.sums, shorter.sums)


# --- how a test decides


@pytest.mark.parametrize(
    ("epsilon", "guesses", "accepted"),
    [(0.1601, 100, 69), (0.4211, 60, 47), (0.4211, 100, 75), (0.5732, 40, 34), (0.5732, 100, 78)],
)
def test_accepted_counts_are_those_of_the_binomial(epsilon: float, guesses: int, accepted: int) -> None:
    assert accepted_count(guesses, best_accuracy(epsilon, 1e-5)) == accepted


def test_right_guesses_prove_an_epsilon() -> None:
    assert proved_epsilon(100, 100, 1e-5) == pytest.approx(3.49, abs=0.01)
    assert proved_epsilon(54, 60, 1e-5) == pytest.approx(1.46, abs=0.01)
    assert proved_epsilon(39, 40, 1e-5) == pytest.approx(2.06, abs=0.01)
    assert proved_epsilon(30, 60, 1e-5) == 0.0
    assert best_accuracy(0.0, 0.0) == 0.5
    assert Verdict(outcome="trained", right=48, guesses=60, accepted=47).holds is False
    assert Verdict(outcome="refused").holds is True


def test_the_command_prints_a_row_for_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--short", "--guesses", "0", "--kinds", "random collate", "normalizing"]) == 0
    head, *rows, last = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["user", "code", "mode", "outcome"]
    assert [row.split()[-1] for row in rows] == ["passed", "passed"]
    assert last == "2 of 2 passed"


def test_unknown_kinds_are_an_error() -> None:
    with pytest.raises(SystemExit):
        main(["--kinds", "no such kind"])
