"""`trainstack train FILE.py:MODULE` trains without a script."""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Sequence
from typing import Any

from trainstack.cli.options import arguments_of, build_parser, split_files
from trainstack.cli.printing import suggest_options
from trainstack.cli.target import FORM, UserCodeError, load_target, report_user_errors
from trainstack.errors import ConfigurationError
from trainstack.trainer import ModuleInterface, Trainer, seed_everything


def add(subparsers: Any) -> None:
    """Name the command in the list of them; `run` reads what stands behind it."""
    subparsers.add_parser("train", help="train a module that a file defines; needs the extra 'cli'", add_help=False)


def run(words: Sequence[str]) -> int:
    """Train; the random numbers of the process are seeded before the module is made. Returns the exit code."""
    if words and not words[0].startswith("-"):
        target, options = words[0], list(words[1:])
    elif "--help" in words or "-h" in words:
        target, options = None, list(words)
    else:
        raise ConfigurationError(f"trainstack train needs to be told what to train, before any option. {FORM}")
    try:
        _train(target, options)
    except UserCodeError as error:
        traceback.print_exception(error.__cause__)
        return 1
    return 0


def _train(target: str | None, options: list[str]) -> None:
    makes_module = None if target is None else load_target(target)
    parser = None
    try:
        files, options = split_files(options)
        parser = build_parser(makes_module, files)
        given = parser.parse_args(options)
    except argparse.ArgumentError as error:
        hint = suggest_options(str(error).partition("unrecognized arguments: ")[2].split(), parser) if parser else ""
        raise ConfigurationError(f"{error}{hint} (see trainstack train {target} --help)") from error
    arguments = arguments_of(given.as_dict())
    seed_everything(arguments.seed)
    with report_user_errors():
        made = getattr(parser.instantiate(given), "module", None)  # of a function only its arguments are made
        if isinstance(made, ModuleInterface):
            module = made
        else:
            assert makes_module is not None  # --help, the one option without a target, has ended the process
            module = makes_module(**(made.as_dict() if made is not None else {}))
    trainer = Trainer(module, arguments)
    with report_user_errors():  # of theirs as likely as of a wrong option
        trainer.train()
