"""State of optimizers by the names of parameters, to and from the numbers of `torch.optim.Optimizer.state_dict`.

torch numbers the parameters in the order of the groups. If a module returns its parameters in another order, numbers
assign moments to the wrong parameters; names do not.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainstack._deferred import materialized, whole
from trainstack._tensor_classes import inner_tensors, is_sharded, map_inner, shard_like

_COMPILED = "_orig_mod."
PLAIN = (bool, int, float, complex, str, bytes, type(None))

Names = Sequence[Sequence[str | None]]
"""The names of the parameters of each group, in the order of the optimizer; None for parameters that have left the
module."""


def parameter_names(module: nn.Module) -> dict[int, tuple[str, ...]]:
    """All names of each parameter of `module`, by its id. A tied parameter has several, in the order of the module.

    Prefixes that `torch.compile` adds are removed.
    """
    found: dict[int, tuple[str, ...]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found[id(parameter)] = (*found.get(id(parameter), ()), name.replace(_COMPILED, ""))
    return found


def is_numbered(state: Any, optimizer: Optimizer) -> bool:
    """Whether `state`, a result of `optimizer.state_dict()`, numbers the parameters as torch's optimizers do."""
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return False
    groups = state.get("param_groups")
    if not isinstance(groups, list) or len(groups) != len(optimizer.param_groups):
        return False
    numbers = [group.get("params") if isinstance(group, Mapping) else None for group in groups]
    first = 0
    for mine, group in zip(numbers, optimizer.param_groups, strict=True):
        if mine != list(range(first, first + len(group["params"]))):
            return False
        first += len(group["params"])
    return True


def name_optimizer_state(state: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """The numbered `state` of an optimizer under the names of its parameters.

    Args:
        state: a result of `state_dict` for which `is_numbered` holds.
        names: of the parameters of each group.

    Returns:
        `{"groups": [{"params": [names], options...}], "state": {name: {...}}}`. If there are any, `"shared"` holds
        entries of the state that belong to no parameter, and `"extra"` the other items of `state`.
    """
    flat = [name for group in names for name in group]
    groups = [
        {"params": [name for name in own if name is not None], **_options(group)}
        for group, own in zip(state["param_groups"], names, strict=True)
    ]
    numbered = {key: value for key, value in state["state"].items() if type(key) is int and 0 <= key < len(flat)}
    entries = {name: value for key, value in numbered.items() if (name := flat[key]) is not None}
    named: dict[str, Any] = {"groups": groups, "state": entries}
    shared = {key: value for key, value in state["state"].items() if key not in numbered}
    extra = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    return named | ({"shared": shared} if shared else {}) | ({"extra": extra} if extra else {})


def number_optimizer_state(named: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """The numbered state for `load_state_dict` from a state by names.

    Args:
        named: a result of `name_optimizer_state`, with its groups in the order of the optimizer.
        names: of the parameters of each group, in the order of the optimizer that will load the state.
    """
    flat = [name for group in names for name in group]
    groups, first = [], 0
    for group, own in zip(named["groups"], names, strict=True):
        groups.append({"params": list(range(first, first + len(own))), **_options(group)})
        first += len(own)
    state = {number: named["state"][name] for number, name in enumerate(flat) if name in named["state"]}
    return {**named.get("extra", {}), "state": {**state, **named.get("shared", {})}, "param_groups": groups}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    # torch 2.13.0 saves parameter names under "param_names" if it got names; they follow the order of "params"
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def depends_on_order(state: Mapping[str, Any], optimizer: Optimizer) -> bool:
    """Whether the entries of a numbered `state` may hold values that depend on the order of the parameters.

    LBFGS does this: it keeps all parameters in one vector, in the entry of the first. So may an optimizer that adds
    items to the state of torch's format. A class outside of torch may keep a vector of some parameters, or an option
    with one item for each parameter of a group.
    """
    sizes = [parameter.numel() for group in optimizer.param_groups for parameter in group["params"]]
    whole = sum(sizes)
    extra = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    if not all(isinstance(value, PLAIN) for value in extra.values()):
        return True
    shared = [value for key, value in state["state"].items() if type(key) is not int]
    if any(not isinstance(value, PLAIN) for value in _leaves(shared)):
        return True
    foreign = not type(optimizer).__module__.startswith("torch.optim.")
    if foreign and any(_is_option_by_parameter(group) for group in state["param_groups"]):
        return True
    return any(
        type(key) is int
        and key < len(sizes)
        and leaf.numel() > max(1, sizes[key])
        and (foreign or leaf.numel() == whole)
        for key, entry in state["state"].items()
        for leaf in _leaves(entry)
        if isinstance(leaf, Tensor)
    )


def _is_option_by_parameter(group: Mapping[str, Any]) -> bool:
    """Whether an option of `group` has an item for each of 3 or more parameters; "betas" always has 2 items."""
    count = len(group["params"])
    return count > 2 and any(
        isinstance(option, list | tuple) and len(option) == count for option in _options(group).values()
    )


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple | deque):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def load_optimizer_state(optimizer: Any, state: Any, written: Sequence[torch.dtype] | None = None) -> None:
    """`optimizer.load_state_dict(state)`, which keeps the types and dtypes of `state`.

    torch 2.13.0 casts the state of a parameter to the dtype of the parameter, and replaces strings, dicts and deques in
    it by other objects. It does not change an entry whose key is a parameter instead of a number. So a pre-hook moves
    the state to its device and stores it under the parameter.

    Args:
        optimizer: the optimizer to load into.
        state: in the form of its `state_dict`. Deferred tensors are read one at a time, unless the optimizer has a
            custom `load_state_dict` or other hooks; these get all values.
        written: the dtype of each parameter when `state` was written, in the order of the groups; by default the
            current dtypes. State with the dtype of its parameter is cast if the parameter has another dtype now.
    """
    if not hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks"):  # Optimizer.__init__ was not called
        optimizer.load_state_dict(materialized(state))
        return
    is_own = type(optimizer).load_state_dict is not Optimizer.load_state_dict or "load_state_dict" in vars(optimizer)
    if is_own or optimizer._optimizer_load_state_dict_pre_hooks:  # these run before our hook
        state = materialized(state)
    handle = optimizer.register_load_state_dict_pre_hook(lambda one, given: _under_parameters(one, given, written))
    try:
        optimizer.load_state_dict(state)
    finally:
        handle.remove()


def _under_parameters(
    optimizer: Optimizer, given: dict[str, Any], written: Sequence[torch.dtype] | None
) -> dict[str, Any]:
    parameters = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    numbers = list(chain.from_iterable(group["params"] for group in given["param_groups"]))
    places = dict(zip(numbers, range(len(parameters)), strict=False))
    state = dict[Any, Any]()
    for key, entry in given["state"].items():
        if key not in places:
            state[key] = entry
            continue
        parameter, group = parameters[places[key]]
        dtype = parameter.dtype if written is None else written[places[key]]

        def move(tensor: Tensor, parameter: Tensor = parameter, dtype: torch.dtype = dtype) -> Tensor:
            if is_sharded(parameter) and not is_sharded(tensor) and tensor.dim() and tensor.shape == parameter.shape:
                tensor = shard_like(tensor, parameter)
            tensor = whole(tensor)
            if inner_tensors(tensor) is not None and not is_sharded(tensor):
                return map_inner(tensor, lambda one: one.to(parameter.device))
            follows = tensor.is_floating_point() and parameter.is_floating_point() and tensor.dtype is dtype
            return tensor.to(parameter.device, parameter.dtype if follows else tensor.dtype)

        state[parameter] = move_tensors(entry, move)
        if isinstance(entry, dict) and isinstance(entry.get("step"), Tensor):
            on_device = group.get("capturable") or group.get("fused")  # torch's rule for the device of `step`
            state[parameter]["step"] = entry["step"].to(parameter.device, torch.float32) if on_device else entry["step"]
    return {**given, "state": state}


def move_tensors(value: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """A copy of `value` and the containers in it, with the result of `move` for each tensor."""
    if isinstance(value, Tensor):
        return move(value)
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = move_tensors(item, move)
        return made
    if isinstance(value, deque):
        return deque((move_tensors(item, move) for item in value), value.maxlen)
    if type(value) in (list, tuple):
        return type(value)(move_tensors(item, move) for item in value)
    return value
