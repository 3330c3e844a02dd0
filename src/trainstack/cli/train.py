"""`trainstack train FILE.py:MODULE` trains without a script."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from trainstack._yaml import write_yaml
from trainstack.cli.main import Parser
from trainstack.cli.options import Inputs
from trainstack.cli.printing import print_lines
from trainstack.cli.target import FORM, load_target, report_user_errors
from trainstack.errors import ConfigurationError
from trainstack.trainer.plain_arguments import read_config

_ABOUT = (
    "Train a module. Options win over environment variables (TRAINSTACK_EPOCHS, "
    "TRAINSTACK_CHECKPOINTER_ARGS__KEEP_LAST), and those over the file given by --config. Values are data: lists and "
    "mappings are written as YAML, and objects are made in code alone. A bool without a value is true, and "
    "--no-NAME is false."
)


def run(command: str, words: Sequence[str]) -> int:
    """Train; the random numbers of the process are seeded before the module is made. Returns the exit code."""
    target, options = split_target(command, words)
    _train(target, options)
    return 0


def split_target(command: str, words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The module that the words after `command` name, and the other words; None to print the help.

    Raises:
        ConfigurationError: neither the words nor the files of `--config` name one.
    """
    if words and not words[0].startswith("-"):
        return words[0], list(words[1:])
    if {"--help", "-h", "--help-all", "--help_all"} & set(words):
        return None, list(words)
    return _target_of(command, words), list(words)


def _target_of(command: str, words: Sequence[str]) -> str:
    """The target in the last file that `words` or the environment name, such as the `config.yaml` of a run."""
    given = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    given.add_argument("--config", action="append", default=[])
    files = [os.environ["TRAINSTACK_CONFIG"]] if "TRAINSTACK_CONFIG" in os.environ else []
    targets = [read_config(file).get("target") for file in [*files, *given.parse_known_args(words)[0].config]]
    found = next((target for target in reversed(targets) if target is not None), None)
    if found is None:
        raise ConfigurationError(
            f"trainstack {command} needs the module before any option. {FORM} A file given by --config may name it as "
            "well, as its key target."
        )
    return str(found)


def make_parser(command: str) -> Parser:
    """The parser of the command without a target."""
    parser = _make_parser(None)
    Inputs(parser).show_all()
    return parser


def _make_parser(target: str | None) -> Parser:
    parser = Parser(
        prog=f"trainstack train {target or 'FILE.py:MODULE'}", description=_ABOUT, usage="%(prog)s [--OPTION VALUE ...]"
    )
    parser.add_argument("--print_config", action="store_true", help="print the configuration as a file for --config")
    return parser


def _train(target: str | None, options: list[str]) -> None:
    with report_user_errors():
        makes_module = None if target is None else load_target(target)
    inputs = Inputs(_make_parser(target), makes_module)
    given = inputs.read(options)
    assert target is not None  # --help, the one option without a target, has ended the process
    assert makes_module is not None
    arguments, parameters = inputs.arguments(), inputs.parameters(target)
    if given.print_config:
        print_lines(write_yaml(inputs.as_file(target)).rstrip())
        return
    from trainstack.trainer import Trainer, seed_everything

    seed_everything(arguments.seed)
    with report_user_errors():
        trainer = Trainer(makes_module(**parameters), arguments)
        trainer._context.directory.config = {"target": target, "module": inputs.as_file(target)["module"]}
        trainer.train()
