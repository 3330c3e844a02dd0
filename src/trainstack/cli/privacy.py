"""`trainstack privacy` computes the privacy cost of a training without running it."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from trainstack.backends.dp import (
    DifferentialPrivacyArguments,
    calibrate_noise,
    epsilon_of,
    fixed_order_epsilon,
    shuffled_epsilon_at_least,
    steps_within,
)
from trainstack.backends.dp.accounting import ACCOUNTANTS
from trainstack.backends.dp.arguments import check_delta_for, sampling_rate
from trainstack.backends.privacy_statement import round_up
from trainstack.cli import privacy_ledger
from trainstack.cli.printing import FAILED, print_json, print_line, print_lines
from trainstack.errors import ConfigurationError
from trainstack.ranks import global_rank


def add_audit(questions: Any) -> None:
    """Add the question to those of `trainstack privacy`."""
    parser = questions.add_parser("audit", help="train on canaries, and measure the leakage through the privacy layer")
    about = "the output_dir of a private run, whose settings are the defaults of the options"
    parser.add_argument("run_dir", metavar="RUN", nargs="?", help=about)
    parser.add_argument("--delta", type=float, help="smaller than 1 / N; needed without RUN")
    noise = parser.add_mutually_exclusive_group()
    noise.add_argument("--noise-multiplier", type=float, metavar="SIGMA", help="standard deviation / clipping norm")
    noise.add_argument("--target-epsilon", type=float, metavar="EPSILON", help="have the noise calibrated")
    parser.add_argument("--backend", default="sp-dp", help="with dp in it; ddp-dp under torchrun (default: sp-dp)")
    parser.add_argument("--clipping", choices=("flat", "automatic", "adaptive"), help="of gradients (default: flat)")
    parser.add_argument("--grad-mode", default="auto", help="how gradients of single records are computed")
    parser.add_argument("--accountant", choices=ACCOUNTANTS, help="of epsilon (default: prv)")
    parser.add_argument("--secure", action="store_true", help="randomness from the operating system, number by number")
    about = "expected size of a step's sample (default: 500)"
    sizes = ("--batch-size", "--train-batch-size")
    parser.add_argument(*sizes, type=int, dest="train_batch_size", metavar="B", help=about)
    parser.add_argument("--dataset-size", type=int, metavar="N", help="canaries in each run (default: 2000)")
    parser.add_argument("--epochs", type=int, help="of each run (default: 2)")
    parser.add_argument("--level", choices=("quick", "full"), default="quick", help="full takes three times as long")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from trainstack.auditing import audit

    chosen = _audit_settings(options)
    numbers = {name: chosen.pop(name) for name in ("train_batch_size", "dataset_size", "epochs")}
    settings = DifferentialPrivacyArguments(**chosen)
    rank = global_rank()  # before the audit, which ends with its process group closed
    report = audit(settings, options.backend, level=options.level, **numbers)
    if rank == 0:
        if options.json:
            print_json(json.loads(report.to_json()))
        else:
            print_lines(report.text)
    return FAILED if report.broken else 0


_OF_RUNS = ("delta", "noise_multiplier", "clipping", "accountant", "train_batch_size", "dataset_size", "epochs")
_AUDIT_DEFAULTS = {"clipping": "flat", "accountant": "prv", "train_batch_size": 500, "dataset_size": 2000, "epochs": 2}


def _audit_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, then the settings of the run in `options.run_dir`, then defaults."""
    names = (*_OF_RUNS, "target_epsilon", "grad_mode", "secure")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    found = _settings_of_run(options.run_dir) if options.run_dir is not None else {}
    if "target_epsilon" in given:
        found.pop("noise_multiplier", None)
    chosen = _AUDIT_DEFAULTS | found | given
    if "delta" not in chosen or not {"noise_multiplier", "target_epsilon"} & chosen.keys():
        raise ConfigurationError(
            "Which training? Write the output_dir of a private run, trainstack privacy audit RUN, or --delta and one "
            "of --noise-multiplier and --target-epsilon."
        )
    return chosen


def _settings_of_run(folder: str) -> dict[str, Any]:
    statement = privacy_ledger.current_statement(Path(folder))
    batch, records, planned = statement.expected_batch_size, statement.dataset_size, statement.planned_steps
    if statement.delta is None or not statement.history or not batch or not records or not planned:
        raise ConfigurationError(
            f"The statement of {folder} has no guarantee to test. Write --delta and --noise-multiplier in place of it."
        )
    epochs = math.ceil(planned / math.ceil(records / batch))
    noise = statement.history[-1][0]
    values = (statement.delta, noise, statement.clipping, statement.accountant, batch, records, epochs)
    return dict(zip(_OF_RUNS, values, strict=True))


ASSUMES = (
    "each step a Poisson sample; the protected unit is one item of the data set, added or removed (not "
    "replaced); its size N and the batch size are public"
)
_MOST_STEPS = 2**30


def add(subparsers: Any) -> None:
    """Add the command and its questions."""
    about = "epsilon, noise or steps of private training; an audit of it"
    parser = subparsers.add_parser("privacy", help=about, description=about)
    questions = parser.add_subparsers(title="questions", metavar="QUESTION", required=True)

    epsilon = questions.add_parser("epsilon", help="the epsilon that a number of steps with this noise spends")
    epsilon.set_defaults(run=_run_epsilon)
    noise = questions.add_parser("noise", help="the noise with which so many steps stay within a budget")
    noise.add_argument("--target-epsilon", type=float, required=True, metavar="EPSILON", help="the budget")
    noise.set_defaults(run=_run_noise)
    steps = questions.add_parser("steps", help="how many steps with this noise stay within a budget")
    steps.add_argument("--max-epsilon", type=float, required=True, metavar="EPSILON", help="the budget")
    steps.set_defaults(run=_run_steps)
    for question in (epsilon, steps):
        about = "standard deviation / clipping norm"
        question.add_argument("--noise-multiplier", type=float, required=True, metavar="SIGMA", help=about)
    for question in (epsilon, noise):
        about = "of N / batch size steps each, rounded up, as the Trainer makes them"
        duration = question.add_mutually_exclusive_group(required=True)
        duration.add_argument("--steps", type=int, help="of the whole training")
        duration.add_argument("--epochs", type=int, help=about)
    for question in (epsilon, noise, steps):
        _add_mechanism(question)
    add_audit(questions)
    privacy_ledger.add(questions)


def _add_mechanism(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sample-rate", type=float, metavar="Q", help="batch size / N; give this, or both of those")
    parser.add_argument(
        "--batch-size", "--train-batch-size", type=int, metavar="B", help="expected size of a step's sample"
    )
    parser.add_argument("--dataset-size", type=int, metavar="N", help="number of items")
    parser.add_argument("--delta", type=float, required=True, help="smaller than 1 / N")
    parser.add_argument("--accountant", choices=ACCOUNTANTS, default="prv", help="prv is tight, rdp quick, pld slow")
    parser.add_argument("--json", action="store_true", help="print one JSON object, numbers not rounded")


def _run_epsilon(args: argparse.Namespace) -> int:
    q = _rate(args)
    steps = _steps(args, q)
    history, shuffled = [(args.noise_multiplier, q, steps)], None
    if q and steps >= (whole := _steps_per_epoch(args, q)):  # the lower bound is that of one whole epoch
        shuffled = shuffled_epsilon_at_least(args.noise_multiplier, whole, args.delta)
    found = {
        "epsilon": epsilon_of(history, args.delta, args.accountant),
        **_by_both_accountants(history, args.delta),
        "fixed_order": fixed_order_epsilon(history, args.delta),
        "shuffled_at_least": shuffled,
    }
    lines = [
        f"epsilon {_format_epsilon(found['epsilon'])} at delta {args.delta:g}",
        _both_line(found),
        f"without Poisson samples: epsilon {_format_epsilon(found['fixed_order'])} with batches in a fixed order"
        + ("" if shuffled is None else f", at least {_format_epsilon(shuffled)} with shuffled ones"),
    ]
    return _answer(args, found, q, {"noise_multiplier": args.noise_multiplier, "steps": steps}, lines)


def _run_noise(args: argparse.Namespace) -> int:
    q = _rate(args)
    steps = _steps(args, q)
    sigma = calibrate_noise(args.target_epsilon, args.delta, q, steps, args.accountant)
    history = [(sigma, q, steps)]
    found = {"noise_multiplier": sigma, **_by_both_accountants(history, args.delta)}
    lines = [
        f"noise multiplier {sigma!r} for epsilon {args.target_epsilon:g} at delta {args.delta:g}",
        _both_line(found),
    ]
    return _answer(args, found, q, {"target_epsilon": args.target_epsilon, "steps": steps}, lines)


def _run_steps(args: argparse.Namespace) -> int:
    q, sigma = _rate(args), args.noise_multiplier
    if q == 0 or sigma == 0:
        raise ConfigurationError(f"noise {sigma} and rate {q}: no number of steps has a finite bound. Write more.")
    steps = steps_within(args.max_epsilon, [], sigma, q, args.delta, args.accountant, at_most=_MOST_STEPS)
    epochs = steps / _steps_per_epoch(args, q)
    found = {"steps": steps, "epochs": epochs, **_by_both_accountants([(sigma, q, steps)], args.delta)}
    more = " or more" if steps == _MOST_STEPS else ""
    lines = [
        f"{steps} steps{more}, {epochs:.4g} epochs, within epsilon {args.max_epsilon:g} at delta {args.delta:g}",
        _both_line(found),
    ]
    return _answer(args, found, q, {"max_epsilon": args.max_epsilon, "noise_multiplier": sigma}, lines)


def _rate(args: argparse.Namespace) -> float:
    sizes = (args.batch_size, args.dataset_size)
    if sizes == (None, None) and args.sample_rate is not None:
        return float(args.sample_rate)
    if args.sample_rate is not None:
        raise ConfigurationError(
            f"--sample-rate {args.sample_rate:g} with --batch-size or --dataset-size: both say how many items are in "
            "a step. Remove one."
        )
    if None in sizes:
        raise ConfigurationError(
            "How many items are in a step? Give --sample-rate, or --batch-size and --dataset-size."
        )
    for name, size in (("--batch-size", args.batch_size), ("--dataset-size", args.dataset_size)):
        if size < 1:
            raise ConfigurationError(f"{name} {size}: write a whole number above 0.")
    check_delta_for(args.delta, args.dataset_size)
    return sampling_rate(args.batch_size, args.dataset_size)


def _steps(args: argparse.Namespace, q: float) -> int:
    for name in ("steps", "epochs"):
        given = getattr(args, name)
        if given is not None and given < 0:
            raise ConfigurationError(f"--{name} {given}: write a whole number, 0 or more.")
    if args.steps is not None:
        return int(args.steps)
    if not 0 < q <= 1:
        raise ConfigurationError(f"--epochs with --sample-rate {q}: write --steps, or a rate above 0 and up to 1.")
    return int(args.epochs * _steps_per_epoch(args, q))


def _steps_per_epoch(args: argparse.Namespace, q: float) -> int:
    """The number in a `TrainingPlan`: the last step of an epoch counts even if it is not full."""
    if args.dataset_size is not None:
        return int(-(-args.dataset_size // args.batch_size))
    return math.ceil(round(1 / q, 6))


def _by_both_accountants(history: list[tuple[float, float, int]], delta: float) -> dict[str, Any]:
    return {kind: epsilon_of(history, delta, kind) for kind in ("prv", "rdp")}


def _both_line(found: dict[str, Any]) -> str:
    return (
        f"by accountant: prv {_format_epsilon(found['prv'])} (the smaller of both), rdp {_format_epsilon(found['rdp'])}"
    )


def _format_epsilon(epsilon: float) -> str:
    return "infinite" if epsilon == float("inf") else round_up(epsilon)


def _answer(args: argparse.Namespace, found: dict[str, Any], q: float, given: dict[str, Any], lines: list[str]) -> int:
    if args.json:
        numbers = {**given, "sample_rate": q, "delta": args.delta, "accountant": args.accountant, **found}
        print_json({**numbers, "assumes": ASSUMES})
    else:
        for line in [*lines, f"assumes: {ASSUMES}"]:
            print_line(line)
    return 0
