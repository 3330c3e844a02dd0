"""Keywords: suggestions for unknown ones, and those that a function takes."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from trainstack.errors import ConfigurationError


class SuggestsNames(type):
    """Of a dataclass: a keyword that is no field is refused, with the field that was meant.

    A class variable `ALIASES` may say what other libraries call its fields, and what to write for those.
    """

    if not TYPE_CHECKING:  # type checkers and editors look at `__init__`

        def __call__(cls, *args: Any, **values: Any) -> Any:
            check_known_fields(cls, values, cls.__name__)
            return super().__call__(*args, **values)

        @property
        def __signature__(cls) -> inspect.Signature:
            signature = inspect.signature(cls.__init__)
            return signature.replace(parameters=list(signature.parameters.values())[1:])


def check_known_fields(cls: Any, names: Iterable[Any], where: str) -> None:
    """Refuse `names` that are no fields of the dataclass `cls`.

    Raises:
        ConfigurationError: naming `where` they were given, and what to write.
    """
    known = [field.name for field in fields(cls)]
    elsewhere: Mapping[str, str] = getattr(cls, "ALIASES", {})
    for name in names:
        if name not in known:
            close = [elsewhere[name]] if name in elsewhere else difflib.get_close_matches(str(name), known, n=1)
            hint = f"Write {close[0]}." if close else f"There are {', '.join(sorted(known))}."
            raise ConfigurationError(f"{where} has no argument {name!r}. {hint}")


def keywords_taken(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `values` that `function` takes by name."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in values.items() if takes_all or name in parameters}
