"""YAML as plain values: strings, numbers, bools, None, lists and dicts with strings as keys.

The reader builds each value from the events of PyYAML's parser. For security it does not import modules or resolve
names. It refuses features with which a short text becomes expensive or ambiguous: anchors, merges, tags, deep nesting,
duplicate keys, numbers of many digits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from os import PathLike
from typing import Any

from trainstack._files import read_small
from trainstack.errors import ConfigurationError

Plain = Any
"""None, bool, int, float, str, or a list or dict of these; keys of dicts are strings."""

MAX_BYTES = 256 * 1024
"""The largest file. PyYAML takes about 2 s to parse it."""

# far above the arguments of a run; they bound the time and memory that a hostile file can take
MAX_DEPTH = 16
MAX_VALUES = 20_000
MAX_TEXT = 16 * 1024

_NULL = re.compile(r"(~|null|Null|NULL)?")
_BOOL = re.compile(r"(true|yes|on|True|Yes|On|TRUE|YES|ON)|(false|no|off|False|No|Off|FALSE|NO|OFF)")
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*|0x[0-9a-fA-F]+)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*(_[0-9]+)*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def read_yaml(path: str | PathLike[str], read: Callable[[str, int], bytes] = read_small) -> dict[str, Plain]:
    """The mapping in the YAML file `path`; {} for an empty file.

    Args:
        path: the file.
        read: takes the path and a number of bytes, and returns the content. It raises OSError if the file is larger.

    Raises:
        ConfigurationError: the file does not exist, is not UTF-8 text, or is not a mapping that `parse_yaml` accepts.
    """
    name = os.fspath(path)
    values = parse_yaml(_text_of(name, read), name)
    if values is not None and not isinstance(values, dict):
        raise ConfigurationError(f"{name!r} contains a {type(values).__name__}; write a mapping, e.g. 'epochs: 3'.")
    return values or {}


def _text_of(path: str, read: Callable[[str, int], bytes]) -> str:
    try:
        content = read(path, MAX_BYTES)
    except FileNotFoundError as error:
        raise ConfigurationError(f"there is no file {path!r} to read arguments from.") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"{path!r} cannot be read: {reason}. Write the arguments to a file of at most {MAX_BYTES:,} bytes."
        ) from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path!r} is not text in UTF-8 (byte {error.start}). Save it in UTF-8.") from error


def parse_yaml(text: str, where: str) -> Plain:
    """The plain value of a YAML text.

    As in YAML 1.1, `yes`, `no`, `on` and `off` are bools. Unlike in YAML 1.1, `1:00:00`, `010` and dates are strings,
    and `1e-3` is a number.

    Args:
        text: the YAML text.
        where: the beginning of error messages, for example the name of the file.

    Raises:
        ConfigurationError: the text is not valid YAML, or uses a refused feature. The message has the line and the
            keys of the value.
    """
    import yaml

    if len(text) > MAX_BYTES:
        raise ConfigurationError(f"{where}: {len(text)} characters are too long for a value; write fewer.")
    try:
        return _Reader(where, yaml).document(yaml.parse(text, yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ConfigurationError(f"{where}{line}: this is not valid YAML: {error.problem or error.context}.") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{where}: this is not valid YAML: {' '.join(str(error).split())}") from error


_PLAIN_TEXT = re.compile(r"[A-Za-z_./][\w./-]*", re.ASCII)


def write_yaml(value: Plain) -> str:
    """The YAML text from which `parse_yaml` reads `value`; repeated lists and dicts are written without anchors."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def represent(dumper: Any, text: str) -> Any:
        try:
            is_plain = _PLAIN_TEXT.fullmatch(text) and parse_yaml(text, "") == text
        except ConfigurationError:  # the end of a document, "..."
            is_plain = False
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_plain else '"')

    Dumper.add_representer(str, represent)
    text: str = yaml.dump(value, Dumper=Dumper, sort_keys=False)
    return text


class _Reader:
    """Builds values from the events of the parser.

    Args:
        yaml: PyYAML, which `import trainstack` does not load.
    """

    def __init__(self, where: str, yaml: Any) -> None:
        self._where, self._yaml = where, yaml
        self._count = 0

    def document(self, events: Iterator[Any]) -> Plain:
        """The value of the only document."""
        yaml, found, documents = self._yaml, None, 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self._wrong(event, (), "a second document begins here. Write one, without '---'")
            elif isinstance(event, yaml.NodeEvent):
                found = self._value(event, events, ())
        return found

    def _value(self, event: Any, events: Iterator[Any], path: tuple[str, ...]) -> Plain:
        yaml = self._yaml
        self._count += 1
        if self._count > MAX_VALUES:
            raise self._wrong(event, path, f"there are more than {MAX_VALUES} values")
        if event.anchor is not None:
            raise self._wrong(event, path, f"the anchor or alias {event.anchor!r} is refused. Write the value out")
        if event.tag is not None:
            raise self._wrong(event, path, f"the tag {event.tag!r} is refused. Write the plain value")
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event, path)
        if len(path) >= MAX_DEPTH:
            raise self._wrong(event, path, f"it is nested more than {MAX_DEPTH} deep")
        if isinstance(event, yaml.SequenceStartEvent):
            return self._list(events, path)
        return self._dict(events, path)

    def _list(self, events: Iterator[Any], path: tuple[str, ...]) -> list[Plain]:
        made: list[Plain] = []
        for event in events:
            if isinstance(event, self._yaml.SequenceEndEvent):
                break
            made.append(self._value(event, events, (*path, f"[{len(made)}]")))
        return made

    def _dict(self, events: Iterator[Any], path: tuple[str, ...]) -> dict[str, Plain]:
        made: dict[str, Plain] = {}
        for event in events:
            if isinstance(event, self._yaml.MappingEndEvent):
                break
            if not isinstance(event, self._yaml.ScalarEvent) or event.anchor is not None or event.tag is not None:
                raise self._wrong(event, path, "a key is not plain text. Write a name as the key")
            key = self._text(event, event.value, path)
            if key == "<<" and event.implicit[0]:
                raise self._wrong(event, path, "the merge '<<' is refused. Write the values out")
            if key in made:
                raise self._wrong(event, path, f"the key {key!r} comes twice. Write it once")
            made[key] = self._value(next(events), events, (*path, key))
        return made

    def _scalar(self, event: Any, path: tuple[str, ...]) -> Plain:
        text = self._text(event, event.value, path)
        if not event.implicit[0]:  # in quotes, or a block of text
            return text
        if _NULL.fullmatch(text):
            return None
        if found := _BOOL.fullmatch(text):
            return found.group(1) is not None
        if _INT.fullmatch(text):
            value = int(text, 16 if "x" in text else 10) if len(text) <= 40 else 1 << 64
            if not -(1 << 63) <= value < 1 << 63:
                raise self._wrong(event, path, f"{_short(text)} is beyond 64 bits. Write a smaller number")
            return value
        if _FLOAT.fullmatch(text):
            number = float(text)
            if abs(number) == float("inf"):
                raise self._wrong(event, path, f"{_short(text)} is too large for a float. Write .inf if you mean that")
            return number
        if _SPECIAL.fullmatch(text):
            return float(text.replace(".", ""))
        return text

    def _text(self, event: Any, text: str, path: tuple[str, ...]) -> str:
        if len(text) > MAX_TEXT:
            raise self._wrong(event, path, f"a text of {len(text)} characters is too long; write at most {MAX_TEXT}")
        if any(char == "\0" or "\ud800" <= char <= "\udfff" for char in text):
            raise self._wrong(
                event, path, f"the text {_short(repr(text))} has a character that no path or name may have"
            )
        return text

    def _wrong(self, event: Any, path: tuple[str, ...], why: str) -> ConfigurationError:
        keys = "".join(key if key.startswith("[") else f".{_short(key)}" for key in path).lstrip(".")
        line = event.start_mark.line + 1
        return ConfigurationError(f"{self._where}, line {line}: {f'{keys}: ' if keys else ''}{why}.")


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
