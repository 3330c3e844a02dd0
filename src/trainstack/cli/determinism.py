"""`trainstack doctor --determinism FILE.py:MODULE` trains a few steps in several processes and compares their bits."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainstack.backends import parse_spec
from trainstack.backends.spec import registered_backend
from trainstack.cli.main import Parser
from trainstack.cli.options import Inputs
from trainstack.cli.printing import FAILED, print_json, print_lines
from trainstack.cli.target import load_target, report_user_errors
from trainstack.errors import ConfigurationError
from trainstack.trainer import ModuleInterface, TrainerArguments, seed_everything
from trainstack.verifying.determinism.operators import Operator
from trainstack.verifying.determinism.report import DeterminismReport
from trainstack.verifying.determinism.step_trace import Entry, first_difference, trace_steps
from trainstack.verifying.determinism.user_sources import Source
from trainstack.verifying.determinism.watch import measure_cost, watch_steps

_ABOUT = (
    "Train a few global steps of a module in two processes and compare all bits: batches, random states, outputs of "
    "the parts, losses, gradients, weights. A third process finds operators and calls that are not deterministic. The "
    "options are those of `trainstack train`. Exit code 0: the same bits; 1: they differ; 2: it cannot be said."
)

OPTION = "--determinism"


def run(words: Sequence[str]) -> int:
    """Check the target after `--determinism`. Returns the exit code."""
    target, options = _split(words)
    with_help = "--help" in options or "-h" in options
    with report_user_errors():
        made_by = None if with_help or not target else load_target(target)
    given, arguments, parameters = _read(target, made_by, options)
    if made_by is None:
        raise ConfigurationError("--determinism needs FILE.py:MODULE after it.")
    make = partial(made_by, **parameters)
    _check(arguments)
    if given.answer is not None:
        _answer(make, arguments, given)
        return 0
    report = _compare(target, options)
    if given.json:
        print_json(report.to_dict())
    else:
        print_lines("\n".join(report.lines()))
    return 0 if report.is_deterministic else FAILED


def _split(words: Sequence[str]) -> tuple[str, list[str]]:
    """The target, and the other words."""
    left = list(words)
    at = next(i for i, word in enumerate(left) if word.partition("=")[0] == OPTION)
    _, equals, target = left.pop(at).partition("=")
    if not equals:
        target = left.pop(at) if at < len(left) and not left[at].startswith("-") else ""
    return target, left


def _read(
    target: str, made_by: Callable[..., Any] | None, options: Sequence[str]
) -> tuple[argparse.Namespace, TrainerArguments, dict[str, Any]]:
    parser = Parser(
        prog=f"trainstack doctor {OPTION} {target or 'FILE.py:MODULE'}",
        description=_ABOUT,
        usage="%(prog)s [--OPTION VALUE ...]",
    )
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="global steps to train (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--answer", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=("trace", "watch"), default="trace", help=argparse.SUPPRESS)
    inputs = Inputs(parser, made_by)
    given = inputs.read(options)
    if given.steps < 1:
        raise ConfigurationError(f"--steps {given.steps}: write a whole number, 1 or more.")
    return given, inputs.arguments(), {} if made_by is None else inputs.parameters(target)


def _check(arguments: TrainerArguments) -> None:
    """Refuse a run that a process cannot train alone, or not twice.

    Raises:
        ConfigurationError: the backend joins processes or is private.
    """
    if registered_backend(arguments.backend) is not None:
        return
    for record in parse_spec(arguments.resolved_backend):
        if record.layer.joins_processes or record.layer.private:
            why = "draws secret random numbers" if record.layer.private else "joins processes"
            raise ConfigurationError(
                f"backend {arguments.backend!r}: the layer {record.token!r} {why}, and the steps are compared between "
                "two processes that train alone. Write --backend sp, with its precision, such as sp-bf16."
            )


def _answer(make: Callable[[], ModuleInterface], arguments: TrainerArguments, given: argparse.Namespace) -> None:
    """Train in this process, and write the results to the file `--answer`."""
    found: dict[str, Any] = {}
    with report_user_errors(), warnings.catch_warnings():
        if given.part == "trace":
            seed_everything(arguments.seed)
            found["entries"] = trace_steps(make(), arguments, given.steps)
        else:
            found["sources"], found["operators"] = watch_steps(make, arguments, given.steps)
            warnings.simplefilter("ignore")
            found["cost"] = measure_cost(make, arguments, given.steps)
    Path(given.answer).write_text(json.dumps(found), encoding="utf-8")


def _compare(target: str, options: Sequence[str]) -> DeterminismReport:
    ask = partial(_ask, target, [word for word in options if word != "--json"])  # the error of a process is text
    one, other = (_entries(ask("trace", hash_seed)) for hash_seed in (1, 2))
    difference, by_hashes = first_difference(one, other), False
    if difference is not None:
        by_hashes = first_difference(one, _entries(ask("trace", 1))) is None
    watched = ask("watch", 1)
    return DeterminismReport(
        target=target,
        steps=max((entry.step for entry in one if entry.quantity == "optimizer"), default=0),
        difference=difference,
        depends_on_hashes=by_hashes,
        sources=[Source(*each) for each in watched["sources"]],
        operators=[Operator(*each) for each in watched["operators"]],
        cost=watched["cost"],
    )


def _entries(found: dict[str, Any]) -> list[Entry]:
    return [Entry(*each) for each in found["entries"]]


def _ask(target: str, options: Sequence[str], part: str, hash_seed: int) -> dict[str, Any]:
    """The results of a new process, in which texts have the hashes of `hash_seed`.

    Raises:
        ConfigurationError: it failed; its error is printed.
    """
    with tempfile.TemporaryDirectory(prefix="trainstack-determinism-") as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "trainstack", "doctor", OPTION, target, *options]
        command += ["--part", part, "--answer", str(answer)]
        environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode or not answer.is_file():
            raise ConfigurationError(
                f"{target} cannot be trained for a few steps: {ended.stderr.strip() or ended.returncode}"
            )
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found
