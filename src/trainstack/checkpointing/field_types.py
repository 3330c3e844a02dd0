"""Validation of parsed JSON against the fields of a dataclass."""

from __future__ import annotations

import functools
import types
from dataclasses import MISSING, fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Made = TypeVar("Made")


def build(cls: type[Made], body: Any, **given: Any) -> Made:
    """Return the dataclass `cls` made from the JSON object `body`, whose other keys are ignored.

    Integers are at least 0 and below 2^63: sizes, counters and sequence numbers.

    Args:
        cls: a dataclass; its fields have the types str, int, bool, float (finite), Any, literals, optional ones, and
            lists and dicts of those.
        body: the result of a JSON parser.
        given: values of fields that are not read from `body`.

    Raises:
        ValueError: a field is absent or has another type. The message names the first one.
    """
    if type(body) is not dict:
        raise ValueError(f"it is a {type(body).__name__}, not an object")
    values = dict(given)
    for name, (hint, required) in _fields(cls).items():  # type: ignore[arg-type]  # mypy: a class is not hashable
        if name in given or (name not in body and not required):
            continue
        if name not in body:
            raise ValueError(f"the field {name!r} is absent")
        if not fits_type(body[name], hint):
            raise ValueError(f"the field {name!r} is wrong: {short(body[name])}")
        values[name] = body[name]
    return cls(**values)


@functools.cache
def _fields(cls: type) -> dict[str, tuple[Any, bool]]:
    """The type of each field, and whether it has no default."""
    hints = get_type_hints(cls)
    return {
        field.name: (hints[field.name], field.default is MISSING and field.default_factory is MISSING)
        for field in fields(cls)
    }


def fits_type(value: Any, hint: Any) -> bool:
    """Return whether `value`, a result of a JSON parser, has the type `hint`."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if hint is int:
        return type(value) is int and 0 <= value < 2**63
    if hint is float:
        return type(value) in (int, float) and -(2**63) < value < 2**63  # neither inf nor nan
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in inner)
    if origin in (Union, types.UnionType):
        return any(fits_type(value, option) for option in inner)
    if origin is dict:
        return type(value) is dict and all(
            fits_type(key, inner[0]) and fits_type(item, inner[1]) for key, item in value.items()
        )
    if origin is list:
        return type(value) is list and all(fits_type(item, inner[0]) for item in value)
    return type(value) is hint


def short(value: Any) -> str:
    """`value` as a short text for a message."""
    if isinstance(value, (dict, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if type(value) is int and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"  # its digits cost quadratic time, or are refused
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
