"""Attack private training through kinds of user code that can break its guarantee, and print the results.

    make attacks                             all kinds: neighbouring sums, and 200 guesses for each that trains
    make attacks ARGS="--guesses 0"          the sums only
    make attacks ARGS="--kinds dropout 'class weights'"
    make attacks ARGS="--short"              the kinds and numbers of `make test`
    make attacks ARGS="--results FILE"       keep finished rows in a file; another call takes them from there

A kind passes if the library refuses it before the first step, or if its statement excludes it, or if both tests pass:

1. With the random numbers of each record fixed, one record moves the sum of clipped gradients by at most C (1 + 1e-3),
   and does not move it in a step without the record.
2. An attacker guesses 200 times from the final weights whether the record was in the data. The number of right guesses
   stays within the stated guarantee. A correct library fails this test in one of a thousand games.

The exit status is 1 if a kind fails.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

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


def _play_alone(game: Game, guesses: int) -> tuple[None, Verdict]:
    return None, play_game(game, game.guesses or guesses)


def run(
    kinds: Sequence[Kind], games: Sequence[Game], guesses: int, *, short: bool, results: Path | None = None
) -> list[str]:
    """Attack all kinds and games, and print a row for each.

    Args:
        kinds, games: the user code to attack.
        guesses: of each game.
        short: omit half of the neighbours.
        results: a file for finished rows, one JSON list in each line; rows of a former call are printed again.

    Returns:
        The names of failed rows.
    """
    print(_line((*HEAD, "")), flush=True)
    lines = results.read_text().splitlines() if results is not None and results.exists() else []
    kept: dict[str, tuple[str, bool]] = {name: (row, holds) for name, row, holds in map(json.loads, lines)}
    failed = []

    def show(name: str, play: Callable[[], tuple[Influence | None, Verdict | None]]) -> None:
        if name not in kept:
            began = time.monotonic()
            influence, verdict = play()
            row = _row(name, influence, verdict, time.monotonic() - began)
            kept[name] = row, all(part is None or part.holds for part in (influence, verdict))
            if results is not None:
                with results.open("a") as file:
                    file.write(json.dumps([name, *kept[name]]) + "\n")
        row, holds = kept[name]
        print(row, flush=True)
        if not holds:
            failed.append(name)

    for kind in kinds:
        show(kind.name, partial(attack, kind, guesses, short=short))
    for game in games if guesses else ():
        show(game.kind.name, partial(_play_alone, game, guesses))
    attacked = len(kinds) + (len(games) if guesses else 0)
    print(f"{attacked - len(failed)} of {attacked} passed" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack the kinds of the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="tools.attacks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--guesses", type=int, help=f"guesses of each game (default: {GUESSES})")
    parser.add_argument("--kinds", nargs="+", help="only kinds whose names contain one of these")
    parser.add_argument("--short", action="store_true", help="the kinds, pairs and guesses of `make test`")
    parser.add_argument("--results", type=Path, help="keep finished rows in this file, and take them from there")
    given = parser.parse_args(arguments)
    logging.getLogger("trainstack").addHandler(logging.NullHandler())  # the table has the modes and refusals
    kinds = [kind for kind in KINDS if kind.short or not given.short]
    games = list(published.games(short=given.short))
    if given.kinds:
        kinds = [kind for kind in kinds if any(part in kind.name for part in given.kinds)]
        games = [game for game in games if any(part in game.kind.name for part in given.kinds)]
        if not kinds and not games:
            parser.error(f"--kinds {' '.join(given.kinds)}: no name contains one of these")
    guesses = given.guesses if given.guesses is not None else SHORT_GUESSES if given.short else GUESSES
    return 1 if run(kinds, games, guesses, short=given.short, results=given.results) else 0


if __name__ == "__main__":
    sys.exit(main())
