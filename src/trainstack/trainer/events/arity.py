"""Does a function take what an event gives? Asked when it subscribes, so that no call has to look."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from trainstack.errors import ConfigurationError


def fitted(function: Callable[..., Any], given: Sequence[str], where: str) -> Callable[..., Any]:
    """`function`, to be called with all that is `given`, of which it gets as many as it takes, from the left.

    A parameter with a default is only filled if it is called like what is given in its place.

    Raises:
        ConfigurationError: it needs more than is given.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return function
    parameters = list(signature.parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        count = len(given)
    else:
        by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        wanted = [p.default is p.empty or p.name == name for p, name in zip(by_position, given, strict=False)]
        count = [*wanted, False].index(False)
    try:
        signature.bind(*range(count))
    except TypeError as error:
        raise ConfigurationError(
            f"{name_of(function)}{signature} cannot take what {where} gives ({error}). Write "
            f"def {name_of(function).rpartition('.')[2]}({', '.join(given)}), or fewer of them from the right."
        ) from error
    return function if count == len(given) else lambda *arguments: function(*arguments[:count])


def name_of(function: Callable[..., Any]) -> str:
    """How to call `function` in messages."""
    name: str = getattr(function, "__qualname__", None) or type(function).__name__
    return name.rpartition("<locals>.")[2]
