"""`match_groups` finds the parameter groups of a checkpoint in an optimizer, by the names of the parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainstack.errors import CheckpointMismatchError
from trainstack.trainer.module_checks import shortened

_HOW = (
    "Optimizer states are stored by the name of the parameter. Use the same names and groups as before, or write "
    "reset_optimizers_schedulers=True to start with new optimizer states."
)


NamesById = Mapping[int, Sequence[str]]
"""The names of each parameter of a module by its id."""


class Groups:
    """The parameter groups of one optimizer, with the names that the module has for the parameters.

    Args:
        module: the module.
        known: the names of its parameters, a result of `parameter_names`.
        parameters: the parameters of the module, by group.
        labels: the value of the key "name" of each group; None without one.

    Attributes:
        parameters: as given.
        labels: as given.
    """

    parameters: Sequence[Sequence[Tensor]]
    labels: Sequence[Any]

    def __init__(
        self, module: nn.Module, known: NamesById, parameters: Sequence[Sequence[Tensor]], labels: Sequence[Any]
    ) -> None:
        self.parameters, self.labels, self._module, self._names = parameters, labels, module, known

    @cached_property
    def by_name(self) -> dict[str, int]:
        """The ids of the module's parameters by all their names."""
        return {name: id_ for id_, names in self._names.items() for name in names}

    def names(self) -> list[list[str | None]]:
        """The first name of each parameter, by group; None if it is not in the module any more."""
        return [[self._names.get(id(p), (None,))[0] for p in own] for own in self.parameters]

    def names_as_in(self, record: Mapping[str, Any]) -> list[list[str | None]]:
        """`names`, with the names in `record`, because a tied parameter has several names."""
        known = {self.by_name[name]: name for group in record["groups"] for name in group["params"]}
        return [[known.get(id(p)) for p in own] for own in self.parameters]

    def all_parameters(self) -> dict[int, Tensor]:
        """The parameters of the module by their ids, also those in no group."""
        return {id(parameter): parameter for parameter in self._module.parameters()}

    def describe(self, number: int) -> str:
        """ "group 1 ('head', with head.weight, head.bias)"."""
        names = [name or "(no name)" for name in self.names()[number]]
        return _describe(number, self.labels[number], names)


def as_made(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record with the initial groups of the optimizer, if user code has changed them since."""
    if "first" not in record:
        return record
    return {**record, "groups": [{"params": names} for names in record["first"]], "joined": ()}


def regroup(title: str, optimizer: Optimizer, mine: Groups, record: Mapping[str, Any]) -> None:
    """Replace the groups of an optimizer by those of a record.

    Args:
        title: the name of the optimizer in messages.
        optimizer: the optimizer.
        mine: its groups, with the parameters of the module.
        record: the record of the optimizer.

    Raises:
        CheckpointMismatchError: the module lacks a parameter of the record.
    """
    groups, known = optimizer.param_groups, mine.all_parameters()
    missing = [name for group in record["groups"] for name in group["params"] if name not in mine.by_name]
    if missing:
        raise CheckpointMismatchError(_names_message(title, missing, ()))
    for own, group in zip(mine.parameters, groups, strict=True):
        known |= {id(p): held for p, held in zip(own, group["params"], strict=True)}
    named = any("param_names" in group for group in groups)
    made = []
    for group in record["groups"]:
        names = {"param_names": list(group["params"])} if named else {}
        parameters = [known[mine.by_name[name]] for name in group["params"]]
        made.append({**copy.deepcopy({**optimizer.defaults, **group}), **names, "params": parameters})
    groups[:] = made


@dataclass(frozen=True, slots=True)
class Match:
    """The groups of an optimizer and the corresponding groups of a checkpoint.

    Attributes:
        order: the number of the group in the checkpoint, for each group of the optimizer and then for each new one.
        joined: in the same order, the parameters that were added during training and are not in the optimizer.
    """

    order: list[int]
    joined: list[list[Tensor]]


def match_groups(
    title: str,
    mine: Groups,
    elsewhere: Mapping[int, int],
    records: Sequence[Mapping[str, Any]],
    place: int,
) -> Match:
    """Find each group of an optimizer in the record of a checkpoint.

    Args:
        title: the name of the optimizer in messages.
        mine: its groups.
        elsewhere: the numbers of the other optimizers, by the ids of their parameters.
        records: the records of all optimizers; see `OptimizerStates`.
        place: the position of the record of the optimizer.

    Raises:
        CheckpointMismatchError: a name is missing on one side, or a parameter is in another group or optimizer.
    """
    record = records[place]
    saved = _saved_places(title, mine, record)
    held = {id(p): number for number, own in enumerate(mine.parameters) for p in own}
    _check_optimizer(title, mine, saved, records, place)
    joined_names = set(record.get("joined", ()))
    missing, joined = list[str](), dict[int, list[str]]()
    for number, group in enumerate(record["groups"]):
        for name in group["params"]:
            id_ = mine.by_name.get(name)
            if id_ in held:
                continue
            if name in joined_names and id_ is not None and id_ not in elsewhere:
                joined.setdefault(number, []).append(name)
            elif id_ is not None and id_ in elsewhere:
                raise CheckpointMismatchError(
                    f"the parameter {name!r} is in optimizer {elsewhere[id_]}; in the checkpoint it is in optimizer "
                    f"{place} ({record['class']}). {_HOW}"
                )
            else:
                missing.append(name)
    new = [
        name or "(no name)"
        for own, names in zip(mine.parameters, mine.names(), strict=True)
        for p, name in zip(own, names, strict=True)
        if id(p) not in saved
    ]
    if missing or new:
        raise CheckpointMismatchError(_names_message(title, missing, new))
    if record.get("ordered") or "state_dict" in record:
        _check_order(title, mine, record)
    order = _match_numbers(title, mine, record, saved)
    return _with_joined(mine, order, joined)


def _saved_places(title: str, mine: Groups, record: Mapping[str, Any]) -> dict[int, int]:
    """The group of the record by the id of the parameter."""
    places, names = dict[int, int](), dict[int, str]()
    for number, group in enumerate(record["groups"]):
        for name in group["params"]:
            id_ = mine.by_name.get(name)
            if id_ is None:
                continue
            if id_ in places:
                raise CheckpointMismatchError(
                    f"{title}: {names[id_]!r} and {name!r} were two parameters when the checkpoint was written, and "
                    f"are one now. Untie them, or write reset_optimizers_schedulers=True."
                )
            places[id_], names[id_] = number, name
    return places


def _check_optimizer(
    title: str, mine: Groups, saved: Mapping[int, int], records: Sequence[Mapping[str, Any]], place: int
) -> None:
    """Refuse a parameter that another optimizer of the checkpoint held."""
    for own, names in zip(mine.parameters, mine.names(), strict=True):
        for p, name in zip(own, names, strict=True):
            if id(p) in saved:
                continue
            for number, record in enumerate(records):
                if number != place and any(mine.by_name.get(n) == id(p) for g in record["groups"] for n in g["params"]):
                    raise CheckpointMismatchError(
                        f"the parameter {name!r} is in {title}; in the checkpoint it is in optimizer {number} "
                        f"({record['class']}). {_HOW}"
                    )


def _names_message(title: str, missing: Sequence[str], new: Sequence[str]) -> str:
    parts = []  # up to 8 names, so that the message remains readable
    if missing:
        parts.append(f"the checkpoint has {_count(missing)} that {title} lacks: {shortened(missing, 8)}")
    if new:
        parts.append(f"{title} has {_count(new)} that the checkpoint lacks: {shortened(new, 8)}")
    return f"{'; '.join(parts)}. {_HOW}"


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} parameter{'s' * (len(names) > 1)}"


def _check_order(title: str, mine: Groups, record: Mapping[str, Any]) -> None:
    """Refuse another order of the parameters if the state is stored by their positions."""
    theirs = [list(group["params"]) for group in record["groups"]]
    if [[mine.by_name.get(name) for name in own] for own in theirs] != [
        [id(p) for p in own] for own in mine.parameters
    ]:
        had, has = ([shortened([n or "?" for n in own], 8) for own in names] for names in (theirs, mine.names()))
        raise CheckpointMismatchError(
            f"{title} stores its state in the order of its parameters, and the order has changed. Checkpoint: "
            f"{' | '.join(had)}. Now: {' | '.join(has)}. Use the order of the checkpoint, or write "
            "reset_optimizers_schedulers=True."
        )


def _match_numbers(title: str, mine: Groups, record: Mapping[str, Any], saved: Mapping[int, int]) -> list[int]:
    """For each group of the optimizer, the number of the group in the checkpoint with the same parameters."""
    order, taken, names = list[int](), dict[int, int](), mine.names()
    empty = [number for number, group in enumerate(record["groups"]) if not group["params"]]
    for number, own in enumerate(mine.parameters):
        if not own:
            place = empty.pop(0) if empty else None
            if place is None:
                raise CheckpointMismatchError(f"{title} has {mine.describe(number)}; the checkpoint has not. {_HOW}")
            order.append(place)
            continue
        place = saved[id(own[0])]
        for p, name in zip(own, names[number], strict=True):
            theirs = saved[id(p)]
            if theirs != place or taken.get(theirs, number) != number:
                group = record["groups"][theirs]
                raise CheckpointMismatchError(
                    f"the parameter {name!r} of {title} is in {mine.describe(number)}; in the checkpoint it is in "
                    f"{_describe(theirs, group.get('name'), group['params'])}, so its options would change. {_HOW}"
                )
        taken[place] = number
        order.append(place)
    return order


def _with_joined(mine: Groups, order: list[int], joined: Mapping[int, Sequence[str]]) -> Match:
    order, found = list(order), [list[Tensor]() for _ in order]
    parameters = mine.all_parameters() if joined else {}
    for number, names in sorted(joined.items()):
        if number not in order:
            order.append(number)
            found.append([])
        found[order.index(number)] += [parameters[mine.by_name[name]] for name in names]
    return Match(order, found)


def _describe(number: int, label: Any, names: Sequence[str]) -> str:
    own = "" if label is None else f"{label!r}, "
    return f"group {number} ({own}{shortened(names, 3) or 'without parameters'})"
