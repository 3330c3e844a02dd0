"""`trainstack interrupted RUN_DIR` answers, by its exit code, whether a run is to be started again."""

from __future__ import annotations

import argparse
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from trainstack.cli.printing import print_json, print_line
from trainstack.errors import ConfigurationError
from trainstack.trainer.reporting.report.facts import FILE_NAME, RunFacts, Session

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
    parser.add_argument(
        "--without-progress",
        metavar="N",
        type=int,
        default=5,
        help="exit with 1 after more than N sessions in a row that a signal ended before they made a step (default 5); "
        "in a job of SLURM only its own sessions count. A rank that fails on import looks like that: SLURM sends "
        "SIGTERM to the others",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_interrupted)


def _interrupted(args: argparse.Namespace) -> int:
    for name in ("or_killed", "without_progress"):
        given = getattr(args, name)
        if given is not None and given < 0:
            option = f"--{name.replace('_', '-')}"
            raise ConfigurationError(f"{option} {given}: write a number of restarts from 0 up.")
    sessions, ended = _sessions(args.directory, _seconds(args.since))
    status = sessions[-1].status if sessions else None
    killed = args.or_killed is not None and status in (None, "running")
    fruitless = _fruitless(sessions)
    if killed:
        starts_again, restarts = _restarts() < args.or_killed, _restarts()
        ended += f"; {restarts} of {args.or_killed} restarts are used"
    else:
        starts_again = status == "interrupted" and fruitless <= args.without_progress
        if fruitless > 1:
            ended += f"; the last {fruitless} sessions were interrupted before they made a step"
            ended += "" if starts_again else f", which is more than --without-progress {args.without_progress}"
    if args.json:
        print_json({"start_again": starts_again, "status": status, "reason": ended})
    else:
        print_line(f"{args.directory}: {ended}")
    return _YES if starts_again else _NO


def _sessions(directory: Path, since: float) -> tuple[tuple[Session, ...], str]:
    """All sessions, none if the newest did not begin after `since`; and the end of the newest, as text."""
    try:
        sessions = RunFacts.read(directory).sessions
    except FileNotFoundError:
        return (), f"no session has begun; there is no {FILE_NAME}"
    if not sessions or sessions[-1].began < since:
        return (), "no session has begun since then"
    newest = sessions[-1]
    if newest.status == "running":
        return sessions, "the newest session has not ended: the process runs, or was killed"
    return sessions, f"the newest session is {newest.status}" + (f" ({newest.reason})" if newest.reason else "")


def _fruitless(sessions: tuple[Session, ...]) -> int:
    """The number of newest sessions, in a row, that were interrupted before a step was made; of this job in SLURM."""
    count = 0
    for session in reversed(sessions):
        if session.status != "interrupted" or session.last_step != session.first_step:
            break
        count += 1
    return min(count, _restarts() + 1) if os.environ.get("SLURM_JOB_ID") else count


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
