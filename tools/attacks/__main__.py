"""Attack private training through user code that has broken its promise, and print what became of the promise.

    make attacks                             all kinds: neighbouring sums, and 200 guesses for each that trains
    make attacks ARGS="--guesses 0"          the sums only
    make attacks ARGS="--kinds dropout 'class weights'"
    make attacks ARGS="--short"              the kinds and numbers of `make test`

A kind passes if it is refused before the first step, or states that it guarantees nothing, or if two things hold: with
the random numbers of each record fixed, one record moves the sum of clipped gradients by C (1 + 1e-3) at most, and by
nothing in a step without it; and of 200 guesses from the final weights, whether the record was there, no more are right
than the stated guarantee allows but in one game of a thousand. The exit status is 1 if a kind fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tools.attacks import published, user_losses, user_randomness, user_state
from tools.attacks.guessing import Game, Verdict, game_of, play_game
from tools.attacks.neighbours import Influence, influence_of
from tools.attacks.runs import Kind

KINDS: tuple[Kind, ...] = (*user_randomness.KINDS, *user_losses.KINDS, *user_state.KINDS)
GUESSES, SHORT_GUESSES = 200, 16
_WIDTHS = (36, 12, 13, 10, 10, 16, 10, 9)
HEAD = ("user code", "mode", "outcome", "moves x C", "epsilon", "right guesses", "accepted", "seconds")


def _line(cells: Sequence[str]) -> str:
    return "".join(cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=False)) + cells[-1]


def _row(name: str, influence: Influence | None, verdict: Verdict | None, seconds: float) -> str:
    failed = [part for part in (influence, verdict) if part is not None and not part.holds]
    moves = "-" if influence is None or influence.moves is None else f"{influence.moves:.3f}"
    mode = next((part.mode for part in (influence, verdict) if part is not None and part.mode not in ("", "-")), "-")
    outcome = next(part.outcome for part in (influence, verdict) if part is not None)
    epsilon, guessed, accepted = "-", "-", "-"
    if verdict is not None and verdict.outcome == "trained":
        epsilon, accepted = f"{verdict.epsilon:.3f}", str(verdict.accepted)
        guessed = f"{verdict.right} of {verdict.guesses}"
    said = "FAILED" if failed else "passed"
    if verdict is not None and not verdict.holds:
        said += f", epsilon is {verdict.proved:.2f} at least"
    if influence is not None and influence.must_train and influence.reason:
        said += f": {influence.reason}"
    return _line((name, mode, outcome, moves, epsilon, guessed, accepted, f"{seconds:.1f}", said))


def attack(kind: Kind, guesses: int, *, short: bool = False) -> tuple[Influence, Verdict | None]:
    """Compare neighbouring sums, then play a game if the kind trains."""
    influence = influence_of(kind, short=short)
    trains = influence.outcome != "refused" and not influence.stated
    return influence, play_game(game_of(kind), guesses) if guesses and trains else None


def run(kinds: Sequence[Kind], games: Sequence[Game], guesses: int, *, short: bool) -> list[str]:
    """Attack all of them, and print a row for each.

    Returns:
        The names of those that failed.
    """
    print(_line((*HEAD, "")), flush=True)
    failed = []
    for kind in kinds:
        began = time.monotonic()
        influence, verdict = attack(kind, guesses, short=short)
        print(_row(kind.name, influence, verdict, time.monotonic() - began), flush=True)
        if not influence.holds or (verdict is not None and not verdict.holds):
            failed.append(kind.name)
    for game in games if guesses else ():
        began = time.monotonic()
        verdict = play_game(game, guesses)
        print(_row(game.kind.name, None, verdict, time.monotonic() - began), flush=True)
        if not verdict.holds:
            failed.append(game.kind.name)
    attacked = len(kinds) + (len(games) if guesses else 0)
    print(f"{attacked - len(failed)} of {attacked} passed" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack what the command line names; the exit status."""
    parser = argparse.ArgumentParser(prog="tools.attacks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--guesses", type=int, help=f"of each game; {GUESSES} by default")
    parser.add_argument("--kinds", nargs="+", help="only those whose names contain one of these")
    parser.add_argument("--short", action="store_true", help="the kinds, pairs and guesses of `make test`")
    given = parser.parse_args(arguments)
    kinds = [kind for kind in KINDS if kind.short or not given.short]
    games = list(published.games(short=given.short))
    if given.kinds:
        kinds = [kind for kind in kinds if any(part in kind.name for part in given.kinds)]
        games = [game for game in games if any(part in game.kind.name for part in given.kinds)]
        if not kinds and not games:
            parser.error(f"--kinds {' '.join(given.kinds)}: no name contains one of these")
    guesses = given.guesses if given.guesses is not None else SHORT_GUESSES if given.short else GUESSES
    return 1 if run(kinds, games, guesses, short=given.short) else 0


if __name__ == "__main__":
    sys.exit(main())
