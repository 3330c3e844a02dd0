"""Suggestions for unknown keywords, and the selection of keywords that a function takes."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import FrozenInstanceError, fields
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from trainstack.errors import ConfigurationError

CUTOFF = 0.75
"""Names that are less alike are not suggested: at the default of difflib, 0.6, `save_every` gives `validate_every`."""

_Class = TypeVar("_Class", bound=type)


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


def explain_frozen(cls: _Class) -> _Class:
    """A class decorator above `@dataclass(frozen=True)`: an assignment raises an error that gives the call to write."""

    def refuse(self: Any, name: str, value: Any) -> NoReturn:
        raise FrozenInstanceError(
            f"{type(self).__name__} cannot be changed. Write dataclasses.replace(args, {name}={value!r}), which "
            "returns a changed copy."
        )

    cls.__setattr__ = refuse  # type: ignore[assignment]
    return cls


def check_known_fields(cls: Any, names: Iterable[Any], where: str) -> None:
    """Refuse `names` that are not fields of the dataclass `cls`.

    Raises:
        ConfigurationError: with `where` they were given, and a suggestion for each.
    """
    known = [field.name for field in fields(cls)]
    elsewhere: Mapping[str, str] = getattr(cls, "ALIASES", {})
    sentences, has_list = [], False
    for name in names:
        if name not in known:
            close = [elsewhere[name]] if name in elsewhere else difflib.get_close_matches(str(name), known, 1, CUTOFF)
            sentences.append(f"{where} has no argument {name!r}." + (f" Write {close[0]}." if close else ""))
            has_list = has_list or not close
    if sentences:
        more = [f"The arguments are {', '.join(sorted(known))}."] if has_list else []
        raise ConfigurationError(" ".join([*sentences, *more]))


def keywords_taken(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The items of `values` that `function` takes by name."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in values.items() if takes_all or name in parameters}
