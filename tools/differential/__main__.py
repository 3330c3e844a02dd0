"""Draw random trainings, run each with the library and with a plain loop, and compare every bit and call.

    make differential ARGS="--cases 500 --seed 3"    other trainings than those of make test
    make differential ARGS="--seed 3 --case 17"      one of them
    make differential ARGS="--only 'eval() in a hook' --cases 20"    those of one class
    make differential ARGS="--pending"               those with a documented difference
    make differential ARGS="--ranks 2 --cases 500"   trainings on two ranks under ddp, compared with sp to 1e-10
    make differential ARGS="--ranks 2 --backend fsdp"    the same under fsdp

The tool prints a difference with its training and the command that repeats it. The exit status is 1 if there is one.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count, islice

import torch

from tools.differential.case import Case, draw
from tools.differential.classes import CLASSES, PENDING, classes_of, without
from tools.differential.comparison import run_case
from tools.differential.rank_cases import SIZES
from tools.differential.rank_command import run_on_ranks

MOST_NUMBERS = 20_000
"""The search for a case of a class ends after this number of other cases."""


def cases_of(seed: int, names: Sequence[str] = (), *, workers: bool = False) -> Iterator[Case]:
    """The cases of `seed` in order; with `names` those of one of these classes, pending or not."""
    found = 0
    for number in count():
        if number - found > MOST_NUMBERS:
            return
        case = draw(seed, number, workers=workers or "workers" in names)
        if not names:
            found = number
            yield without(case, PENDING)
            continue
        others = [name for name in PENDING if name not in names]
        case = without(case, others)
        if set(names) & set(classes_of(case)):
            found = number
            yield case


def command(case: Case, options: argparse.Namespace) -> str:
    """The command that runs the case again."""
    words = f"--seed {case.seed} --case {case.number}"
    names = [*(f'--only "{name}"' for name in options.only), *(["--pending"] if options.pending else [])]
    workers = ["--workers"] if options.workers else []
    return f"python -m tools.differential {' '.join([words, *names, *workers])}"


def report(case: Case, found: Sequence[str], options: argparse.Namespace) -> str:
    """A description of a case that differs."""
    shown = [f"  - {line}" for line in found[:5]]
    more = [f"  - and {len(found) - 5} more"] if len(found) > 5 else []
    head = [case.describe(), f"  classes: {', '.join(classes_of(case)) or 'none'}"]
    return "\n".join([*head, *shown, *more, f"  again: {command(case, options)}"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; returns the exit status."""
    options = _parser().parse_args(argv)
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    if options.ranks:
        print(f"seed {seed}, torch {torch.__version__}", flush=True)
        return run_on_ranks(options, seed)
    names = [*options.only, *(PENDING if options.pending else [])]
    unknown = sorted(set(names) - set(CLASSES))
    if unknown:
        print(f"no class is called {', '.join(unknown)}. There are: {'; '.join(CLASSES)}.")
        return 2
    found = cases_of(seed, names, workers=options.workers)
    if options.case is not None:
        chosen: Iterator[Case] = (case for case in islice(found, options.case + 1) if case.number == options.case)
    else:
        chosen = islice(found, options.cases)
    began, ran, differ, classes = time.monotonic(), 0, 0, Counter[str]()
    print(f"seed {seed}, torch {torch.__version__}", flush=True)
    for case in chosen:
        ran += 1
        lines = run_case(case)
        if lines:
            differ += 1
            classes.update(classes_of(case))
            print(report(case, lines, options), end="\n\n", flush=True)
    seconds = time.monotonic() - began
    print(f"{ran} trainings in {seconds:.0f} s ({1000 * seconds / max(1, ran):.0f} ms each), {differ} differ")
    for name, times in classes.most_common():
        print(f"  {times:4d}  {name}{f' ({PENDING[name]})' if name in PENDING else ''}")
    return int(differ > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tools.differential", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=200, help="number of cases (default: 200)")
    parser.add_argument("--seed", type=int, help="of the cases (default: a random one, which is printed)")
    parser.add_argument("--case", type=int, help="run only the case with this number")
    parser.add_argument("--only", action="append", default=[], metavar="CLASS", help="only cases of this class")
    parser.add_argument("--pending", action="store_true", help="only cases of the classes with a documented difference")
    parser.add_argument("--workers", action="store_true", help="some loaders have a worker process")
    parser.add_argument("--ranks", type=int, choices=SIZES, help="number of ranks, compared with sp")
    parser.add_argument("--backend", choices=("ddp", "fsdp"), default="ddp", help="backend of the ranks (default: ddp)")
    parser.add_argument(
        "--simplify",
        action="store_true",
        help="with --ranks: search for simpler cases with the same difference, which is slow",
    )
    return parser


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
