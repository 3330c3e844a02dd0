"""Arguments for the parsers of other packages: a JSON schema, pydantic, and a dataclass of plain fields."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

from trainstack._kinds import Kind, Place
from trainstack._yaml import write_yaml
from trainstack.trainer.plain_arguments import CODE_ONLY, PlainInputs, kinds_of

_TYPES = {None: "null", bool: "boolean", int: "integer", float: "number", str: "string", Path: "string"}
Schema = dict[str, Any]


@functools.lru_cache(maxsize=32)  # more than there are dataclasses of arguments
def explained(documented: Any) -> dict[str, str]:
    """Return the text of the docstring for each argument, from its section `Args:` or `Attributes:`."""
    found: dict[str, str] = {}
    names: list[str] = []
    section = re.search(r"^(?:Args|Attributes):\n((?: .*\n|\n)*)", (inspect.getdoc(documented) or "") + "\n", re.M)
    for line in section.group(1).splitlines() if section else ():
        entry = re.match(r"    (\w+(?:, \w+)*)(?: \([^)]*\))?: (.*)", line)
        if entry:
            names = entry.group(1).split(", ")
            found |= dict.fromkeys(names, entry.group(2))
        else:
            found |= {name: f"{found[name]} {line.strip()}".rstrip() for name in names}
    return found


def json_schema(cls: type) -> Schema:
    """Return the JSON schema of the plain values from which the dataclass `cls` is made."""
    return {"title": cls.__name__, **_of_fields(cls)}


def _of_fields(cls: type) -> Schema:
    about, properties, required = explained(cls), {}, []
    for field in dataclasses.fields(cls):
        if field.name in CODE_ONLY:
            continue
        schema = _of_kind(kinds_of(cls)[field.name])
        if field.name in about:
            schema["description"] = about[field.name]
        if field.default is not dataclasses.MISSING:
            schema["default"] = list(field.default) if isinstance(field.default, tuple) else field.default
        elif field.default_factory is dataclasses.MISSING:
            required.append(field.name)
        properties[field.name] = schema
    made: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return made | ({"required": required} if required else {})


def _of_kind(kind: Kind) -> Schema:
    if kind.anything:
        return {}
    options: list[Schema] = [{"type": name} for of, name in _TYPES.items() if of in kind.types]
    options = [one for number, one in enumerate(options) if one not in options[:number]]
    options += [{"enum": list(kind.choices)}] if kind.choices else []
    if kind.items is not None:
        options.append({"type": "array", "items": _of_kind(kind.items[0])})
    if kind.values is not None:
        options.append({"type": "object", "additionalProperties": _of_kind(kind.values)})
    if kind.fields is not None:
        options.append(_of_fields(kind.fields))
    if not options:
        return {"not": {}}
    return options[0] if len(options) == 1 else {"anyOf": options}


def pydantic_schema(cls: Any) -> Any:
    """Return the core schema of pydantic for `cls`, which makes objects with `from_dict`."""
    from pydantic_core import core_schema

    def validate(value: Any) -> Any:
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"write {cls.__name__}(...) or a mapping of its arguments")
        return cls.from_dict(value)

    dump = core_schema.plain_serializer_function_ser_schema(lambda value: value.to_dict())
    return core_schema.no_info_plain_validator_function(validate, serialization=dump)


def parser_fields(cls: Any) -> list[tuple[str, Any, Any]]:
    """Return the fields of a dataclass with plain types for `cls`; see `ParserArguments`."""
    inputs, fields = PlainInputs(cls), list[tuple[str, Any, Any]]()
    for path, kind in inputs.paths().items():
        if path[-1] in CODE_ONLY or kind.takes_nothing or (len(path) == 1 and kind.fields is not None):
            continue
        owner: Any = cls if len(path) == 1 else kinds_of(cls)[path[0]].fields
        field = next(one for one in dataclasses.fields(owner) if one.name == path[-1])
        annotation, default = _plain_type(kind, field.default if len(path) == 1 else None)
        about = explained(owner).get(path[-1], "").replace("%", "%%")
        fields.append(("__".join(path), annotation, dataclasses.field(default=default, metadata={"help": about})))
    return fields


def _plain_type(kind: Kind, default: Any) -> tuple[Any, Any]:
    plain = kind.types - {None}
    if len(plain) == 1 and not (kind.choices or kind.items or kind.values or kind.fields or kind.anything):
        (of,) = plain
        if of in (bool, int, float) and isinstance(default, of):
            return of, default
    return Optional[str], None  # noqa: UP045 - parsers check for this form


def from_parser(cls: Any, parsed: Any) -> Any:
    """Make an object of `cls` from an object with the fields of `parser_fields`.

    Raises:
        ConfigurationError: a value has another type than its field, or is out of range.
    """
    inputs = PlainInputs(cls)
    known = inputs.paths()
    for field in dataclasses.fields(parsed):
        value, path = getattr(parsed, field.name), tuple(field.name.split("__"))
        if path not in known or value == field.default:
            continue
        text = value if isinstance(value, str) else write_yaml(value).removesuffix("...\n").strip()
        inputs.add_text(path, text, Place(field.name, "="))
    return inputs.arguments()
