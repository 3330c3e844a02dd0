"""Calling a function with those of many named values that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from trainstack.errors import ModuleContractError


def call_with_matching_args(function: Callable[..., Any], *sources: Mapping[str, Any]) -> Any:
    """Call `function` with the values of `sources` whose names are its parameters.

    Other values are left out, unless the function has `**kwargs`; defaults stay where nothing is given. Its signature
    is read once, at the first call.

    Raises:
        ModuleContractError: a parameter without a default is in none of the sources, a value is in two, or the function
            has `*args` or positional-only parameters, which have no names to go by.
    """
    return function(**parameters_of(function).pick(*sources))


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a function can be given by name.

    Attributes:
        function: its name, for messages.
        names: of all parameters, in order.
        required: those without a default.
        takes_all: whether it has `**kwargs`.
    """

    function: str
    names: tuple[str, ...]
    required: tuple[str, ...]
    takes_all: bool

    def pick(self, *sources: Mapping[str, Any]) -> dict[str, Any]:
        """The values that the function takes; see `call_with_matching_args`."""
        picked: dict[str, Any] = {}
        for source in sources:
            for name in source if self.takes_all else [name for name in self.names if name in source]:
                if name in picked:
                    raise ModuleContractError(
                        f"{self.function} takes {name!r}, and two sources have it: {_provided(sources)}. Rename one "
                        "with a mapping."
                    )
                picked[name] = source[name]
        missing = [name for name in self.required if name not in picked]
        if missing:
            raise ModuleContractError(
                f"{self.function} needs {', '.join(map(repr, missing))}, not among what is provided: "
                f"{_provided(sources)}. Rename with a mapping, or give the parameter a default."
            )
        return picked


def parameters_of(function: Callable[..., Any]) -> Parameters:
    """The parameters of `function`; of a module, those of its `forward`, also where torch.compile has wrapped it.

    Raises:
        ModuleContractError: it has no signature, or one that cannot be matched by name.
    """
    if isinstance(function, nn.Module):
        function = getattr(function, "_orig_mod", function).forward
    bound, plain = hasattr(function, "__self__"), getattr(function, "__func__", function)
    try:
        known = _KNOWN.setdefault(plain, {})
    except TypeError:  # it cannot be hashed or weakly referred to
        return _read(function)
    if bound not in known:
        known[bound] = _read(function)
    return known[bound]


_KNOWN: WeakKeyDictionary[Any, dict[bool, Parameters]] = WeakKeyDictionary()
"""By function, apart from the object it is bound to, so that every model of a class shares one entry."""


def _read(function: Callable[..., Any]) -> Parameters:
    name = getattr(function, "__qualname__", None) or type(function).__name__
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ModuleContractError(f"{name} has no signature to match names with. Wrap it in a function.") from error
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
            raise ModuleContractError(
                f"{name} takes {star}{parameter.name} by position only, so names cannot be matched with it. Give it "
                "named parameters, or have the loader give tuples."
            )
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    return Parameters(
        function=name,
        names=tuple(p.name for p in named),
        required=tuple(p.name for p in named if p.default is p.empty),
        takes_all=len(named) < len(parameters),
    )


def _provided(sources: tuple[Mapping[str, Any], ...]) -> str:
    return " and ".join(str(sorted(map(str, source))) for source in sources)
