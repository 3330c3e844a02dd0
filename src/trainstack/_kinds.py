"""The plain values that an annotation accepts, and their conversion from text of the command line.

A kind makes text, numbers, bools, lists and dicts, and dataclasses that the annotation names. Only the annotation
determines the type of the result. An annotation of objects, such as `nn.Module` or `Callable`, accepts no plain value.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from trainstack._yaml import Plain, parse_yaml
from trainstack.errors import ConfigurationError

_SPECIAL = re.compile(r"[-+]?(inf|infinity|nan)", re.IGNORECASE | re.ASCII)
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_ALIASES: dict[Any, type] = {Sequence: list, Mapping: dict, Set: set}


@dataclass(frozen=True, slots=True)
class Place:
    """The origin of a value, for errors about it.

    Attributes:
        name: `"--epochs"`, `"TRAINSTACK_EPOCHS"` or `"run.yaml: epochs"`.
        mark: the text between the name and the value.
    """

    name: str
    mark: str = ": "

    def wrong(self, value: Plain, instead: str) -> ConfigurationError:
        """The error with the given value and the correction."""
        return ConfigurationError(f"{self.name}{self.mark}{shorten(value)}: {instead}.")

    def inner(self, key: str | int) -> Place:
        """The place of an item of the value."""
        return Place(f"{self.name}[{key}]" if isinstance(key, int) else f"{self.name}.{shorten(key)}", self.mark)


def shorten(value: Plain, most: int = 80) -> str:
    """`value` as text in about its original form, truncated if it is long."""
    text = value if isinstance(value, str) else json.dumps(value, default=repr, ensure_ascii=False)
    return text if len(text) <= most else f"{text[: most - 3]}..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The plain values that an annotation accepts. Make one with `Kind.of`.

    Attributes:
        types: some of None, bool, int, float, str, Path.
        choices: the values of a `Literal`.
        items: the kind of the items of a list, and the class of the result: list, tuple, set or frozenset.
        values: the kind of the values of a dict.
        fields: a dataclass, whose fields a dict gives.
        anything: no annotation, or `Any`: each plain value, unchanged.
    """

    types: frozenset[Any] = frozenset()
    choices: tuple[Any, ...] = ()
    items: tuple[Kind, type] | None = None
    values: Kind | None = None
    fields: type | None = None
    anything: bool = False

    @classmethod
    def of(cls, annotation: Any) -> Kind:
        """The kind of an annotation from `get_type_hints`. An annotation of objects only accepts no value."""
        if annotation in (Any, object):
            return cls(anything=True)
        origin, inner = get_origin(annotation) or annotation, get_args(annotation)
        if origin in (Union, types.UnionType):
            return _joined([cls.of(one) for one in inner])
        if origin is Literal:
            return cls(choices=inner)
        if annotation in (None, type(None)):
            return cls(types=frozenset([None]))
        if origin in (bool, int, float, str):
            return cls(types=frozenset([origin]))
        if isinstance(origin, type) and (origin is PathLike or issubclass(Path, origin)):
            return cls(types=frozenset([Path]))
        origin = _ALIASES.get(origin, origin)
        if origin in (list, set, frozenset, tuple):
            of = [one for one in inner if one is not Ellipsis]
            return cls(items=(_joined([cls.of(one) for one in of]) if of else cls(anything=True), origin))
        if origin is dict:
            return cls(values=cls.of(inner[1]) if inner else cls(anything=True))
        if dataclasses.is_dataclass(origin) and isinstance(origin, type):
            return cls(fields=origin)
        return cls()

    @property
    def takes_nothing(self) -> bool:
        """Whether it accepts no plain value except None."""
        only_none = self.types <= {None} and set(self.choices) <= {None}
        return only_none and not (self.items or self.values or self.fields or self.anything)

    def text(self, text: str, place: Place) -> Any:
        """The value of `text`, which is from the command line or the environment.

        Raises:
            ConfigurationError: it is not a value of this kind.
        """
        if self._has_text_alone:
            return None if text == "null" and None in self.types else self.value(text, place)
        try:
            return self.value(
                _switch(parse_yaml(text, place.name)) if self._is_switch else parse_yaml(text, place.name), place
            )
        except ConfigurationError:
            if {str, Path} & self.types:
                return self.value(text, place)
            if self.values or self.items or self.fields:
                raise
        raise self._wrong(text, place)

    @property
    def _has_text_alone(self) -> bool:
        return (
            self.types <= {str, Path, None}
            and not (self.items or self.values or self.fields or self.anything)
            and all(isinstance(choice, str | None) for choice in self.choices)
        )

    @property
    def _is_switch(self) -> bool:
        return bool in self.types and int not in self.types

    def value(self, value: Plain, place: Place) -> Any:
        """The plain `value` converted to this kind: a list may become a tuple, an integral float an int.

        Raises:
            ConfigurationError: it is of another kind.
        """
        if self.anything:
            return value
        if isinstance(value, list):
            return self._list(value, place)
        if isinstance(value, dict):
            return self._dict(value, place)
        if any(type(choice) is type(value) and choice == value for choice in self.choices):
            return value
        if value is None or isinstance(value, bool):
            if (None if value is None else bool) in self.types:
                return value
        elif isinstance(value, str):
            return self._from_text(value, place)
        elif (number := self._number(value)) is not None:
            return number
        raise self._wrong(value, place)

    def _number(self, value: int | float) -> int | float | None:
        if float not in self.types:
            whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            return int(value) if int in self.types and whole else None
        if int not in self.types:
            return float(value)
        beyond_one = isinstance(value, float) and value.is_integer() and abs(value) > 1  # 1.0 is a fraction, 1e3 is not
        return int(value) if beyond_one else value

    def _from_text(self, value: str, place: Place) -> Any:
        if str in self.types:
            return value
        if Path in self.types:
            return Path(value)
        if float in self.types and (_SPECIAL.fullmatch(value) or _NUMBER.fullmatch(value)):
            return float(value)
        if self.items is not None:
            return self._list([value], place)
        raise self._wrong(value, place)

    def _list(self, value: list[Plain], place: Place) -> Any:
        if self.items is None:
            raise self._wrong(value, place)
        kind, made = self.items
        return made(kind.value(item, place.inner(index)) for index, item in enumerate(value))

    def _dict(self, value: dict[str, Plain], place: Place) -> Any:
        if self.fields is not None:
            return value  # its fields are checked by name later
        if self.values is None:
            raise self._wrong(value, place)
        return {key: self.values.value(item, place.inner(key)) for key, item in value.items()}

    def _wrong(self, value: Plain, place: Place) -> ConfigurationError:
        if self.takes_nothing:
            return place.wrong(value, "this takes an object, which only code can make; set it in code")
        return place.wrong(value, f"write {self.words}")

    @property
    def words(self) -> str:
        """The values that this kind accepts, as text."""
        named = {float: "a number", int: "a whole number", str: "text", Path: "a path"}
        kinds = self.types - {int} if float in self.types else self.types
        kinds = kinds - {Path} if str in kinds else kinds
        found = ["true", "false"] if bool in kinds else []
        found += [said for kind, said in named.items() if kind in kinds]
        found += [choice if isinstance(choice, str) else json.dumps(choice) for choice in self.choices]
        found += ["a list"] if self.items else []
        found += ["a mapping"] if self.values or self.fields else []
        found += ["null"] if None in self.types else []
        return f"{', '.join(found[:-1])} or {found[-1]}" if len(found) > 1 else "".join(found)


def _joined(kinds: Sequence[Kind]) -> Kind:
    """A kind that accepts the values of each of `kinds`."""
    return Kind(
        types=frozenset().union(*(kind.types for kind in kinds)),
        choices=tuple(dict.fromkeys(choice for kind in kinds for choice in kind.choices)),
        items=next((kind.items for kind in kinds if kind.items), None),
        values=next((kind.values for kind in kinds if kind.values), None),
        fields=next((kind.fields for kind in kinds if kind.fields), None),
        anything=any(kind.anything for kind in kinds),
    )


def _switch(value: Plain) -> Plain:
    """Convert 0 and 1 in a text to bools, for kinds with bool and without int."""
    return bool(value) if type(value) is int and value in (0, 1) else value
