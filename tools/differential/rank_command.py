"""`run_on_ranks` is the command `python -m tools.differential --ranks 2`."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count, islice

from tools.differential.case import Case
from tools.differential.rank_cases import depends_on_split
from tools.differential.rank_classes import RANK_CLASSES, RANK_PENDING, rank_classes_of
from tools.differential.rank_comparison import RankBattery
from tools.differential.rank_run import Chosen

MOST_NUMBERS = 5_000
"""The search for a case of a class ends after this number of other cases."""


def chosen_cases(seed: int, size: int, names: Sequence[str] = (), backend: str = "ddp") -> Iterator[Chosen]:
    """The cases of `seed` in order; with `names` those of one of these classes, pending or not."""
    last = 0
    for number in count():
        if number - last > MOST_NUMBERS:
            return
        chosen = Chosen(seed, number, size, tuple(names), backend=backend)
        if not names or set(names) & set(rank_classes_of(chosen.case())):
            last = number
            yield chosen


def run_on_ranks(options: argparse.Namespace, seed: int, battery: RankBattery | None = None) -> int:
    """Run the cases; returns the exit status."""
    names = [*options.only, *(RANK_PENDING if options.pending else [])]
    unknown = sorted(set(names) - set(RANK_CLASSES))
    if unknown:
        print(f"no class is called {', '.join(unknown)}. There are: {'; '.join(RANK_CLASSES)}.")
        return 2
    battery = battery or RankBattery()
    cases = chosen_cases(seed, options.ranks, names, options.backend)
    if options.case is not None:
        cases = iter([Chosen(seed, options.case, options.ranks, tuple(names), backend=options.backend)])
    began, ran, differ, unequal = time.monotonic(), 0, 0, Counter[str]()
    for chosen in islice(cases, options.cases):
        found = battery.run(chosen)
        ran += 1
        unequal.update(depends_on_split(chosen.case()))
        if found:
            differ += 1
            if options.simplify:
                chosen = battery.shrink(chosen)
            print(_report(chosen, found, names), end="\n\n", flush=True)
    seconds = time.monotonic() - began
    print(f"{ran} trainings on {options.ranks} ranks under {options.backend} in {seconds:.0f} s, {differ} differ")
    for reason, times in unequal.most_common():
        print(f"  {times:4d}  only the ranks were compared with each other: {reason}")
    return int(differ > 0)


def _report(chosen: Chosen, found: Sequence[str], names: Sequence[str]) -> str:
    case: Case = chosen.case()
    backend = f" --backend {chosen.backend}" if chosen.backend != "ddp" else ""
    words = f"--ranks {chosen.size}{backend} --seed {chosen.seed} --case {chosen.number}"
    only = "".join(f' --only "{name}"' for name in names)
    return "\n".join(
        [
            case.describe(),
            f"  classes: {', '.join(rank_classes_of(case)) or 'none'}",
            *(f"  - {line}" for line in found[:5]),
            f"  again: python -m tools.differential {words}{only}",
        ]
    )
