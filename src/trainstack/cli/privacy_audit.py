"""`trainstack privacy audit`: experiments that would show if private training did not keep its promise."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from trainstack.backends.dp import DifferentialPrivacyArguments
from trainstack.backends.dp.accounting import ACCOUNTANTS
from trainstack.ranks import global_rank

FOUND = 1

_SETTINGS = ("delta", "noise_multiplier", "target_epsilon", "clipping", "grad_mode", "accountant", "secure")
_NUMBERS = ("train_batch_size", "dataset_size", "epochs")


def add(questions: Any) -> None:
    """Add the question to those of `trainstack privacy`."""
    parser = questions.add_parser("audit", help="train on canaries, and look for what the privacy layer lets through")
    parser.add_argument("--delta", type=float, required=True, help="smaller than 1 / N")
    noise = parser.add_mutually_exclusive_group(required=True)
    noise.add_argument("--noise-multiplier", type=float, metavar="SIGMA", help="standard deviation / clipping norm")
    noise.add_argument("--target-epsilon", type=float, metavar="EPSILON", help="have the noise calibrated")
    parser.add_argument("--backend", default="sp-dp", help="with dp in it; ddp-dp under torchrun (default: sp-dp)")
    parser.add_argument("--clipping", choices=("flat", "automatic", "adaptive"), default="flat")
    parser.add_argument("--grad-mode", default="auto", help="how gradients of single records are computed")
    parser.add_argument("--accountant", choices=ACCOUNTANTS, default="prv")
    parser.add_argument("--secure", action="store_true", help="randomness from the operating system, number by number")
    parser.add_argument("--batch-size", type=int, default=500, dest="train_batch_size", metavar="B")
    parser.add_argument("--dataset-size", type=int, default=2000, metavar="N", help="canaries in each run")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--level", choices=("quick", "full"), default="quick", help="full takes three times as long")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from trainstack.backends.dp.audit import audit

    settings = DifferentialPrivacyArguments(**{name: getattr(options, name) for name in _SETTINGS})
    numbers = {name: getattr(options, name) for name in _NUMBERS}
    rank = global_rank()  # before the audit, which ends with its process group closed
    report = audit(settings, options.backend, level=options.level, **numbers)
    if rank == 0:
        sys.stdout.write((report.to_json() if options.json else report.text) + "\n")
    return FOUND if report.broken else 0
