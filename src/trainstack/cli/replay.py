"""`trainstack replay RUN TARGET` makes recorded steps again and compares their bits."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trainstack.cli.printing import FAILED, print_at_once, print_json, print_line
from trainstack.cli.target import FORM, load_target, report_user_errors
from trainstack.errors import ConfigurationError
from trainstack.replaying import follow
from trainstack.replaying.arguments import module_parameters, read_arguments
from trainstack.replaying.task import TOLERANCE, ReplayTask
from trainstack.trainer.plain_arguments import read_config
from trainstack.trainer.run_files import CONFIG
from trainstack.trainer.run_record import read_record


def add(subparsers: Any) -> None:
    """Add the command."""
    about = "make recorded steps of a run again in new processes, and compare every recorded bit"
    parser = subparsers.add_parser("replay", help=about, description=about)
    parser.add_argument("folder", metavar="RUN", type=Path, help="the output_dir of a run")
    parser.add_argument("target", metavar="TARGET", nargs="?", help=f"the module, or a function that makes it. {FORM}")
    parser.add_argument("--from", dest="first", metavar="STEP", type=int, help="the first global step, counted from 1")
    parser.add_argument("--to", dest="last", metavar="STEP", type=int, help="the last global step")
    parser.add_argument(
        "--config", metavar="FILE", type=Path, help=f"the arguments of the run (default: {CONFIG} in RUN)"
    )
    parser.add_argument("--nproc", metavar="N", type=int, help="processes (default: as many as the run had)")
    parser.add_argument("--workers", metavar="N", type=int, help="the most workers of a training loader")
    parser.add_argument(
        "--tolerance",
        metavar="X",
        type=float,
        default=TOLERANCE,
        help="relative, for another number of processes (default: %(default)s)",
    )
    parser.add_argument("--follow", action="store_true", help="replay a live run between its checkpoints until it ends")
    parser.add_argument(
        "--interval", metavar="SECONDS", type=float, default=5.0, help="between two looks at a live run (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_replay)


def _replay(args: argparse.Namespace) -> int:
    folder: Path = args.folder
    if args.target is None:
        raise ConfigurationError(_without_target(folder))
    if args.follow and (args.first is not None or args.last is not None):
        raise ConfigurationError("--follow replays all steps as they are made. Remove --from and --to.")
    for name in ("workers", "tolerance", "interval"):
        given = getattr(args, name)
        if given is not None and not given >= 0:
            raise ConfigurationError(f"--{name} {given}: write a number, 0 or more.")
    config = args.config or folder / CONFIG
    options: dict[str, Any] = {name: getattr(args, name) for name in ("nproc", "workers", "tolerance")}
    with report_user_errors():
        makes_module = load_target(args.target)
    parameters = module_parameters(config, makes_module)
    make: Callable[..., Any] = partial(makes_module, **parameters) if parameters else makes_module
    options["args"] = None if args.config is None else read_arguments(config)
    say: Callable[[str], None] = (lambda _: None) if args.json else print_at_once
    if args.follow:
        report = follow(make, folder, interval_s=args.interval, say=lambda found: say(str(found)), **options)
    else:
        task = ReplayTask.of(make, folder, **options)
        report = task.replay(task.span(args.first, args.last), say)
        say(report.verdict)
    if args.json:
        print_json({"same": None} if report is None else report.to_json())
    elif report is None:
        print_line("the run has ended without a recorded step")
    return FAILED if report is not None and not report.same else 0


def _without_target(folder: Path) -> str:
    """The instruction to write the target that the folder names. The file does not import it."""
    record, path = read_record(folder), folder / CONFIG
    named = read_config(path).get("target") if path.is_file() else None
    named = named or (None if record is None else record.module)
    hint = "" if named is None else f" The record of the run names {str(named)!r}: write that, if you trust the file."
    return f"trainstack replay needs the module after the folder of the run. {FORM}{hint}"
