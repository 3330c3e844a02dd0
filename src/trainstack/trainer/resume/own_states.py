"""`take_own_states` selects the values of a rank in a checkpoint whose states differ between ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trainstack._deferred import DeferredTensor, materialized, whole
from trainstack._tensor_classes import inner_tensors, is_sharded
from trainstack.backends import TrainerBackend
from trainstack.checkpointing import Checkpoint
from trainstack.errors import CheckpointMismatchError
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.module_extras import EXTRAS, without_wrappers
from trainstack.trainer.core.shards import copy_values, fit_shards, has_shards
from trainstack.trainer.core.state_tree import copied
from trainstack.trainer.events import Callback
from trainstack.trainer.events.bus import OWN
from trainstack.trainer.module_interface import ModuleInterface
from trainstack.trainer.resume.rank_states import Part, apply_part, describe_place, divide_by_rank, places_in

MODULE, CALLBACKS, USER, LAYERS = "module", "callbacks", "user_state", "layers"
"""The names in `Checkpoint.rank_states` of the states that may differ between ranks."""
DIFFERING = "differing"
"""The key in `Checkpoint.trainer_state` of the names of the leaves that differ between ranks."""

_Redistribute = Callable[[Sequence[Any], int, int], Any]


def take_own_states(checkpoint: Checkpoint, context: RunContext, wanted: Sequence[str]) -> Checkpoint:
    """`checkpoint` with the values of this rank. All ranks call this together.

    Args:
        checkpoint: the loaded checkpoint, the same on all ranks.
        context: the context of the run.
        wanted: names of the states that the run uses.

    Raises:
        CheckpointMismatchError: the values of the ranks were not stored, or another number of ranks wrote them and no
            `redistribute_state` is defined.
    """
    world, parts = context.world, checkpoint.rank_states
    if parts is None:
        lost = (checkpoint.trainer_state or {}).get(DIFFERING)
        if lost:
            raise CheckpointMismatchError(
                f"these states differ between the ranks: {', '.join(lost)}; and "
                f"{type(context.checkpointer).__name__} has not stored Checkpoint.rank_states. Store all fields of the "
                "checkpoint in its save, and return them in its load."
            )
        return _with_fresh_differences(checkpoint, context, wanted)
    trees = _trees_of(checkpoint)
    if len(parts) == world.size:
        mine = dict(parts[world.rank])
        mine[MODULE], later = _without_buffers(mine.get(MODULE, {}), context)
        made = {name: apply_part(tree, mine.get(name, {})) for name, tree in trees.items()}
        return _with_trees(checkpoint, made, later)
    trees[EXTRAS] = _without_own_extras(trees[EXTRAS], parts, context)
    names = [name for name in wanted if any(part.get(name) for part in parts)]
    everyone = {name: [apply_part(trees[name], part.get(name, {})) for part in parts] for name in names}
    places = {
        describe_place(place) for name in names for part in parts for place in places_in(part.get(name, {}), (name,))
    }
    made, refused = _redistribute(everyone, sorted(places), context)
    if refused:
        raise CheckpointMismatchError(
            f"these states differ between the {len(parts)} ranks that wrote the checkpoint: {', '.join(refused)}; and "
            f"there {'are' if world.size > 1 else 'is'} {world.size} now. Resume on {len(parts)} ranks, or define "
            "redistribute_state(self, states, rank, world_size) in the module or callback that returns them from "
            "get_state."
        )
    buffers = any(_without_buffers(part.get(MODULE, {}), context)[1] for part in parts)
    return _with_trees(checkpoint, {**trees, **made}, [made[MODULE]] if buffers and MODULE in made else {})


def _without_own_extras(extras: Any, parts: Sequence[Mapping[str, Part]], context: RunContext) -> Any:
    """`extras` without the items that differ between the ranks that wrote the checkpoint."""
    places = sorted({place for part in parts for place in places_in(part.get(EXTRAS, {}), ())}, key=repr)
    for *path, key in places:
        removal: Part = {key: []}
        for outer in reversed(path):
            removal = {outer: removal}
        extras = apply_part(extras, removal)
    if places:
        context.log.warning(
            f"{', '.join(str(place[-1]) for place in places)} differ between the {len(parts)} ranks that wrote the "
            f"checkpoint, and are not in state_dict. There are {context.world.size} ranks now, so they keep the "
            "initial values of the module. To divide them, return them from get_state and define redistribute_state."
        )
    return extras


def restore_own_buffers(checkpoint: Checkpoint, context: RunContext) -> None:
    """Restore the buffers that differ between ranks. Call this after the broadcast of the values of rank 0."""
    if checkpoint.rank_states:
        own = apply_part(checkpoint.module_interface_state, checkpoint.rank_states[0][MODULE])
        update_module(context.module, own)


def update_module(module: nn.Module, state: Any) -> None:
    """Call `module.update_state` with a copy of `state`, which the module may keep and write to.

    If only methods of torch load the state, each deferred tensor is first copied into the parameter or buffer of its
    name, one at a time, and `update_state` receives that tensor. User code receives all values at once, and so do the
    quantized and lazy parameters of other libraries.
    """
    update: Any = module.update_state
    if overrides_update_state(module) or type(state) not in (dict, OrderedDict):
        state = copied(state)
        update(fit_shards(state, module.get_state()) if has_shards(module) else state)  # type: ignore[operator]
        return
    module.state_dict()  # shards the parameters of a sharded module again, if an evaluation has gathered them
    names = {without_wrappers(name): one for name, one in module.named_parameters(remove_duplicate=False)}
    targets: dict[str, Tensor] = {}
    if is_loaded_by_torch(module):
        targets = names | {without_wrappers(name): one for name, one in module.named_buffers(remove_duplicate=False)}
    taken = type(state)()
    for name, value in state.items():
        target = targets.get(name)
        if isinstance(value, DeferredTensor) and target is not None and has_memory_for(target, value):
            copy_values(target, value)
            taken[name] = target.detach()
        else:
            taken[name] = whole(value) if name in names else copied(value)
    update(fit_shards(taken, module.get_state()) if has_shards(module) else taken)  # type: ignore[operator]


def has_memory_for(target: Tensor, value: Tensor) -> bool:
    """Whether the values of `value` can be copied into `target`, as `load_state_dict` would."""
    if is_sharded(target):
        return target.shape == value.shape
    is_plain = type(target) in (Tensor, nn.Parameter) and inner_tensors(target.data) is None
    return is_plain and target.shape == value.shape and target.layout is torch.strided and not target.is_meta


def is_loaded_by_torch(module: nn.Module) -> bool:
    """Whether only code of torch receives the argument of `load_state_dict` of `module`."""
    # `_load_from_state_dict` and `_load_state_dict_pre_hooks` are private; checked on torch 2.13.0
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        return False
    return all(
        _is_of_torch(type(part)._load_from_state_dict)
        and all(_is_of_torch(getattr(hook, "hook", hook)) for hook in part._load_state_dict_pre_hooks.values())
        for part in module.modules()
    )


def _is_of_torch(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("torch.")


def overrides_update_state(module: nn.Module) -> bool:
    """Whether the class of `module` overrides `ModuleInterface.update_state`."""
    return getattr(type(module), "update_state", None) is not ModuleInterface.update_state


def _without_buffers(part: Part, context: RunContext) -> tuple[Part, Part]:
    """Split `part` into the leaves that do not have the name of a buffer, and those that do."""
    names = {name for name, _ in context.module.named_buffers()}
    if isinstance(part, list):
        return part, {}
    rest, buffers = dict[Any, Any](), dict[Any, Any]()
    for key, inner in part.items():
        if isinstance(inner, list) and key in names:
            buffers[key] = inner
            continue
        other, found = _without_buffers(inner, context)
        rest[key] = other
        buffers |= {key: found} if found else {}
    return rest, buffers


def comparable(states: Mapping[str, Any], stack: TrainerBackend) -> dict[str, Any]:
    """`states` without the states that only rank 0 saves.

    These are the notes of the trainer on its callbacks, which may depend on the rank, and the `rank_zero_state` of
    layers.
    """
    found = dict(states)
    if CALLBACKS in states:
        found[CALLBACKS] = {key: state for key, state in states[CALLBACKS].items() if key != OWN}
    for layer in stack.layers() if LAYERS in states else ():
        if layer.rank_zero_state and layer.name in states[LAYERS]:
            own = {key: value for key, value in states[LAYERS][layer.name].items() if key not in layer.rank_zero_state}
            found[LAYERS] = {**found[LAYERS], layer.name: own}
    return found


def _trees_of(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        MODULE: checkpoint.module_interface_state,
        CALLBACKS: checkpoint.callback_states,
        USER: (checkpoint.trainer_state or {}).get("user"),
        EXTRAS: (checkpoint.trainer_state or {}).get(EXTRAS),
        LAYERS: checkpoint.trainer_backend_state,
    }


def _with_trees(checkpoint: Checkpoint, trees: Mapping[str, Any], later: Part | None = None) -> Checkpoint:
    """`checkpoint` with other states; `later` is for `restore_own_buffers`."""
    state, own = checkpoint.trainer_state, {"user": trees[USER], EXTRAS: trees[EXTRAS]}
    return replace(
        checkpoint,
        module_interface_state=trees[MODULE],
        callback_states=trees[CALLBACKS],
        trainer_backend_state=trees[LAYERS],
        trainer_state=state and {**state, **{name: tree for name, tree in own.items() if name in state}},
        rank_states=[{MODULE: later}] if later else None,
    )


def _redistribute(
    everyone: Mapping[str, Sequence[Any]], names: Sequence[str], context: RunContext
) -> tuple[dict[str, Any], list[str]]:
    """The redistributed states of this rank, and the names of the leaves without a `redistribute_state`.

    Args:
        everyone: the states of all ranks that wrote the checkpoint, by name.
        names: the names of the leaves that differ.
        context: the context of the run.
    """
    made, left = dict[str, Any](), list(names)
    rank, size = context.world.rank, context.world.size
    divide = _method_of(context.module, ModuleInterface)
    if divide is not None and MODULE in everyone:
        made[MODULE] = divide(materialized(list(everyone[MODULE])), rank, size)
        left = [name for name in left if not name.startswith(f"{MODULE}.")]
    if CALLBACKS in everyone:
        made[CALLBACKS] = dict(everyone[CALLBACKS][0])
        for key, callback in context.events.callbacks.items():
            divide = _method_of(callback, Callback)
            if divide is not None and all(key in states for states in everyone[CALLBACKS]):
                made[CALLBACKS][key] = divide(materialized([one[key] for one in everyone[CALLBACKS]]), rank, size)
                prefix = f"{CALLBACKS}.{key}"
                left = [name for name in left if name != prefix and not name.startswith(f"{prefix}.")]
    return made, left


def _method_of(owner: object, base: type) -> _Redistribute | None:
    """`owner.redistribute_state`, if its class or the object defines it."""
    method: Any = getattr(owner, "redistribute_state", None)
    is_default = getattr(method, "__func__", None) is vars(base)["redistribute_state"]
    return None if is_default or method is None else method


def _with_fresh_differences(checkpoint: Checkpoint, context: RunContext, wanted: Sequence[str]) -> Checkpoint:
    """Find initial states that differ between the ranks, while the checkpoint has one value for all ranks.

    `redistribute_state` is called for them. Without it, there is a warning.
    """
    before = len((checkpoint.rng_state or {}).get("ranks", ())) or context.world.size
    if context.world.size == 1 or before == context.world.size:
        return checkpoint
    try:
        states = {
            MODULE: context.module.get_state(),
            CALLBACKS: context.events.get_state(),
            USER: context.user_state.get_state(),
        }
    except Exception:  # `get_state` may need objects that `update_state` makes
        states = {}
    module, trees = context.module, _trees_of(checkpoint)
    known = (*module.parameters(), *module.buffers())
    _, places = divide_by_rank(
        context.world.comm, comparable({name: states[name] for name in states if name in wanted}, context.stack), known
    )
    if not places:
        return checkpoint
    everyone = {place[0]: [trees[place[0]]] * before for place in places if trees[place[0]] is not None}
    made, left = _redistribute(everyone, sorted(map(describe_place, places)), context)
    if left:
        context.log.warning(
            f"the initial values of these states differ between the ranks: {', '.join(left)}; and the checkpoint, of "
            f"{before} rank{'s' * (before > 1)}, has one value, which all ranks get. To make the value of each rank, "
            "define redistribute_state(self, states, rank, world_size)."
        )
    return _with_trees(checkpoint, {**trees, **made})
