"""`trainstack COMMAND ...` selects a command.

Exit codes: 0, success; 1, the command found damage or a difference, or a training failed; 2, it could not do it, and
one line on standard error says why; 75 and 130, a signal ended a training; 141, the reader of the output went away.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from trainstack.cli import printing
from trainstack.errors import TrainstackError

COMMANDS = {
    "train": "train a module that a file defines",
    "validate": "compute the validation metrics of a run, a checkpoint or an export",
    "test": "compute the test metrics of a run, a checkpoint or an export",
    "predict": "write the predictions of a run, a checkpoint or an export to a file",
    "explain": "print the layers of a backend string and the way of each verb through them",
    "schema": "print the JSON schema of files for --config, for editors",
    "plan": "print how a global batch is split and how many steps a run has",
    "doctor": "look for mistakes in a script; without one, print versions and try backend strings on this machine",
    "report": "write a page about a run, or one that compares several: curves, arguments, checkpoints",
    "compare": "find the first global step at which two runs diverge, and the cause, from their step logs",
    "interrupted": "exit with 0 if the newest session of a run was interrupted by a signal: start its job again; "
    "else 1",
    "replay": "make recorded steps of a run again in new processes, and compare every recorded bit",
    "checkpoints": "list, verify, show, compare, export and sign checkpoints and model exports",
    "privacy": "epsilon, noise or steps of private training; an audit of it",
    "completion": "print the script that lets bash, zsh or fish complete commands and options",
}
"""The commands with their help. `module_of` imports the module of a command when it is chosen.

It has `add(subparsers)`, which sets the default `run`: arguments to exit code. Those of `READ_WORDS`, whose options
are the fields of `TrainerArguments`, have `run(command, words)` for the words after their name, and
`make_parser(command)`.
"""

READ_WORDS = ("train", "validate", "test", "predict", "plan")
_MODULES = {"validate": "evaluate", "test": "evaluate", "predict": "evaluate"}
"""The modules of commands that have another name than the command."""
_CHECKS_DETERMINISM = "--determinism"
_READER_GONE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; by default that of the process. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        words, output = printing.take_output_options(words)
    except TrainstackError as error:
        printing.print_error(str(error), error, "--json" in words)
        return printing.TROUBLE
    with output.applied():
        return _main(words, output)


def _main(words: list[str], output: printing.OutputOptions) -> int:
    as_json, trains = output.as_json, words[:1] == ["train"]
    try:
        _prepare_output(trains)
        try:
            with printing.only_json() if as_json and not output.quiet else nullcontext():
                code = _run(words)
        except SystemExit:
            _flush(trains)
            raise
        _flush(trains)
        return code
    except BrokenPipeError:  # `trainstack ... | head`
        _discard_output()
        return _READER_GONE
    except (TrainstackError, OSError) as error:
        _discard_output()
        printing.print_error(_in_words(error), error, as_json)
        return printing.TROUBLE
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        _discard_output()
        target = sys.modules.get("trainstack.cli.target")  # which imports torch
        if target is not None and isinstance(error, target.UserCodeError):
            printing.print_traceback(error.__cause__ or error, str(error), as_json)
            return printing.FAILED if words[0] in READ_WORDS else printing.TROUBLE
        if os.environ.get("TRAINSTACK_TRACEBACK") == "1":
            raise
        said = f"{type(error).__name__}: {error} (set TRAINSTACK_TRACEBACK=1 for the traceback)"
        printing.print_error(said, error, as_json)
        return printing.TROUBLE


def _in_words(error: Exception) -> str:
    if not isinstance(error, TrainstackError) and isinstance(getattr(error, "filename", None), str | bytes):
        assert isinstance(error, OSError)
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


def _run(words: list[str]) -> int:
    command = words[0] if words else None
    if command == "doctor" and any(word.partition("=")[0] == _CHECKS_DETERMINISM for word in words):
        checked: int = import_module("trainstack.cli.determinism").run(words[1:])
        return checked
    if command == "doctor":
        script = import_module("trainstack.cli.check_script")
        if script.script_in(words[1:]) is not None:
            diagnosed: int = script.run(words[1:])
            return diagnosed
    if command in READ_WORDS:
        code: int = module_of(command).run(command, words[1:])
        return code
    if command == "help":  # as git and uv have it; an option stays as it is, such as `help --version`
        return _run([*words[1:], *([] if words[1:2] and words[1].startswith("-") else ["--help"])])
    if command is not None and not command.startswith("-") and command not in COMMANDS:
        close = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(COMMANDS)}."
        raise UsageError(f"there is no command {command!r}. {hint} (see trainstack --help)")
    parser = _parser(command)
    if command is not None and command.startswith("-") and command not in parser._option_string_actions:
        parser._refuse([command])
    args = parser.parse_args(words)
    found: int = args.run(args)
    return found


def _parser(command: str | None) -> Parser:
    """The parser of `trainstack`, with the options of `command` alone."""
    from trainstack import __version__

    parser = Parser(prog="trainstack", description="Train PyTorch models, and inspect the files of trainings.")
    parser.add_argument("--version", action="version", version=f"trainstack {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, about in COMMANDS.items():
        if name == command and name not in READ_WORDS:
            module_of(name).add(subparsers)
        else:
            subparsers.add_parser(name, help=about, add_help=False)
    return parser


def module_of(command: str) -> ModuleType:
    """The module with the code of a command."""
    return import_module(f"trainstack.cli.{_MODULES.get(command, command)}")


def _prepare_output(trains: bool) -> None:
    """Let no character and no closed stream end a command with an error of Python's.

    Raises:
        OSError: standard output is closed, and the command is there to print; a training continues without it.
    """
    if sys.stdout is None:
        if not trains:
            raise OSError("standard output is closed, and the answer goes there. Redirect it to a file or /dev/null")
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _flush(trains: bool) -> None:
    """Flush the output, so that an error of it is found here; it does not end a training."""
    try:
        sys.stdout.flush()
    except OSError:
        if not trains:
            raise
        _discard_output()


def _discard_output() -> None:
    """Discard the buffered output: otherwise Python reports it at its end, with exit code 120."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except (OSError, ValueError, AttributeError):
            sys.stdout = None


class Parser(argparse.ArgumentParser):
    """Answers a wrong command line with one line; those of the commands are of this class as well.

    Attributes:
        other_names: names of options in other libraries, and what to write instead of each.
    """

    other_names: Mapping[str, str] = {}

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})
        printing.add_output_options(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown options here, where the options of the command are known, not in the parser of `trainstack`.

        An unknown option comes before a missing one: it may be that one, misspelt.
        """
        words = [self._spelt(word) for word in (sys.argv[1:] if args is None else args)]
        items: list[Any] = [*self._actions, *self._mutually_exclusive_groups]
        required = [item for item in items if item.required]
        subparsers = any(isinstance(action, argparse._SubParsersAction) for action in self._actions)
        if not subparsers:
            for item in required:
                item.required = False
            try:
                others = super().parse_known_args(words, copy.copy(namespace))[1]
                if any(word.startswith("-") for word in others):
                    self._refuse(others)
            finally:
                for item in required:
                    item.required = True
        known, others = super().parse_known_args(words, namespace)
        self._refuse(others)
        return known, others

    def _spelt(self, word: str) -> str:
        """`word` as the option is spelt here, which may be with hyphens or underscores."""
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return word
        spellings = (f"--{name[2:].replace('-', '_')}", f"--{name[2:].replace('_', '-')}")
        found = [spelt for spelt in spellings if spelt in self._option_string_actions]
        return f"{found[0]}{equals}{value}" if found else word

    def _refuse(self, others: Sequence[str]) -> None:
        if others:
            close = printing.suggest_options(others, self, self.other_names)
            self.error(f"unrecognized arguments: {' '.join(others)}{close}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Suggest the nearest name; a private method of argparse in Python 3.10 to 3.13."""
        if action.choices is not None and value not in action.choices:
            names = [str(one) for one in action.choices]
            close = difflib.get_close_matches(str(value), names, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(names)}."
            option = action.option_strings[-1] if action.option_strings else None
            noun = str(action.metavar or action.dest).lower()
            self.error(f"{option} {value}: {hint}" if option else f"there is no {noun} {value!r}. {hint}")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Let an error of the output be seen, which argparse hides."""
        (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        found = _INVALID.fullmatch(message)
        if found is not None:
            message = f"{found['name'].split('/')[-1]} {found['value']}: write {_NUMBERS[found['type']]}."
        raise UsageError(f"{message} (see {self.prog} --help)")


_INVALID = re.compile(r"argument (?P<name>\S+): invalid (?P<type>int|float) value: '(?P<value>.*)'")
"""The message of argparse; a translated one is printed as it is."""
_NUMBERS = {"int": "a whole number", "float": "a number"}


class UsageError(TrainstackError):
    """The words of the command line are wrong."""
