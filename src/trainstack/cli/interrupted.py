"""`trainstack interrupted RUN_DIR` answers, by its exit code, whether a run is to be started again."""

from __future__ import annotations

import argparse
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from trainstack.cli.printing import print_line
from trainstack.errors import ConfigurationError
from trainstack.trainer.reporting.report.facts import FILE_NAME, RunFacts

_YES, _NO = 0, 1


def add(subparsers: Any) -> None:
    """Add the command."""
    about = "exit with 0 if the newest session of a run was interrupted by a signal: start its job again; else 1"
    parser = subparsers.add_parser("interrupted", help=about, description=about)
    parser.add_argument("directory", metavar="RUN_DIR", type=Path, help="the output_dir of a run")
    parser.add_argument(
        "--since",
        metavar="TIME",
        help="count only sessions that began after TIME: seconds since 1970 (date +%%s), or 2025-01-31T12:00:00",
    )
    parser.add_argument(
        "--or-killed",
        metavar="N",
        type=int,
        help="also exit with 0 where the run was killed: the newest session has not ended, or none has begun since "
        "TIME; at most N times in a job, as SLURM_RESTART_COUNT counts them",
    )
    parser.set_defaults(run=_interrupted)


def _interrupted(args: argparse.Namespace) -> int:
    if args.or_killed is not None and args.or_killed < 0:
        raise ConfigurationError(f"--or-killed {args.or_killed}: write a number of restarts from 0 up.")
    status, ended = _newest_session(args.directory, _seconds(args.since))
    killed = args.or_killed is not None and status in (None, "running")
    restarts = _restarts() if killed else 0
    goes_on = status == "interrupted" or (killed and restarts < args.or_killed)
    limit = f"; {restarts} of {args.or_killed} restarts are used" if killed else ""
    print_line(f"{args.directory}: {ended}{limit}")
    return _YES if goes_on else _NO


def _newest_session(directory: Path, since: float) -> tuple[str | None, str]:
    """The status of the newest session, None if none began after `since`; and that in words."""
    try:
        sessions = RunFacts.read(directory).sessions
    except FileNotFoundError:
        return None, f"no session has begun; there is no {FILE_NAME}"
    if not sessions or sessions[-1].began < since:
        return None, "no session has begun since then"
    newest = sessions[-1]
    status = newest.status
    if status == "running":
        return status, "the newest session has not ended: the process runs, or was killed"
    return status, f"the newest session is {status}" + (f" ({newest.reason})" if newest.reason else "")


def _seconds(text: str | None) -> float:
    if text is None:
        return float("-inf")
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()  # without a zone it is local time
    except ValueError as error:
        now = int(time.time())
        raise ConfigurationError(f"--since {text!r}: write seconds since 1970, such as {now}, or a date.") from error


def _restarts() -> int:
    text = os.environ.get("SLURM_RESTART_COUNT", "0")
    return int(text) if text.isdecimal() else 0
