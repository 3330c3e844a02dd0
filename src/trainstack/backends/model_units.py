"""`find_units` chooses the parts of a module, its blocks, that are sharded, compiled or recomputed one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from trainstack._tensor_classes import class_of
from trainstack.errors import ConfigurationError

Unit = str | type[nn.Module] | nn.Module
"""A module, its name as in `named_modules()`, its class, or the name of its class."""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def find_units(module: nn.Module, named: Sequence[Unit] | None = None, *, option: str = "units") -> list[nn.Module]:
    """The units of `module` in the order of `modules()`, outer units before units inside them.

    Args:
        module: the user's module, which is never a unit.
        named: the choice of the user. None calls `module.sharding_units()`; if that is missing or returns None, the
            units are the blocks that an `nn.ModuleList` or `nn.Sequential` repeats.
        option: the name of the option for `named`, for error messages.

    Raises:
        ConfigurationError: a name matches no module, a named module is a container that no forward pass calls, or two
            units share a parameter.
    """
    if named is None and callable(method := getattr(module, "sharding_units", None)):
        named, option = method(), f"{class_of(module).__name__}.sharding_units()"
    if named is None:
        return _without_shared(module, list(dict.fromkeys(_repeated_blocks(module))))
    chosen = _named(module, named, option)
    shared = _first_shared(module, chosen)
    if shared is not None:
        parameter, units = shared
        raise ConfigurationError(
            f"{option}: the parameter {parameter!r} is shared by {' and '.join(units)}. A parameter belongs to one "
            "unit. Remove these units, so that the parameter belongs to the part around both."
        )
    return chosen


def _repeated_blocks(part: nn.Module) -> Iterator[nn.Module]:
    """The items of lists, and the items of sequences whose class occurs twice; no blocks inside other blocks."""
    classes = Counter(type(child) for child in part.children())
    for child in part.children():
        repeats = isinstance(part, nn.ModuleList) or (isinstance(part, nn.Sequential) and classes[type(child)] > 1)
        if repeats and not isinstance(child, _CONTAINERS) and _has_weights(child):
            yield child
        else:
            yield from _repeated_blocks(child)


def _has_weights(module: nn.Module) -> bool:
    """Whether `module` has more than vectors, such as the weight of a norm, which are not worth a separate exchange."""
    return any(parameter.dim() > 1 for parameter in module.parameters())


def _named(module: nn.Module, named: Sequence[Unit], option: str) -> list[nn.Module]:
    found: dict[int, nn.Module] = {}
    for wanted in [named] if isinstance(named, str | type | nn.Module) else named:
        fits = [part for name, part in module.named_modules() if part is not module and _fits(name, part, wanted)]
        if not fits:
            parents = [part for part in module.modules() if any(True for _ in part.children())]
            classes = sorted({class_of(part).__name__ for part in parents})
            raise ConfigurationError(
                f"{option}: {wanted!r}: no module has this name or class. Write the name of a module as in "
                f"named_modules(), or one of the classes {', '.join(classes)}."
            )
        found.update((id(part), part) for part in fits)
    names = {id(part): name for name, part in module.named_modules()}
    for part in found.values():
        if isinstance(part, _CONTAINERS) and not isinstance(part, nn.Sequential):
            raise ConfigurationError(
                f"{option}: {names[id(part)]!r} is an nn.{type(part).__name__}, which no forward pass calls. Name its "
                "items."
            )
    return [part for part in module.modules() if id(part) in found]


def _fits(name: str, part: nn.Module, wanted: Unit) -> bool:
    if isinstance(wanted, nn.Module):
        return part is wanted
    return isinstance(part, wanted) if isinstance(wanted, type) else wanted in (name, class_of(part).__name__)


def _without_shared(module: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """`units` without those that share a parameter with another unit or with the rest of the module."""
    while clashes := _shared(module, units):
        dropped = {owner for owners in clashes.values() for owner in owners}
        units = [unit for unit in units if id(unit) not in dropped]
    return units


def _first_shared(module: nn.Module, units: Sequence[nn.Module]) -> tuple[str, list[str]] | None:
    clashes = _shared(module, units)
    names = {id(part): name or "the part outside of units" for name, part in module.named_modules()}
    for name, parameter in module.named_parameters():
        if id(parameter) in clashes:
            return name, sorted(names[owner] for owner in clashes[id(parameter)])
    return None


def _shared(module: nn.Module, units: Sequence[nn.Module]) -> dict[int, set[int]]:
    """The owners of each parameter with several: ids of units, or of `module` for the part outside of all units."""
    chosen, owners = {id(unit) for unit in units}, dict[int, set[int]]()
    waiting, seen = [(module, id(module))], set[tuple[int, int]]()
    while waiting:
        part, owner = waiting.pop()
        owner = id(part) if id(part) in chosen else owner
        if (id(part), owner) in seen:
            continue
        seen.add((id(part), owner))
        for parameter in part.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(owner)
        waiting += [(child, owner) for child in part.children()]
    return {key: found for key, found in owners.items() if len(found) > 1}
