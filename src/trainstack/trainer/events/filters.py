"""Filters that select the occurrences of an event at which a subscriber runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from trainstack.errors import ConfigurationError


def adapt_arity(function: Callable[..., Any], given: Sequence[str], where: str) -> Callable[..., Any]:
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


Function = TypeVar("Function", bound=Callable[..., Any])
_FILTER = "__trainstack_filter__"


class Filter:
    """Counts how often an event came, and says whether its subscriber runs this time.

    Args:
        every: run at the calls n, 2n, 3n, ...
        once: run at the n-th call only; True for the first.
        when: `when(trainer, filter) -> bool`, or `when(trainer)`.

    Attributes:
        num_called: how often the event came, this time included.
        num_executed: how often the subscriber ran.

    Raises:
        ConfigurationError: more than one is given, or one that cannot be.
    """

    num_called: int
    num_executed: int

    def __init__(
        self, *, every: int | None = None, once: int | bool | None = None, when: Callable[..., Any] | None = None
    ) -> None:
        given = [f"{name}={value!r}" for name, value in (("every", every), ("once", once), ("when", when)) if value]
        if len(given) > 1:
            raise ConfigurationError(f"{' and '.join(given)} exclude each other. Give one of them.")
        once = 1 if once is True else once
        for name, number in (("every", every), ("once", once)):
            if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
                raise ConfigurationError(f"{name}={number!r}: write a whole number from 1 on.")
        if when is not None and not callable(when):
            raise ConfigurationError(f"when={when!r}: write a function, when(trainer) -> bool.")
        self.num_called = self.num_executed = 0
        self._every, self._once = every or 1, once
        self._when = None if when is None else adapt_arity(when, ("trainer", "filter"), "when")
        self._ran = False

    def passes(self, trainer: Any) -> bool:
        """Count one occurrence; whether the subscriber runs."""
        self.num_called += 1
        if self._when is not None:
            self._ran = bool(self._when(trainer, self))
        else:
            self._ran = self.num_called == self._once if self._once else self.num_called % self._every == 0
        self.num_executed += self._ran
        return self._ran

    def take_back(self) -> None:
        """Undo the last occurrence, which is about to come once more."""
        self.num_called -= 1
        self.num_executed -= self._ran

    def never_ran_reason(self) -> str:
        """For a subscriber that never ran."""
        return f"the event came {self.num_called} times, at none of which its filter let it run"

    def get_state(self) -> dict[str, Any]:
        """The counters."""
        return {"num_called": self.num_called, "num_executed": self.num_executed, "ran": self._ran}

    def update_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `get_state` returned."""
        self.num_called, self.num_executed = int(state["num_called"]), int(state["num_executed"])
        self._ran = bool(state["ran"])


def call_filter(
    *, every: int | None = None, once: int | bool | None = None, when: Callable[..., Any] | None = None
) -> Callable[[Function], Function]:
    """Decorate a method of a `Callback`: it runs at some of its event's occurrences only, each object counting its own.

    Args:
        every: at the calls n, 2n, 3n, ...
        once: at the n-th call only; True for the first.
        when: `when(trainer, filter) -> bool`, or `when(trainer)`.

    Raises:
        ConfigurationError: not exactly one is given, or one that cannot be.
    """
    settings = {"every": every, "once": once, "when": when}
    Filter(**settings)  # type: ignore[arg-type]
    if all(value is None for value in settings.values()):
        raise ConfigurationError("call_filter() was given nothing. Write every=..., once=... or when=... in it.")

    def decorate(method: Function) -> Function:
        setattr(method, _FILTER, settings)
        return method

    return decorate


def filter_of(method: Callable[..., Any]) -> Filter | None:
    """A new filter as `call_filter` asked for at `method`; None if it did not."""
    settings = getattr(method, _FILTER, None)
    return None if settings is None else Filter(**settings)
