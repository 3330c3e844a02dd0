"""`trainstack plan` prints the step arithmetic of a run without running it."""

from __future__ import annotations

import argparse
from typing import Any

from trainstack.cli.printing import print_json, print_line
from trainstack.errors import ConfigurationError
from trainstack.trainer import TrainerArguments, TrainingPlan

_FIELDS = ("train_batch_size", "gpu_batch_size_limit", "epochs", "max_train_steps_per_epoch")


def add(subparsers: Any) -> None:
    """Add the command; its options are called as the fields of `TrainerArguments` are."""
    about = "print how a global batch is split and how many steps a run has"
    parser = subparsers.add_parser("plan", help=about, description=about)
    defaults = TrainerArguments()
    parser.add_argument("--samples", type=int, required=True, metavar="N", help="in the training data set")
    parser.add_argument("--processes", type=int, default=1, metavar="N")
    for name in _FIELDS:
        default = getattr(defaults, name)
        shown = "" if default is None else f"default: {default}"
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=shown)
    parser.add_argument("--drop_last", action="store_true", help="leave out a last batch that is not full")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_plan)


def _plan(args: argparse.Namespace) -> int:
    chosen = TrainerArguments(**{name: getattr(args, name) for name in _FIELDS})  # which checks them
    for name in ("samples", "processes"):
        if getattr(args, name) < 1:
            raise ConfigurationError(f"--{name} {getattr(args, name)}: write a whole number, 1 or more.")
    plan = TrainingPlan.make(
        train_batch_size=chosen.train_batch_size,
        gpu_batch_size_limit=chosen.gpu_batch_size_limit,
        world_size=args.processes,
        epochs=chosen.epochs,
        dataset_length=args.samples,
        drop_last=args.drop_last,
        max_steps_per_epoch=chosen.max_train_steps_per_epoch,
    )
    if args.json:
        print_json(plan.to_dict() | {"total_steps": plan.total_steps})
    else:
        for label, value in plan.rows():
            print_line(f"{label:<22} {value}")
    return 0
