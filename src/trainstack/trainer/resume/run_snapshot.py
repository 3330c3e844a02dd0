"""`RunSnapshot` keeps the state of a run on this rank in memory, and restores it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trainstack.backends import Workload
from trainstack.backends.optimizer_state import load_optimizer_state, parameter_names
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.state_tree import copied, lies_in, memory_of, same
from trainstack.trainer.resume.module_generators import get_generator_states, put_back_generators
from trainstack.trainer.resume.optimizer_attributes import AttributeSnapshot
from trainstack.trainer.resume.optimizer_states import is_divided
from trainstack.trainer.schedulers.stepping import Schedules


def user_states(context: RunContext, *, generators: bool = True) -> dict[str, Any]:
    """The states of user code: of the module, its extras and generators, the callbacks and `user_state`."""
    return {
        "module": context.module.get_state(),
        "extras": {} if context.stack.is_private else context.extras.get_values(),
        "generators": get_generator_states(context) if generators else {},
        "callbacks": context.events.get_state(),
        "user": context.user_state.get_state(),
    }


def put_back_user_states(context: RunContext, states: Mapping[str, Any]) -> None:
    """Restore the result of `user_states` in objects whose state has changed. New items of `user_state` are deleted."""
    context.extras.put_back(states.get("extras", {}), states["module"])
    if not same(context.module.get_state(), states["module"]):
        context.module.update_state(states["module"])
    put_back_generators(context, states["generators"])
    context.events.put_back(states["callbacks"])
    user, now = states["user"], context.user_state.get_state()
    if not same(now, user):
        for name in [*now["values"], *now["objects"]]:
            if name not in user["values"] and name not in user["objects"]:
                del context.user_state[name]
        context.user_state.update_state(user)


class RunSnapshot:
    """The state of a run as in a checkpoint: user states, optimizers, schedulers, layers, counters, history.

    `restore` calls `update_state` or `load_state_dict` only of objects whose state has changed. The caller restores
    random states. There is no communication with other ranks.

    Args:
        context: the context of the run.
        work: the workload with the optimizers. Their states are restored in the same tensors.
        schedules: the schedulers of the run; None if they do not step.
        shared: tensors that are not copied, because they do not change or the caller restores them.
        on_host: copy tensors to the host's memory.
        keeps_moments: copy the tensors in optimizers, which may have twice the size of the model.
    """

    def __init__(
        self,
        context: RunContext,
        work: Workload,
        schedules: Schedules | None = None,
        *,
        shared: Iterable[Tensor] = (),
        on_host: bool = False,
        keeps_moments: bool = True,
    ) -> None:
        self._context, self._schedules = context, schedules
        memory = memory_of(shared)
        self._states = {name: _copied(state, memory, on_host) for name, state in user_states(context).items()}
        self._layers = copied(context.stack.get_state(), on_host=on_host)
        self._counters, self._records = context.state.get_state(), context.history.mark()
        self._schedulers = [] if schedules is None else [copied(one.state_dict()) for one in schedules.schedulers]
        self._counts = [] if schedules is None else schedules.get_counts()
        parts = [one for optimizer in work.optimizers for one in _parts_of(optimizer)]
        self._optimizers = [_snapshot_of(optimizer, on_host, keeps_moments) for optimizer in parts]
        self._attributes = [AttributeSnapshot(optimizer, on_host, keeps_moments) for optimizer in parts]

    def restore(self) -> None:
        """Restore the state."""
        context = self._context
        put_back_user_states(context, self._states)
        for optimizer in self._optimizers:
            optimizer.restore()
        for attributes in self._attributes:
            attributes.restore()
        if self._schedules is not None:
            for scheduler, state in zip(self._schedules.schedulers, self._schedulers, strict=True):
                if not same(scheduler.state_dict(), state):
                    scheduler.load_state_dict(state)
            if self._schedules.get_counts() != self._counts:
                self._schedules.update_counts(self._counts)
        # The spent budget of a private run is never reduced.
        if not context.stack.is_private and not same(context.stack.get_state(), self._layers):
            context.stack.update_state(self._layers)
        context.state.update_state(self._counters)
        context.history.back_to(self._records)


def _copied(state: Any, memory: set[int], on_host: bool) -> Any:
    """A copy of `state` that shares the tensors in `memory`. The caller restores these."""
    if type(state) in (dict, OrderedDict):
        return type(state)((key, _copied(value, memory, on_host)) for key, value in state.items())
    return state if lies_in(state, memory) else copied(state, on_host=on_host)


def optimized_parameters(work: Workload) -> list[Tensor]:
    """The current parameters in the groups of the optimizers."""
    return [p for optimizer in work.optimizers for group in optimizer.param_groups for p in group["params"]]


def name_joined(work: Workload, before: Iterable[Tensor]) -> list[str]:
    """The names of the parameters in the optimizers that are not in `before`."""
    known = set(map(id, before))
    joined = [p for p in optimized_parameters(work) if id(p) not in known]
    if not joined:
        return []
    names, originals = parameter_names(work.module), work.params.find_originals()
    return [names[id_][0] for p in joined if (id_ := id(originals.get(id(p), p))) in names]


def take_out(work: Workload, names: Collection[str]) -> None:
    """Remove the parameters of these names from the optimizers, and groups that have no other parameters.

    Optimizers whose groups a `RunSnapshot` cannot restore are not changed.
    """
    if not names:
        return
    taken, known, originals = set(names), parameter_names(work.module), work.params.find_originals()
    for optimizer in work.optimizers:
        groups = []
        for group in optimizer.param_groups if _has_plain_state(optimizer) else ():
            members = group["params"]
            left = [p for p in members if taken.isdisjoint(known.get(id(originals.get(id(p), p)), ()))]
            if len(left) < len(members):
                group["params"] = left
            if left or not members:
                groups.append(group)
        if groups:
            optimizer.param_groups[:] = groups


def _parts_of(optimizer: Any) -> list[Optimizer]:
    """The optimizer, and for a divided optimizer also the wrapped optimizer of this rank, which has the state."""
    return [optimizer, optimizer.optim] if is_divided(optimizer) else [optimizer]


def _snapshot_of(optimizer: Optimizer, on_host: bool, with_tensors: bool) -> _StateSnapshot | _StateDictSnapshot:
    if _has_plain_state(optimizer) or not with_tensors or is_divided(optimizer):
        return _StateSnapshot(optimizer, on_host, with_tensors)
    return _StateDictSnapshot(optimizer, on_host)


def _has_plain_state(optimizer: Optimizer) -> bool:
    """Whether `optimizer` has no other state than its groups and `state`."""
    kind = type(optimizer)
    return kind.state_dict is Optimizer.state_dict and kind.load_state_dict is Optimizer.load_state_dict


class _StateSnapshot:
    """Groups and state of an optimizer, restored in place, because schedulers and user code may hold the objects.

    `load_state_dict` would replace groups and tensors, cast the state to the dtype of its parameter, and refuse added
    groups.
    """

    def __init__(self, optimizer: Optimizer, on_host: bool, with_tensors: bool) -> None:
        self._optimizer, self._on_host, self._with_tensors = optimizer, on_host, with_tensors
        self._tensors = list[tuple[Tensor, Tensor]]()
        self._groups = [(group, self._kept(group)) for group in optimizer.param_groups]
        self._state = [(parameter, state, self._kept(state)) for parameter, state in optimizer.state.items()]

    def _kept(self, values: dict[str, Any]) -> dict[str, Any]:
        kept = {}
        for name, value in values.items():
            if isinstance(value, Tensor):
                if self._with_tensors:
                    self._tensors.append((value, copied(value, on_host=self._on_host)))
            elif name == "params":
                value = (value, list(value))
            else:
                value = deepcopy(value)
            kept[name] = value
        return kept

    def restore(self) -> None:
        """Restore the optimizer."""
        optimizer = self._optimizer
        # For a group that was removed and added again, keep the new object, because user code may hold it.
        again = {tuple(map(id, group["params"])): group for group in optimizer.param_groups if group["params"]}
        groups = [(again.get(tuple(map(id, kept["params"][1])), group), kept) for group, kept in self._groups]
        optimizer.param_groups[:] = [group for group, _ in groups]
        for group, kept in groups:
            parameters, members = kept["params"]
            parameters[:] = members
            group.clear()
            group.update(kept, params=parameters)
        optimizer.state.clear()
        for parameter, state, kept in self._state:
            state.clear()
            state.update(kept)
            optimizer.state[parameter] = state
        for tensor, before in self._tensors:
            tensor.data.copy_(before)


class _StateDictSnapshot:
    """The state dict of an optimizer that overrides its methods."""

    def __init__(self, optimizer: Optimizer, on_host: bool) -> None:
        self._optimizer, self._state = optimizer, copied(optimizer.state_dict(), on_host=on_host)

    def restore(self) -> None:
        """Restore the state dict, if it has changed."""
        if not same(self._optimizer.state_dict(), self._state):
            load_optimizer_state(self._optimizer, self._state)
