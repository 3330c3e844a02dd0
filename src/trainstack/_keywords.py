"""Suggestions for unknown keywords, and the selection of keywords that a function takes."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from trainstack.errors import ConfigurationError


class SuggestsNames(type):
    """A metaclass of dataclasses that refuses unknown keywords with a suggestion of the right field.

    A class variable `ALIASES` may map names of other libraries to the text to write instead.
    """

    if not TYPE_CHECKING:  # type checkers and editors use the signature of `__init__`

        def __call__(cls, *args: Any, **values: Any) -> Any:
            check_known_fields(cls, values, cls.__name__)
            return super().__call__(*args, **values)

        @property
        def __signature__(cls) -> inspect.Signature:
            signature = inspect.signature(cls.__init__)
            return signature.replace(parameters=list(signature.parameters.values())[1:])


def check_known_fields(cls: Any, names: Iterable[Any], where: str) -> None:
    """Refuse `names` that are not fields of the dataclass `cls`.

    Raises:
        ConfigurationError: with `where` they were given, and a suggestion.
    """
    known = [field.name for field in fields(cls)]
    elsewhere: Mapping[str, str] = getattr(cls, "ALIASES", {})
    for name in names:
        if name not in known:
            close = [elsewhere[name]] if name in elsewhere else difflib.get_close_matches(str(name), known, n=1)
            hint = f"Write {close[0]}." if close else f"The arguments are {', '.join(sorted(known))}."
            raise ConfigurationError(f"{where} has no argument {name!r}. {hint}")


def keywords_taken(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The items of `values` that `function` takes by name."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in values.items() if takes_all or name in parameters}
