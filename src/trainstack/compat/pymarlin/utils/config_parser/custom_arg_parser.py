"""`CustomArgParser` reads a YAML file and overrides its values from the command line."""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainstack._yaml import read_yaml
from trainstack.compat.pymarlin.utils.logger.logging_utils import getlogger
from trainstack.errors import ConfigurationError

_WORDS = {**dict.fromkeys(("yes", "true", "t", "y", "1"), True), **dict.fromkeys(("no", "false", "f", "n", "0"), False)}


class CustomArgParser:
    """Reads the file that `--config_path` names, and options that override its values.

    A value is overridden by its place in the file: `--tr.epochs 4` for `epochs` below `tr`. It is read as the type that
    the file has; where the file has null, as text. A list is written as `1-2-3` or as `[1, 2, 3]`. `--params` takes a
    JSON object with the same names: `--params '{"--tr.epochs": 4}'`. An option that the file does not have is named in
    the log and left out.

    Args:
        yaml_file_arg_key: the name of the option with the path.
        default_yamlfile: the path without that option; of a folder, its only YAML file is read.
        log_level: of the messages.
    """

    def __init__(
        self,
        yaml_file_arg_key: str = "config_path",
        default_yamlfile: str = "config.yaml",
        log_level: int | str = "INFO",
    ) -> None:
        self._key, self.logger = yaml_file_arg_key, getlogger("CustomArgParser", log_level)
        self.parser = argparse.ArgumentParser(allow_abbrev=False)
        self.parser.add_argument(f"--{yaml_file_arg_key}", default=default_yamlfile, help="path of the YAML file")
        self.parser.add_argument("--params", default="{}", help="JSON object of values that override those of the file")

    def parse(self) -> dict[str, Any]:
        """The values of the file with those of the command line, nested as in the file.

        Raises:
            ConfigurationError: the file or `--params` cannot be read, or a value is not of the type that the file has.
        """
        known, rest = self.parser.parse_known_args()
        path = getattr(known, self._key)
        config = read_yaml(_file_in(path))
        for name, text in _options(rest):
            self._override(config, name, text)
        for name, value in _params(known.params).items():
            self._override(config, name.lstrip("-"), value)
        return {**config, self._key: path}

    def _override(self, config: dict[str, Any], name: str, value: Any) -> None:
        names = list(_names(config))
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f" Did you mean --{close[0]}?" if close else ""
            self.logger.warning(f"--{name} is not in the configuration file, and is left out.{hint}")
            return
        *folders, last = name.split(".")
        for folder in folders:
            config = config[folder]
        config[last] = _read(name, value, config[last])


def _file_in(path: str) -> str:
    if not os.path.isdir(path):
        return path
    found = sorted(name for name in os.listdir(path) if name.endswith((".yaml", ".yml")))
    if len(found) != 1:
        raise ConfigurationError(f"{path!r} has {len(found)} YAML files: {found}. Write the path of one.")
    return os.path.join(path, found[0])


def _options(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Names and values of the options that argparse does not know; True for one without a value."""
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("--"):
            continue
        name, sign, value = word[2:].partition("=")
        if not sign and position < len(words) and not words[position].startswith("--"):
            value, sign = words[position], "="
            position += 1
        yield name, value if sign else True


def _params(text: str) -> Mapping[str, Any]:
    try:
        params = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"--params {text!r} is not JSON: {error}. Write '{{\"--tr.epochs\": 4}}'.") from None
    if not isinstance(params, dict):
        raise ConfigurationError(f"--params {text!r} is not a JSON object. Write '{{\"--tr.epochs\": 4}}'.")
    return params


def _names(config: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, value in config.items():
        yield f"{above}{key}"
        if isinstance(value, dict):
            yield from _names(value, f"{above}{key}.")


def _read(name: str, value: Any, before: Any) -> Any:
    """`value` as the type of `before`."""
    if not isinstance(value, str) or before is None or isinstance(before, str):
        return value
    try:
        if isinstance(before, bool):
            return _WORDS[value.lower()]
        if isinstance(before, list):
            return _read_list(value, before)
        return type(before)(value)
    except (KeyError, ValueError, TypeError, SyntaxError):
        raise ConfigurationError(
            f"--{name} {value!r}: the file has {before!r}. Write a {type(before).__name__}."
        ) from None


def _read_list(text: str, before: Sequence[Any]) -> list[Any]:
    parts = ast.literal_eval(text) if text.startswith(("[", "(")) else text.split("-")
    kind = type(before[0]) if before else str
    return [kind(part) for part in parts]


__all__ = ["CustomArgParser"]
