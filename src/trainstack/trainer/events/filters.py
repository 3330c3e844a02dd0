"""Filters that select the occurrences of an event at which a subscriber runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from trainstack.errors import ConfigurationError


def adapt_arity(function: Callable[..., Any], given: Sequence[str], where: str) -> Callable[..., Any]:
    """Adapt `function` to a call with all values in `given`: it gets as many of the first ones as it takes.

    A parameter with a default value gets a value only if it has the name of this value.

    Raises:
        ConfigurationError: the function requires more arguments.
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
            f"{name_of(function)}{signature} cannot take the arguments of {where} ({error}). Write "
            f"def {name_of(function).rpartition('.')[2]}({', '.join(given)}), or omit some of the last ones."
        ) from error
    return function if count == len(given) else lambda *arguments: function(*arguments[:count])


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of `function` for messages."""
    name: str = getattr(function, "__qualname__", None) or type(function).__name__
    return name.rpartition("<locals>.")[2]


Function = TypeVar("Function", bound=Callable[..., Any])
_FILTER = "__trainstack_filter__"


class Filter:
    """Counts the occurrences of an event, and decides at which of them its subscriber runs.

    Args:
        every: run at occurrences n, 2n, 3n, ...
        once: run at the n-th occurrence only; True for the first.
        when: function `when(trainer, filter) -> bool` or `when(trainer) -> bool`.

    Attributes:
        num_called: number of occurrences, including the current one.
        num_executed: number of times that the subscriber ran.

    Raises:
        ConfigurationError: more than one argument is given, or one is invalid.
    """

    num_called: int
    num_executed: int

    def __init__(
        self, *, every: int | None = None, once: int | bool | None = None, when: Callable[..., Any] | None = None
    ) -> None:
        given = [f"{name}={value!r}" for name, value in (("every", every), ("once", once), ("when", when)) if value]
        if len(given) > 1:
            raise ConfigurationError(f"{' and '.join(given)} exclude each other. Write one of them.")
        once = 1 if once is True else once
        for name, number in (("every", every), ("once", once)):
            if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
                raise ConfigurationError(f"{name}={number!r}: write a whole number, 1 or more.")
        if when is not None and not callable(when):
            raise ConfigurationError(f"when={when!r}: write a function, when(trainer) -> bool.")
        self.num_called = self.num_executed = 0
        self._every, self._once = every or 1, once
        self._when = None if when is None else adapt_arity(when, ("trainer", "filter"), "when")
        self._ran = False

    def passes(self, trainer: Any) -> bool:
        """Count one occurrence and return whether the subscriber runs."""
        self.num_called += 1
        if self._when is not None:
            self._ran = bool(self._when(trainer, self))
        else:
            self._ran = self.num_called == self._once if self._once else self.num_called % self._every == 0
        self.num_executed += self._ran
        return self._ran

    def take_back(self) -> None:
        """Undo the count of the last occurrence, which is about to be repeated."""
        self.num_called -= 1
        self.num_executed -= self._ran

    def never_ran_reason(self) -> str:
        """Return the reason for a subscriber that never ran."""
        return f"the event occurred {self.num_called} times, and its filter selected none of them"

    def get_state(self) -> dict[str, Any]:
        """Return the counters."""
        return {"num_called": self.num_called, "num_executed": self.num_executed, "ran": self._ran}

    def update_state(self, state: Mapping[str, Any]) -> None:
        """Restore the counters from `get_state`."""
        self.num_called, self.num_executed = int(state["num_called"]), int(state["num_executed"])
        self._ran = bool(state["ran"])


def call_filter(
    *, every: int | None = None, once: int | bool | None = None, when: Callable[..., Any] | None = None
) -> Callable[[Function], Function]:
    """Decorate a method of a `Callback` to run only at some occurrences of its event; each object counts separately.

    Args:
        every: run at occurrences n, 2n, 3n, ...
        once: run at the n-th occurrence only; True for the first.
        when: function `when(trainer, filter) -> bool` or `when(trainer) -> bool`.

    Raises:
        ConfigurationError: not exactly one argument is given, or it is invalid.

    Examples:
        >>> class Steps(ts.Callback):
        ...     @ts.call_filter(every=4)
        ...     def on_train_step_end(self, trainer, step):
        ...         print("step", step)
        >>> ts.Trainer(module, args, callbacks=[Steps]).train()
        step 4 step 8
    """
    settings = {"every": every, "once": once, "when": when}
    Filter(**settings)  # type: ignore[arg-type]
    if all(value is None for value in settings.values()):
        raise ConfigurationError("call_filter() has no argument. Write every=..., once=... or when=... in it.")

    def decorate(method: Function) -> Function:
        setattr(method, _FILTER, settings)
        return method

    return decorate


def filter_of(method: Callable[..., Any]) -> Filter | None:
    """Return a new filter with the settings of `call_filter` for `method`; None if it is not decorated."""
    settings = getattr(method, _FILTER, None)
    return None if settings is None else Filter(**settings)
