"""`OptimizerStates` saves and restores the states of optimizers and schedulers under the names of parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainstack._deferred import materialized
from trainstack.backends import Workload
from trainstack.backends.optimizer_state import (
    PLAIN,
    depends_on_order,
    is_numbered,
    load_optimizer_state,
    name_optimizer_state,
    number_optimizer_state,
    parameter_names,
)
from trainstack.errors import OTHER_RUN, CheckpointMismatchError, UnsupportedStateError
from trainstack.trainer.core.changes import Change
from trainstack.trainer.core.effects import Effect
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.state_tree import copied, same
from trainstack.trainer.resume.group_matching import Groups, NamesById, as_made, match_groups, regroup
from trainstack.trainer.resume.optimizer_attributes import OptimizerAttributes
from trainstack.trainer.schedulers.stepping import Schedules

_HOW = "Make the same ones, or write reset_optimizers_schedulers=True to start with new ones."
_Record = Mapping[str, Any]


class OptimizerStates:
    """Saves and loads the optimizers and schedulers of a run.

    The record of an optimizer is `{"class": ..., "groups": [{"params": [names], options...}], "state": {name: ...}}`.
    Further keys are optional:

    - `"joined"`: the names of parameters that were added during training.
    - `"ordered"`: True if the state depends on the order of the parameters.
    - `"state_dict"`, instead of `"state"`: a state dict that has another form than torch's.
    - `"dtypes"`: the dtypes of the parameters that are not float32.
    - `"attributes"`: the state of `OptimizerAttributes`.
    - `"made"`: the initial options of the groups.
    - `"first"`: the names in the initial groups, if the same parameters are in other groups now.

    The record of a scheduler has its class, the number of its optimizer, its state, and in `"made"` its first values.

    Args:
        work: the workload, whose optimizers still have their initial parameters.
        schedules: the schedulers, which have already written their first values into the optimizers.

    Attributes:
        same_settings: whether `update_state` refuses optimizers that were made with other settings. Otherwise they
            continue with the settings of the checkpoint.
        changes: the settings that differed in the last `update_state`.
    """

    def __init__(self, work: Workload, schedules: Schedules) -> None:
        self._work, self._schedules = work, schedules
        self._made = [[_options_of(group) for group in one.param_groups] for one in work.optimizers]
        self._first = [[list(group["params"]) for group in one.param_groups] for one in work.optimizers]
        known = parameter_names(work.module)
        self._first_names = [self._groups_of(one, known).names() for one in work.optimizers]
        self._made_schedulers = [_settings_of(one) for one in schedules.schedulers]
        self._attributes = [
            OptimizerAttributes(
                getattr(one, "optim", one) if is_divided(one) else one, work.module, is_part=is_divided(one)
            )
            for one in work.optimizers
        ]
        self._is_whole = self.same_settings = False
        self.changes = list[Change]()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A block in which `get_state` on rank 0 has the whole states of optimizers that are divided among ranks.

        All ranks enter it. `ZeroRedundancyOptimizer` then sends its parts to rank 0 by pickle.
        """
        divided: list[Any] = [one for one in self._work.optimizers if is_divided(one)]
        for optimizer in divided:
            optimizer.consolidate_state_dict(to=0)
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False
            for optimizer in divided:  # torch 2.13.0 keeps a copy in a private list, which would use memory
                with suppress(AttributeError):
                    optimizer._all_state_dicts.clear()

    def get_state(self) -> dict[str, Any]:
        """The records of all optimizers and schedulers."""
        optimizers, schedulers = self._work.optimizers, self._schedules.schedulers
        waited, known = self._schedules.get_counts(), parameter_names(self._work.module)
        return {
            "optimizers": [self._record_of(number, one, known) for number, one in enumerate(optimizers)],
            "schedulers": [
                {
                    "class": type(one).__name__,
                    "optimizer": _number_of(getattr(one, "optimizer", None), optimizers),
                    "waited": count,
                    "made": made,
                    "state": one.state_dict(),
                }
                for one, count, made in zip(schedulers, waited, self._made_schedulers, strict=True)
            ],
        }

    def warn_of_lost(self, log: RunLogger) -> None:
        """Warn of changed attributes of optimizers that a checkpoint cannot store."""
        for number, attributes in enumerate(self._attributes):
            lost = attributes.find_lost()
            if lost:
                log.warning(
                    f"optimizer {number} ({type(self._work.optimizers[number]).__name__}) has changed its attributes "
                    f"{', '.join(lost)}, which a checkpoint cannot store: in a resumed run they have the values of "
                    "__init__. Add their values to state_dict(), and load them in load_state_dict()."
                )

    def _record_of(self, number: int, optimizer: Optimizer, known: NamesById) -> dict[str, Any]:
        groups = self._groups_of(optimizer, known)
        names = groups.names()
        record: dict[str, Any] = {"class": type(optimizer).__name__}
        in_state: list[Any] = []
        if is_divided(optimizer) and not (self._is_whole and self._work.world.is_main):
            record |= {"groups": [{"params": [one for one in own if one]} for own in names], "state": None}
        else:
            state = self._state_dict_of(number, optimizer)
            in_state += state.values() if isinstance(state, Mapping) else ()
            if is_numbered(state, optimizer):
                record |= name_optimizer_state(state, names)
                record |= {"ordered": True} if depends_on_order(state, optimizer) else {}
            else:
                record |= {"groups": [{"params": list(own)} for own in names], "state_dict": state}
        first = set(map(id, chain(*self._first[number])))
        joined = [
            name
            for group, own in zip(optimizer.param_groups, names, strict=True)
            for parameter, name in zip(group["params"], own, strict=True)
            if id(parameter) not in first and name is not None
        ]
        record |= {"joined": joined} if joined else {}
        parameters = zip(chain(*names), chain(*groups.parameters), strict=True)
        dtypes = {name: p.dtype for name, p in parameters if p.dtype is not torch.float32 and name is not None}
        record |= {"dtypes": dtypes} if dtypes else {}
        attributes = self._attributes[number].get_state(in_state)
        record |= {"attributes": attributes} if attributes else {}
        if not all(isinstance(value, PLAIN) for value in attributes.get("values", {}).values()):
            record["ordered"] = True  # a list may have an item for each parameter
        if self._has_other_groups(number, optimizer) and not is_divided(optimizer):
            record["first"] = [[name for name in own if name is not None] for own in self._first_names[number]]
        made = self._made[number]
        return record | {"made": [*made, *({} for _ in range(len(optimizer.param_groups) - len(made)))]}

    def _has_other_groups(self, number: int, optimizer: Optimizer) -> bool:
        """Whether one of the initial parameters of an optimizer is in another place now."""
        first = [list(map(id, own)) for own in self._first[number]]
        now = [list(map(id, group["params"])) for group in optimizer.param_groups]
        added = [ids[len(own) :] for ids, own in zip_longest(now, first, fillvalue=())]
        known = {id(p) for own in self._first for group in own for p in group}
        return [ids[: len(own)] for ids, own in zip(now, first, strict=False)] != first or not known.isdisjoint(
            chain(*added)
        )

    @staticmethod
    def _state_dict_of(number: int, optimizer: Optimizer) -> Any:
        try:
            return optimizer.state_dict()
        except KeyError as error:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            lost = [key for key in optimizer.state if isinstance(key, Tensor) and id(key) not in held]
            if not lost:
                raise
            raise UnsupportedStateError(
                f"optimizer {number} ({type(optimizer).__name__}) has the state of a parameter of shape "
                f"{tuple(lost[0].shape)} that is in none of its groups, so a checkpoint has no name for it. When you "
                "replace a parameter in a group, write optimizer.state[new] = optimizer.state.pop(old). When you "
                "remove one, write optimizer.state.pop(old)."
            ) from error

    def _groups_of(self, optimizer: Optimizer, known: NamesById) -> Groups:
        labels = [group.get("name") for group in optimizer.param_groups]
        return Groups(self._work.module, known, self._held_by(optimizer), labels)

    def _held_by(self, optimizer: Optimizer) -> list[list[Tensor]]:
        """The parameters of the module in an optimizer, by group."""
        originals = self._work.params.find_originals()
        return [[originals.get(id(p), p) for p in group["params"]] for group in optimizer.param_groups]

    def _held_elsewhere(self, number: int) -> dict[int, int]:
        """The numbers of the other optimizers, by the ids of their parameters."""
        others = [(other, one) for other, one in enumerate(self._work.optimizers) if other != number]
        return {id(p): other for other, one in others for own in self._held_by(one) for p in own}

    def update_state(self, state: Mapping[str, Any], log: RunLogger) -> None:
        """Load the result of `get_state`.

        Raises:
            CheckpointMismatchError: the checkpoint has other optimizers, groups or schedulers.
        """
        optimizers, records = self._work.optimizers, state["optimizers"]
        self.changes = []
        if any(not isinstance(record, Mapping) or "groups" not in record for record in records):
            raise CheckpointMismatchError(
                "the checkpoint is from an older version of trainstack, and numbers the parameters of its optimizers. "
                "To use only its weights, write resume_mode='weights'."
            )
        _check_count("optimizer", len(optimizers), len(records))
        known = parameter_names(self._work.module)  # once, because a module may have an optimizer for each parameter
        first = [as_made(record) for record in records]
        places = self._match_optimizers(first, known)
        orders = [self._load(number, records[place], first, place, known, log) for number, place in enumerate(places)]
        self._load_schedulers(state["schedulers"], places, orders)

    def _match_optimizers(self, records: Sequence[_Record], known: NamesById) -> list[int]:
        """For each optimizer, the number of the record with the same parameters."""
        by_name = {name: id_ for id_, names in known.items() for name in names}

        def ids(names: Iterable[str]) -> frozenset[int | None]:
            return frozenset(by_name.get(name) for name in names)

        whole = [ids(name for group in record["groups"] for name in group["params"]) for record in records]
        first = [own - ids(record.get("joined", ())) for own, record in zip(whole, records, strict=True)]
        mine = [frozenset(id(p) for own in self._held_by(one) for p in own) for one in self._work.optimizers]
        for saved in (whole, first):
            if len(set(saved)) == len(saved) and set(saved) == set(mine):
                return [saved.index(own) for own in mine]
        return list(range(len(mine)))

    def _load(
        self, number: int, record: _Record, first: Sequence[_Record], place: int, known: NamesById, log: RunLogger
    ) -> list[int]:
        """Load the state of an optimizer from `record`, that of `place` in `first` with its current groups.

        Returns:
            for each group, the number of the group in the checkpoint.
        """
        optimizer = self._work.optimizers[number]
        kind, what = type(optimizer).__name__, f"optimizer {number} ({type(optimizer).__name__})"
        if kind != record["class"]:
            raise CheckpointMismatchError(
                f"optimizer {number} is a {kind}; the checkpoint's is a {record['class']}. {_HOW}"
            )
        if record.get("state", record.get("state_dict")) is None:
            raise CheckpointMismatchError(
                f"the checkpoint lacks the state of {what}, which is divided among ranks: one rank wrote it after an "
                "exception. Resume from the newest checkpoint before it."
            )
        groups = self._groups_of(optimizer, known)
        match = match_groups(what, groups, self._held_elsewhere(number), first, place)
        self._compare_settings(number, what, record, match.order)
        order = match.order
        if "first" in record:
            regroup(what, optimizer, groups, record)
            order = list(range(len(record["groups"])))
            log.info(f"{what} has the groups of the checkpoint, which were changed during training.")
        else:
            self._add_joined(what, optimizer, record, match.joined, known, log)
        groups = self._groups_of(optimizer, known)
        names, dtypes = groups.names_as_in(record), record.get("dtypes", {})
        if "state_dict" in record:
            state = materialized(record["state_dict"])
        else:
            named = {**record, "groups": [record["groups"][place] for place in order]}
            state = number_optimizer_state(named, names)
            for mine, theirs in zip(optimizer.param_groups, state["param_groups"], strict=True):
                theirs |= {"param_names": mine["param_names"]} if "param_names" in mine else {}
        try:
            load_optimizer_state(optimizer, state, [dtypes.get(one, torch.float32) for one in chain(*names)])
        except (KeyError, ValueError, RuntimeError, TypeError) as error:
            raise CheckpointMismatchError(f"{what} does not fit the checkpoint's: {error}. {_HOW}") from error
        self._attributes[number].update_state(materialized(record.get("attributes", {})))
        return order

    def _add_joined(
        self,
        what: str,
        optimizer: Optimizer,
        record: _Record,
        joined: Sequence[Sequence[Tensor]],
        known: NamesById,
        log: RunLogger,
    ) -> None:
        """Add the parameters that were added during training, to the groups of the optimizer or in new groups."""
        for number, parameters in enumerate(joined):
            if not parameters:
                continue
            if number < len(optimizer.param_groups):
                optimizer.param_groups[number]["params"] += parameters
                continue
            names = {name for p in parameters for name in known.get(id(p), ())}
            saved = next(group for group in record["groups"] if names & set(group["params"]))
            options = copy.deepcopy({key: value for key, value in saved.items() if key != "params"})
            optimizer.add_param_group({**options, "params": list(parameters)})
        count = sum(map(len, joined))
        if count:
            log.info(f"{what} has {count} parameter{'s' * (count > 1)} again that joined during training.")

    def _compare_settings(self, number: int, what: str, record: _Record, order: Sequence[int]) -> None:
        """Compare the initial options of the groups, then and now. Later changes by schedulers and hooks do not count
        as other settings."""
        then = [record["made"][place] if place < len(record["made"]) else {} for place in order]
        now = self._made[number]
        for position, (mine, theirs) in enumerate(zip(now, then, strict=False)):
            scheduled = "initial_lr" in mine and "initial_lr" in theirs
            for key in sorted(set(mine) & set(theirs) - {"lr" if scheduled else "initial_lr"}):
                if _same(mine[key], theirs[key]):
                    continue
                option = key.removeprefix("initial_")
                if self.same_settings:
                    raise CheckpointMismatchError(
                        f"{what} was made with {option}={mine[key]!r}, and that of the run in this folder with "
                        f"{theirs[key]!r}. {OTHER_RUN} To continue with the new value, write "
                        "reset_optimizers_schedulers=True."
                    )
                group = f"groups.{position}." if len(now) > 1 else ""
                self.changes.append(_not_used(f"optimizers.{number}.{group}{option}", theirs[key], mine[key]))
        self._made[number] = then

    def _load_schedulers(
        self, records: Sequence[_Record], places: Sequence[int], orders: Sequence[Sequence[int]]
    ) -> None:
        schedulers, optimizers = self._schedules.schedulers, self._work.optimizers
        _check_count("scheduler", len(schedulers), len(records))
        numbers = [_number_of(getattr(one, "optimizer", None), optimizers) for one in schedulers]
        wanted = [
            (type(one).__name__, None if number is None else places[number])
            for one, number in zip(schedulers, numbers, strict=True)
        ]
        waited = [0] * len(records)
        for position, source in enumerate(_match_schedulers(wanted, records)):
            scheduler, number, record = schedulers[position], numbers[position], records[source]
            what = f"scheduler {position} ({type(scheduler).__name__})"
            then = record.get("made", {})
            self.changes += _other_lengths(position, self._made_schedulers[position], then)
            self._made_schedulers[position] = then
            order = None if number is None else orders[number]
            state = record["state"] if order is None else _in_order(what, scheduler, record["state"], order)
            try:
                scheduler.load_state_dict(state)
            except (KeyError, ValueError, RuntimeError, TypeError) as error:
                raise CheckpointMismatchError(f"{what} does not fit the checkpoint's: {error}. {_HOW}") from error
            waited[position] = record["waited"]
        self._schedules.update_counts(waited)


def _check_count(kind: str, mine: int, saved: int) -> None:
    if mine != saved:
        raise CheckpointMismatchError(
            f"get_optimizers_schedulers returned {mine} {kind}s, the checkpoint has {saved}. {_HOW}"
        )


def is_divided(optimizer: Any) -> bool:
    """Whether each rank has a part of the state, and the optimizer can gather it."""
    return callable(getattr(optimizer, "consolidate_state_dict", None))


def _number_of(optimizer: Any, optimizers: Sequence[Optimizer]) -> int | None:
    return next((number for number, one in enumerate(optimizers) if one is optimizer), None)


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def _match_schedulers(wanted: Sequence[tuple[str, int | None]], records: Sequence[_Record]) -> list[int]:
    """For each scheduler, the number of the next record with its class and optimizer."""
    left = [(record["class"], record["optimizer"]) for record in records]
    found = list[int]()
    for position, (kind, optimizer) in enumerate(wanted):
        if (kind, optimizer) not in left:
            theirs = records[position]
            if theirs["class"] != kind:
                raise CheckpointMismatchError(
                    f"scheduler {position} is a {kind}; the checkpoint's is a {theirs['class']}. {_HOW}"
                )
            raise CheckpointMismatchError(
                f"scheduler {position} ({kind}) belongs to optimizer {optimizer} of the checkpoint; the checkpoint's "
                f"belongs to optimizer {theirs['optimizer']}. {_HOW}"
            )
        number = left.index((kind, optimizer))
        left[number] = ("", None)
        found.append(number)
    return found


_BY_GROUP = frozenset(("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"))
"""The attributes of torch 2.13.0's schedulers that are lists with an item for each group."""


def _in_order(what: str, scheduler: Any, state: Any, order: Sequence[int]) -> Any:
    """`state` with its values for groups in the order of this run.

    Raises:
        CheckpointMismatchError: the groups are in another order, and the class of `scheduler` is not from torch.
    """
    if list(order) == sorted(order):
        return state
    if not type(scheduler).__module__.startswith("torch."):
        raise CheckpointMismatchError(
            f"the parameter groups are in another order than in the checkpoint, and {what} may have values in the "
            f"order of the groups. Create the groups in the order of the checkpoint. Their positions in it are "
            f"{list(order)}, counted from 0."
        )
    return {key: _one_in_order(key, value, order) for key, value in state.items()}


def _one_in_order(key: str, value: Any, order: Sequence[int]) -> Any:
    if key == "_schedulers":
        return [{name: _one_in_order(name, one, order) for name, one in part.items()} for part in value]
    if key in _BY_GROUP and isinstance(value, list | tuple) and len(value) > max(order):
        return type(value)(value[place] for place in order)
    return value


def _settings_of(scheduler: Any) -> dict[str, Any]:
    """The length of a new scheduler, and the attributes of its `lr_lambdas` objects."""
    state: dict[str, Any] = getattr(scheduler, "state_dict", dict)()  # not required if the run saves nothing
    return {key: copied(state[key]) for key in ("total_steps", "T_max", "total_iters", "lr_lambdas") if key in state}


def _other_lengths(position: int, mine: _Record, theirs: _Record) -> list[Change]:
    """The changes of a scheduler's length. A resumed schedule keeps its first length, also in a longer run."""
    keys = [key for key in mine if key in theirs and not same(mine[key], theirs[key])]
    return [_not_used(f"schedulers.{position}.{key}", theirs[key], mine[key]) for key in keys]


def _not_used(name: str, saved: Any, given: Any) -> Change:
    option = name.rpartition(".")[2]
    remedy = f"make it with {option}={saved!r}, or write reset_optimizers_schedulers=True to use {option}={given!r}"
    return Change(name=name, saved=repr(saved), given=repr(given), effect=Effect.NOT_USED, remedy=remedy)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return torch.equal(torch.as_tensor(one).cpu(), torch.as_tensor(other).cpu())
    return bool(one == other)
