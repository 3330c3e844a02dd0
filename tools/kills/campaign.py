"""Kill trainings of modules with state in many places, and compare every bit of the results of the resumed ones.

    python -m tools.kills.campaign                          120 SIGKILLs that count
    python -m tools.kills.campaign --cases curriculum,fitted --kills 12 --seed 3 --verbose
    python -m tools.kills.campaign --list

It compares the last checkpoints (weights, buffers, optimizer states, counters, random states, history) and the rows of
metrics.csv. A training that refuses to continue with an error of the library is counted separately. The exit status is
1 if a bit differs, if a training failed, or if `forgetful`, which does not save a counter, is not found.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import trainstack as ts
from tools.kills.__main__ import is_proved, preloaded, shares
from tools.kills.stateful import CASES, call_in
from trainstack.checkpointing.difference import differences
from trainstack.checkpointing.reading import read_states
from trainstack.trainer.tracking.history import RunHistory
from trainstack.verifying.comparison import Divergence, checkpoints_of, compare
from trainstack.verifying.trials import TrialSetup, run_trials

BACKENDS = ("sp", "ddp")
TIMEOUT_S = 120.0
HEAD = f"{'case':<16} {'backend':<7} {'saving':<10}  kills  while saving  trainings  seconds  result"
_REFUSED = re.compile(r"trainstack\.errors\.(\w+): (.*)")


class Subject(NamedTuple):
    """One line of the table."""

    case: str
    backend: str
    async_save: bool


class Outcome(NamedTuple):
    """The result, "same", "different", "refused", "failed" or "not proved", and a description."""

    result: str
    words: str
    report: ts.ResumeReport | None = None


def compare_logs(one: Path, other: Path) -> Divergence | None:
    """Like `compare`, and then the rows of metrics.csv."""
    parting = compare(one, other)
    if parting is not None:
        return parting
    mine, theirs = (_rows(place) for place in (one, other))
    for number, (row, its) in enumerate(zip([*mine, "(the end)"], [*theirs, "(the end)"], strict=False), 1):
        if row != its:
            return Divergence(difference=f"metrics.csv, line {number}: {row!r} | {its!r}", same_at=0, diverged_at=0)
    return None


_NORM = "train/grad_norm"


def compare_unordered(one: Path, other: Path) -> Divergence | None:
    """Like `compare_logs`, without values that depend on the order of parameters: lists of names, last bits of norms.

    The norm is a sum in the order of the parameters of the module, as in `torch.nn.utils.clip_grad_norm_`.
    """
    ends = [checkpoints_of(place)[-1] for place in (one, other)]
    found = list(differences(*(_without_order(read_states(end.path)[1]) for end in ends)))
    rows = [[row for row in _rows(place) if f",{_NORM}," not in row] for place in (one, other)]
    if found or rows[0] != rows[1]:
        text = str(found[0]) if found else "the rows of metrics.csv"
        return Divergence(difference=text, same_at=0, diverged_at=ends[0].global_step or 0)
    return None


def _without_order(states: Any) -> Any:
    history = RunHistory()
    history.update_state(states["history_state"])
    records = [tuple(record) for record in history.all_records() if record.name != _NORM]
    return {**_sorted_names(states), "history_state": records}


def _sorted_names(tree: Any) -> Any:
    if isinstance(tree, dict):
        kept = {key: value for key, value in tree.items() if key != "last_norm"}
        return {key: sorted(value) if key == "params" else _sorted_names(value) for key, value in kept.items()}
    return [_sorted_names(value) for value in tree] if isinstance(tree, list) else tree


def _rows(place: Path) -> list[str]:
    found = sorted(place.rglob("metrics*.csv"))
    return found[0].read_text().splitlines() if len(found) == 1 else [f"{len(found)} files metrics*.csv"]


def attempt(
    subject: Subject,
    kills: int,
    draw: random.Random,
    folder: Path,
    break_with: Callable[[], None] | None = None,
) -> Outcome:
    """Kill the trainings of one subject. Each of its processes calls `break_with`, which breaks the library."""
    setup = TrialSetup(
        backend=subject.backend,
        nproc=2 if subject.backend == "ddp" else None,
        call_in=lambda place, async_save: call_in(place, *subject[:2], async_save, break_with),
        context=preloaded(),
        timeout_s=TIMEOUT_S,
        async_save=subject.async_save,
        compare=compare_unordered if subject.case == "shuffled" else compare_logs,
        self_test=False,
        vary=False,
    )
    try:
        report = run_trials(setup, kills, draw, folder)
    except ts.LaunchError as error:
        refused = _REFUSED.findall(str(error))
        if refused:
            return Outcome("refused", f"refused: {refused[-1][0]}: {refused[-1][1]}")
        return Outcome("failed", f"FAILED: {str(error)[-2000:]}")
    if report.divergence is not None:
        return Outcome("different", f"NOT THE SAME: {report.divergence.difference}", report)
    return (
        Outcome("same", "the same bits", report) if is_proved(report) else Outcome("not proved", report.verdict, report)
    )


def run(subjects: Sequence[Subject], kills: int, seed: int, verbose: bool = False) -> dict[Subject, Outcome]:
    """Kill trainings of all subjects, `kills` times in total, and print a line for each."""
    print(HEAD, flush=True)
    root, found, began = Path(tempfile.mkdtemp(prefix="trainstack-campaign-")), {}, time.monotonic()
    for number, (subject, share) in enumerate(zip(subjects, shares(kills, len(subjects)), strict=True)):
        if not share:
            continue
        start, draw = time.monotonic(), random.Random(f"{seed} {number}")
        outcome = found[subject] = attempt(subject, share, draw, root / str(number))
        print(_row(subject, outcome, time.monotonic() - start), flush=True)
        if verbose and outcome.report is not None:
            print(outcome.report, flush=True)
    struck = sum(outcome.report.counting for outcome in found.values() if outcome.report is not None)
    print(f"{struck} kills that count in {time.monotonic() - began:.0f} s; {_counted(found)}", flush=True)
    if verbose and any(outcome.result != "same" for outcome in found.values()):
        print(f"the trainings are in {root}")
    else:
        shutil.rmtree(root)
    return found


def _row(subject: Subject, outcome: Outcome, seconds: float) -> str:
    report, saving = outcome.report, "background" if subject.async_save else "foreground"
    kills = [] if report is None else [kill for kill in report.kills if kill.counts]
    within = sum(kill.while_saving for kill in kills)
    trainings = 0 if report is None else report.trainings
    return (
        f"{subject.case:<16} {subject.backend:<7} {saving:<10}  {len(kills):>5}  {within:>12}  {trainings:>9}  "
        f"{seconds:>7.0f}  {outcome.words}"
    )


def _counted(found: dict[Subject, Outcome]) -> str:
    results = [outcome.result for outcome in found.values()]
    return ", ".join(f"{results.count(result)} {result}" for result in sorted(set(results)))


def is_good(subject: Subject, outcome: Outcome) -> bool:
    """Whether the outcome is the expected one."""
    return outcome.result == ("different" if subject.case == "forgetful" else "same")


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign; returns the exit status."""
    parser = argparse.ArgumentParser(prog="tools.kills.campaign", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=120, help="kills that count, of all cases together (default: 120)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--cases", default="", help="names with commas (default: all)")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="backends with commas (default: both)")
    parser.add_argument("--verbose", action="store_true", help="print every kill, and keep trainings that differ")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    given = parser.parse_args(arguments)
    if given.list:
        print("\n".join(CASES))
        return 0
    names = given.cases.split(",") if given.cases else list(CASES)
    unknown = [name for name in names if name not in CASES] + [
        name for name in given.backends.split(",") if name not in BACKENDS
    ]
    if unknown or given.kills < 1:
        parser.error(f"unknown: {', '.join(unknown)}" if unknown else f"--kills {given.kills}: write 1 or more")
    subjects = [Subject(*parts) for parts in product(names, given.backends.split(","), (False, True))]
    found = run(subjects, given.kills, given.seed, given.verbose)
    return 0 if all(is_good(subject, outcome) for subject, outcome in found.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
