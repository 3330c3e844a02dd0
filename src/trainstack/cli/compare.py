"""`trainstack compare RUN RUN` says at which global step two runs diverge, and the cause."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from trainstack.cli.printing import FAILED, print_at_once, print_json, print_lines
from trainstack.cli.target import FORM, load_target, report_user_errors
from trainstack.errors import ConfigurationError
from trainstack.replaying import compare_by_replay
from trainstack.replaying.arguments import module_parameters, read_arguments
from trainstack.trainer.reporting.run_comparison import RunComparison, compare_runs
from trainstack.trainer.run_files import CONFIG


def add(subparsers: Any) -> None:
    """Add the command."""
    about = "find the first global step at which two runs diverge, and the cause, from their step logs"
    parser = subparsers.add_parser("compare", help=about, description=about)
    parser.add_argument("runs", metavar="RUN", nargs=2, type=Path, help="the output_dir of a run")
    parser.add_argument("--target", metavar="TARGET", help=f"the module or its function, for replays. {FORM}")
    parser.add_argument("--other-target", metavar="TARGET", help="for the second run (default: that of --target)")
    config = f"the arguments of the %s run, for its replay (default: {CONFIG} in RUN)"
    parser.add_argument("--config", metavar="FILE", type=Path, help=config % "first")
    parser.add_argument("--other-config", metavar="FILE", type=Path, help=config % "second")
    parser.add_argument(
        "--tolerance",
        metavar="X",
        type=float,
        help="the largest relative difference of two losses or gradient norms that counts as the same",
    )
    parser.add_argument("--absolute-tolerance", metavar="X", type=float, help="the same as a difference")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_compare)


def _compare(args: argparse.Namespace) -> int:
    if args.target is None and (args.other_target or args.config or args.other_config):
        raise ConfigurationError(
            "--other-target, --config and --other-config are for replays, which need a target. Write --target "
            f"TARGET too. {FORM}"
        )
    limits = {"tolerance": args.tolerance, "absolute_tolerance": args.absolute_tolerance}
    if args.target is not None and any(value is not None for value in limits.values()):
        raise ConfigurationError(
            "--target finds the first step with other bits, and --tolerance allows other bits. Remove one of them."
        )
    found = compare_runs(*args.runs, **limits) if args.target is None else _by_replay(args)
    if args.json:
        changes = [{**asdict(change), "effect": change.effect.value} for change in found.changes]
        print_json({"same": found.same, **asdict(found), "changes": changes})
    else:
        print_lines(str(found))
    return 0 if found.same else FAILED


def _by_replay(args: argparse.Namespace) -> RunComparison:
    targets = list(dict.fromkeys((args.target, args.other_target or args.target)))  # a file is run once
    files = {Path(place).resolve() for place, _, _ in (target.rpartition(":") for target in targets)}
    if len({file.name for file in files}) < len(files):
        raise ConfigurationError(
            f"{targets[0]} and {targets[1]} are files of the same name, by which the processes of the replays import "
            "them. Rename one of them."
        )
    with report_user_errors():
        makers = [load_target(target) for target in targets]
    configs = args.config, args.other_config
    bound: list[Any] = [
        partial(maker, **module_parameters(config or run / CONFIG, maker))
        for maker, config, run in zip((makers[0], makers[-1]), configs, args.runs, strict=True)
    ]
    given = [None if config is None else read_arguments(config) for config in configs]
    say: Callable[[str], None] = (lambda _: None) if args.json else print_at_once
    return compare_by_replay(bound[0], *args.runs, other_module=bound[1], args=given[0], other_args=given[1], say=say)
