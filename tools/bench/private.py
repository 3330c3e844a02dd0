"""`make bench-private`: compare private steps with plain ones, a hand-written loop and opacus, in one process."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tools.bench.allocator import forget_peak, keep_freed_memory, memory
from tools.bench.private_contenders import GRADIENTS, MODELS, STEPS, dataset, prepared
from tools.bench.report import versions

GOALS = {"mlp": 1.6, "cnn": 1.25, "transformer": 1.4}
"""Goals of the CPU time of a private step over that of a plain one, with 256 records."""

_BLOCK = 4
"""Steps in a block: enough to make the begin and end of the library's loop a small part, and few enough that a pause of
the machine disturbs few."""

_SLOW = {"sp-dp hooks", "opacus hooks", "opacus functorch", "vmap", "loop"}
"""Contenders with one step in a block."""


def least(kind: str, model: str, names: Sequence[str], batch: int, rounds: int) -> dict[str, float]:
    """CPU seconds of one step of each contender: the least of `rounds` blocks in alternating order."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # opacus warns in every step
        data = dataset(model)
        contenders = {name: prepared(kind, name, model, batch, data, Path(folder)) for name in names}
        found = dict.fromkeys(names, float("inf"))
        order = list(names)
        for _ in range(rounds):
            for name in order:
                number = 1 if name in _SLOW else _BLOCK
                gc.collect()
                began = time.process_time()
                contenders[name](number)
                found[name] = min(found[name], (time.process_time() - began) / number)
            order.append(order.pop(0))
    return found


# --- parts of a step

_PARTS = {
    "noise": ["mechanism:Mechanism._add_noise"],
    "checks of state": [
        *(f"sealed.sealed_state:SealedState.{name}" for name in ("begin_step", "check", "seal")),
        *(f"sealed.attribute_watch:AttributeWatch.{name}" for name in ("begin_step", "check", "end_forward")),
        *(f"sealed.snapshot:Snapshot.{name}" for name in ("changed", "values", "restore")),
        *(f"sealed.option_watch:OptionWatch.{name}" for name in ("check", "seal")),
        "sealed.sample_replay:SampleReplay.check",
    ],
    "random streams": [f"forward_randomness:ForwardRandomness.{name}" for name in ("begin", "__enter__", "__exit__")],
    "sample": ["sampling:PoissonSampling.draw"],
    "account": ["budget:Accountant.charge"],
}
"""Functions in `trainstack.backends.dp` by their purpose."""


def parts(model: str, batch: int, rounds: int) -> dict[str, float]:
    """CPU seconds of the parts of one `sp-dp` step: the least of `rounds` blocks."""
    spent = dict.fromkeys(_PARTS, 0.0)
    found = dict.fromkeys(_PARTS, float("inf"))
    with tempfile.TemporaryDirectory() as folder, _timed(spent):
        make = prepared("steps", "sp-dp", model, batch, dataset(model), Path(folder))
        make(16)  # the first steps have more checks
        for _ in range(rounds):
            spent.update(dict.fromkeys(_PARTS, 0.0))
            make(_BLOCK)
            found = {name: min(found[name], seconds / _BLOCK) for name, seconds in spent.items()}
    return found


@contextmanager
def _timed(spent: dict[str, float]) -> Iterator[None]:
    """A block in which the outermost call of a function of `_PARTS` adds its CPU time."""
    open_parts: list[str] = []

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if open_parts:
                return function(*args, **kwargs)
            open_parts.append(part)
            began = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[open_parts.pop()] += time.process_time() - began

        return call

    with ExitStack() as stack:
        for part, places in _PARTS.items():
            for module, _, path in (place.partition(":") for place in places):
                owner, name = path.split(".")
                kind = getattr(importlib.import_module(f"trainstack.backends.dp.{module}"), owner)
                stack.enter_context(mock.patch.object(kind, name, timed(part, getattr(kind, name))))
        yield


# --- memory


def peak(kind: str, model: str, name: str, batch: int) -> float:
    """Peak memory in MiB of making a contender and a few steps in a new process, without dataset and imports.

    It is nan without /proc.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", "private", "--memory-of", kind, model, name, str(batch)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    return float(done.stdout.split()[-1])


def _own_peak(kind: str, model: str, name: str, batch: int) -> float:
    data = dataset(model)
    with tempfile.TemporaryDirectory() as folder:
        prepared(kind, name, model, 2, data, Path(folder, "first"))  # imports, which are not measured
        gc.collect()
        forget_peak()
        before = memory("VmRSS")
        prepared(kind, name, model, batch, data, Path(folder, "measured"))
        return memory("VmHWM") - before


# --- tables


def main(argv: Sequence[str]) -> int:
    """Print a row for each model and number of threads."""
    options = _parser().parse_args(argv)
    if options.memory_of:
        torch.set_num_threads(1)
        kind, model, name, batch = options.memory_of
        print(_own_peak(kind, model, name, int(batch)))
        return 0
    keep_freed_memory()
    kind, known = ("gradients", GRADIENTS) if options.gradients else ("steps", STEPS)
    base, *others = known
    unknown = sorted(set(options.only or ()) - set(others))
    if unknown:
        raise SystemExit(f"{', '.join(unknown)}: write some of {', '.join(others)}.")
    names = [base, *(options.only or others)]
    print(", ".join(f"{name} {value}" for name, value in versions().items()))
    print(
        f"{options.records} records. CPU time of all threads over that of {base}; least of {options.rounds} blocks.\n"
    )
    _print_times(kind, names, options)
    if options.memory:
        _print_memory(kind, names, options)
    return 0


def _print_times(kind: str, names: Sequence[str], options: argparse.Namespace) -> None:
    base, *others = names
    has_goal, lines = kind == "steps", []
    print(f"| model | threads | {base} |{' goal |' if has_goal else ''} {' | '.join(others)} |")
    print("|---" * (len(names) + 2 + has_goal) + "|")
    for model in options.model or MODELS:
        for threads in options.threads or (1, 2):
            torch.set_num_threads(threads)
            found = least(kind, model, names, options.records, options.rounds)
            cells = [f"{found[name] / found[base]:.2f}" for name in others]
            goal = f" {GOALS[model]} |" if has_goal else ""
            print(f"| {model} | {threads} | {1e3 * found[base]:.2f} ms |{goal} {' | '.join(cells)} |", flush=True)
            if "sp-dp" in others:
                lines.append(f"{model}, {threads} threads: {_described(model, found, options)}")
    print("", *lines, sep="\n")


def _described(model: str, found: dict[str, float], options: argparse.Namespace) -> str:
    """Parts of the private step as shares of the plain one, and the distance to the hand-written step."""
    shares = parts(model, options.records, options.rounds)
    text = ", ".join(f"{part} {100 * seconds / found['sp']:.1f} %" for part, seconds in shares.items())
    if "by hand" in found:
        text += f"; sp-dp is {100 * (found['sp-dp'] / found['by hand'] - 1):.0f} % above the step by hand"
    return f"of a plain step, {text}."


def _print_memory(kind: str, names: Sequence[str], options: argparse.Namespace) -> None:
    print(f"\nPeak memory, MiB, and over {names[0]}.\n\n| model | {' | '.join(names)} |")
    print("|---" * (len(names) + 1) + "|")
    for model in options.model or MODELS:
        found = {name: peak(kind, model, name, options.records) for name in names}
        cells = [f"{found[name]:.0f} ({found[name] / found[names[0]]:.2f})" for name in names]
        print(f"| {model} | {' | '.join(cells)} |", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.bench private", description=__doc__)
    parser.add_argument("--gradients", action="store_true", help="only sums of clipped gradients, in each grad_mode")
    parser.add_argument("--model", action="append", choices=MODELS, help="only this one; can be repeated")
    parser.add_argument("--threads", action="append", type=int, help="threads of torch (default: 1 and 2)")
    parser.add_argument("--records", type=int, default=256, help="records in a step (default: 256)")
    parser.add_argument("--only", action="append", metavar="NAME", help="only this one, with the plain step")
    parser.add_argument("--rounds", type=int, default=30, help="blocks of each contender (default: 30)")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="omit peak memory")
    names = ("KIND", "MODEL", "CONTENDER", "RECORDS")
    parser.add_argument("--memory-of", nargs=4, metavar=names, help=argparse.SUPPRESS)
    return parser
