"""`trainstack report RUN_DIR...` writes the report page of one or several runs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from trainstack._files import real_path
from trainstack.cli.printing import print_json, print_line
from trainstack.errors import ConfigurationError
from trainstack.trainer.reporting.report.facts import REPORT_NAME, replace_file
from trainstack.trainer.reporting.report.page import page_of
from trainstack.trainer.reporting.report.runs import read_run

_COMPARISON_NAME = "comparison.html"


def add(subparsers: Any) -> None:
    """Add the command."""
    about = "write a page about a run, or one that compares several: curves, arguments, checkpoints"
    parser = subparsers.add_parser("report", help=about, description=about)
    parser.add_argument("directories", metavar="RUN_DIR", nargs="+", help="the output_dir of a run")
    default = f"{REPORT_NAME} in RUN_DIR; of several runs {_COMPARISON_NAME} here"
    parser.add_argument("--output", metavar="FILE", type=Path, help=f"where to write (default: {default})")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> int:
    directories = [Path(given) for given in args.directories]
    resolved = [real_path(directory) for directory in directories]
    if len(set(resolved)) < len(directories):
        raise ConfigurationError("a run is named twice; name each once.")
    common = os.path.commonpath([path.parent for path in resolved])  # a label is a path without it
    labels = [str(path.relative_to(common)) for path in resolved]
    runs = [read_run(directory, label) for directory, label in zip(directories, labels, strict=True)]
    path = args.output or (directories[0] / REPORT_NAME if len(runs) == 1 else Path(_COMPARISON_NAME))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, page_of(runs))
    except OSError as error:  # which names the temporary file
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from error
    if args.json:
        print_json({"written": str(path), "runs": [str(directory) for directory in directories]})
    else:
        print_line(str(path))
    return 0
