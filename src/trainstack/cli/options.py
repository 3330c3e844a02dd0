"""Options of `trainstack train`, generated from `TrainerArguments` and the module's signature."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from trainstack.errors import ConfigurationError, MissingExtraError
from trainstack.trainer import ModuleInterface, TrainerArguments

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

PREFIX = "TRAINSTACK"
"""Of the environment variables: TRAINSTACK_EPOCHS, TRAINSTACK_CHECKPOINTER_ARGS__KEEP_LAST."""


def build_parser(makes_module: Callable[..., ModuleInterface] | None, files: Sequence[str] = ()) -> ArgumentParser:
    """A parser with all fields of `TrainerArguments`, and the module's parameters as `--module.NAME`.

    Args:
        makes_module: the class or function; None if nobody knows it yet.
        files: of YAML, whose values take the place of the defaults; of two, the later wins.

    Raises:
        MissingExtraError: jsonargparse is not installed.
    """
    if importlib.util.find_spec("jsonargparse") is None:
        raise MissingExtraError("the command 'train'", "jsonargparse", "cli")
    import jsonargparse

    parser = jsonargparse.ArgumentParser(
        prog="trainstack train FILE.py:MODULE",
        description="Train a module. Options win over environment variables, those over the file given by --config.",
        exit_on_error=False,
        allow_abbrev=False,
        default_env=True,
        env_prefix=PREFIX,
        default_config_files=list(files),
    )
    parser.add_argument("--config", action="config", help="a YAML file of options")
    _add_fields(parser, TrainerArguments(), "")
    if isinstance(makes_module, type):
        parser.add_class_arguments(makes_module, "module", fail_untyped=False)
    elif makes_module is not None:
        parser.add_function_arguments(makes_module, "module", fail_untyped=False)
    return parser


def split_files(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files named by `--config` among `words`, and the other words: so an option before a file wins over it too.

    Raises:
        ConfigurationError: a file is not there.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--config", action="append", default=[])
    found, others = finder.parse_known_args(words)
    for file in found.config:
        if not Path(file).is_file():
            raise ConfigurationError(f"--config {file}: there is no such file.")
    return found.config, others


def arguments_of(values: Mapping[str, Any]) -> TrainerArguments:
    """The arguments among what was parsed."""
    names = [field.name for field in dataclasses.fields(TrainerArguments)]
    return TrainerArguments.from_dict({name: values[name] for name in names})


def _add_fields(parser: ArgumentParser, defaults: Any, prefix: str) -> None:
    """Add the fields of the dataclass `defaults`; those of a nested one as `--outer.inner`."""
    from docstring_parser import parse

    hints = get_type_hints(type(defaults))
    about = {param.arg_name: param.description for param in parse(type(defaults).__doc__ or "").params}
    for field in dataclasses.fields(defaults):
        value = getattr(defaults, field.name)
        if dataclasses.is_dataclass(value):
            _add_fields(parser, value, f"{prefix}{field.name}.")
            continue
        parser.add_argument(
            f"--{prefix}{field.name}",
            type=hints[field.name],
            default=list(value) if isinstance(value, tuple) else value,
            help=" ".join((about.get(field.name) or "").split()).replace("%", "%%"),
        )
