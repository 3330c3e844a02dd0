"""Renaming what a loader or a model gives: `apply_mapping`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from trainstack.errors import ConfigurationError, ModuleContractError

NameMapping = Mapping[str, str] | Callable[[Any], Any]


def apply_mapping(mapping: NameMapping | None, value: Any) -> Any:
    """`value` under other names; never changed in place.

    Args:
        mapping: old names and new ones, or a function that is given `value`, or None for no change. Names that
            `value` lacks are passed over, names that are not mapped stay.
        value: for names, a dict or other mapping, a dataclass, or a tuple or list, whose items are called `_0`, `_1`,
            and so on. A function gets anything.

    Returns:
        A dict, or what the function returned.

    Raises:
        ModuleContractError: `value` has no names, or two items would get the same one.
    """
    if mapping is None:
        return value
    if not isinstance(mapping, Mapping):
        return mapping(value)
    by_position = isinstance(value, tuple | list)
    named = {f"_{position}": item for position, item in enumerate(value)} if by_position else as_named(value)
    if named is None:
        raise ModuleContractError(
            f"names cannot be mapped in a {type(value).__name__}. Use a function as the mapping, or give a dict, a "
            "dataclass, a tuple or a list."
        )
    names = Counter(mapping.get(name, name) for name in named)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ModuleContractError(
            f"the mapping {dict(mapping)} makes two items {twice[0]!r} of the items {list(named)}. Map the other one "
            "to a name of its own."
        )
    return {mapping.get(name, name): item for name, item in named.items()}


def as_named(value: Any) -> dict[str, Any] | None:
    """A mapping or a dataclass as a dict, not copied deeply; None for anything else."""
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return None


def chosen_mapping(
    kind: str, general: NameMapping | None, train: NameMapping | None, val: NameMapping | None
) -> tuple[NameMapping | None, NameMapping | None]:
    """The mappings for training and for the rest.

    Raises:
        ConfigurationError: a general one is given beside one of the others, or something is no mapping.
    """
    given = {f"{kind}_mapping": general, f"train_{kind}_mapping": train, f"val_{kind}_mapping": val}
    for name, mapping in given.items():
        if mapping is not None and not isinstance(mapping, Mapping) and not callable(mapping):
            raise ConfigurationError(f"{name}={mapping!r}: write a dict of old and new names, or a function.")
    if general is not None and (train is not None or val is not None):
        raise ConfigurationError(
            f"{kind}_mapping holds for training and validation; leave out train_{kind}_mapping and "
            f"val_{kind}_mapping, or leave {kind}_mapping out and write both."
        )
    return (train, val) if general is None else (general, general)
