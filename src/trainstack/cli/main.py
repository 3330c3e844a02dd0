"""`trainstack COMMAND ...` selects a command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from trainstack import __version__
from trainstack.cli import train
from trainstack.cli.printing import suggest_options
from trainstack.errors import TrainstackError

COMMANDS = ("train", "explain", "plan", "doctor", "report", "checkpoints", "privacy")
"""Modules of this package. Each has `add(subparsers)`, which sets the default `run`: arguments to exit code.

`train`, whose options depend on its first word, has `run` for the words behind its name.
"""

TROUBLE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; by default that of the process. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(
        prog="trainstack", description="Trains PyTorch models, and looks after what trainings leave behind."
    )
    parser.add_argument("--version", action="version", version=f"trainstack {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        import_module(f"trainstack.cli.{command}").add(subparsers)
    try:
        if words[:1] == ["train"]:
            code: int = train.run(words[1:])
        else:
            args = parser.parse_args(words)
            code = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `trainstack ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return TROUBLE
    except (TrainstackError, OSError) as error:
        print_error(str(error))
        return TROUBLE
    except KeyboardInterrupt:
        return 130


def print_error(message: str) -> None:
    """Say on standard error, in one line, what went wrong."""
    sys.stderr.write(f"trainstack: {' '.join(message.split())}\n")


class _Parser(argparse.ArgumentParser):
    """Answers a wrong command line with one line; those of the commands are of this class as well."""

    def parse_known_args(self, *given: Any, **more: Any) -> Any:
        """Refuse here, where its own options are known, what the parser of `trainstack` would refuse."""
        known, others = super().parse_known_args(*given, **more)
        if others:
            self.error(f"unrecognized arguments: {' '.join(others)}{suggest_options(others, self)}")
        return known, others

    def error(self, message: str) -> NoReturn:
        print_error(f"{message} (see {self.prog} --help)")
        sys.exit(TROUBLE)
