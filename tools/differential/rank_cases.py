"""`draw_for_ranks` returns the random training with a given seed and number on several ranks under `ddp` or `fsdp`.

Most of them have to equal the same training under `sp`. In the others, only the ranks are compared with each other, for
the reasons of `depends_on_split`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tools.differential.case import TAKE_OUTPUTS, Action, Case, Dice, consistent, draw
from tools.differential.networks import PARTLY_USED

SIZES = (2, 3)
ROLE = 16
"""Distinguishes the generator for choices of ranks from that for the training."""

IN_MICRO_BATCH = (
    *("train_step", "after forward", "on_end_backward", "collate", "batch_weight", "val_step"),
    *("train_batch_begin", "before_backward", "after_backward"),
)
"""Places where user code is called for each micro-batch: the number of calls depends on the split of a step."""
CHANGE_PARAMETERS = {
    *("add a layer", "remove a layer", "remove a layer from the module alone", "replace a parameter"),
    *("add a parameter outside the module", "freeze", "unfreeze"),
}
CHANGE_MEMBERS = CHANGE_PARAMETERS - {"freeze", "unfreeze"}
REFUSED_BY_FSDP = ("scalar", "complex", "Rprop", "Adafactor", "Muon")
CONTIGUOUS_BATCHES = ("list of batches", "batch sampler", "own loader", "recycling loader")

DRAWS = {"dropout", "noise", "recomputed"}
REASONS: dict[str, Callable[[Case], bool]] = {
    "batch statistics": lambda case: bool(
        {"batch norm", "buffer written in place", "new buffer assigned"} & {*case.extras}
    ),
    "numbers that a forward pass draws": lambda case: bool(DRAWS & {*case.extras}) or case.modes == "trainable part",
    "a state that is carried from batch to batch": lambda case: "carried state" in case.extras,
    "a decision over a batch": lambda case: "sometimes unused" in case.extras,
    "bfloat16": lambda case: "a part in bfloat16" in case.extras,
    # torch 2.13.0: the indices of a sparse gradient are the memory of the batch.
    "sparse gradients of a batch whose memory is used again": lambda case: (
        case.sparse and (case.collate == "recycles" or case.data == "recycling loader")
    ),
    # torch 2.13.0: DistributedDataParallel raises.
    "a sparse layer that the loss does not use": lambda case: case.sparse and case.loss_memory == "is a parameter",
    "a sample of weight 0 that is the only one to use a layer": lambda case: (
        "experts" in case.extras and case.weights == "some are zero"
    ),
    "one power iteration for each forward pass": lambda case: "spectral norm" in case.extras and not one_pass(case),
}
"""Reasons why a training depends on the split of its batches, each with a test of a case."""


def depends_on_split(case: Case) -> list[str]:
    """The reasons why the case cannot equal `sp`; empty if it has to."""
    return [reason for reason, holds in REASONS.items() if holds(case)]


def one_pass(case: Case) -> bool:
    """Whether a step is one forward pass, under `sp` and on each rank."""
    return case.ordered and (case.limit is None or case.limit >= case.batch)


def on_one_rank(case: Case) -> Case:
    """The training of the case under `sp`."""
    return replace(case, ranks=0, rank_backend="ddp", options={}, unlike_start=False, poisoned=None)


def draw_for_ranks(seed: int, number: int, size: int, backend: str = "ddp") -> Case:
    """The case `number` of `seed` on `size` ranks; backends that support the training have the same."""
    dice = Dice(seed, number, size, ROLE)
    case = draw(seed, number)
    case = replace(case, additive=True, double=True, workers=False, poison=case.poison if case.skip else ())
    for draw_part in (_split, _network, _arguments, _failure):
        case = replace(case, **draw_part(dice, case, size))
    case = consistent(case)
    if not dice.chance(0.1):
        case = _without_reasons(case)
    case = replace(case, **_places(case))
    case = replace(consistent(case), ranks=size, rank_backend=backend, options=_options(dice, case))
    return _sharded(case) if backend == "fsdp" else case


def _sharded(case: Case) -> Case:
    """The case without parts that `fsdp` refuses, as other tests show."""
    options = {name: on for name, on in case.options.items() if name == "find_unused_parameters"}
    kept = tuple(name for name in case.extras if name not in REFUSED_BY_FSDP)
    actions = tuple(one for one in case.actions if one.what not in CHANGE_MEMBERS)
    optimizers = tuple("SGD" if name in REFUSED_BY_FSDP else name for name in case.optimizers)
    memory = "" if case.loss_memory == "is a parameter" else case.loss_memory
    return consistent(
        replace(
            case,
            sparse=False,
            extras=kept,
            actions=actions,
            optimizers=optimizers,
            loss_memory=memory,
            options=options,
        )
    )


def _split(dice: Dice, case: Case, size: int) -> dict[str, Any]:
    """Batches that ranks can divide; of a loader with its own batches, one rank takes those of `size` ranks."""
    if case.ordered:
        return {
            "samples": dice.one(2 if case.data == "subset" else 1, 2, 4, 5, 7, 8, 10, 11, 12, 13),
            "batch": size * dice.one(1, 1, 2, 2, 3, 4),
            "limit": dice.one(512, 512, None, 1, 2, 3),
        }
    limit, passes = dice.one(1, 2, 2), dice.one(1, 1, 2)
    return {"batch": size * limit * passes, "limit": limit}


def _network(dice: Dice, case: Case, size: int) -> dict[str, Any]:
    extras = (*case.extras, *dice.some(0.15, PARTLY_USED))
    sparse = case.network == "tokens" and dice.chance(0.4)
    optimizers = tuple("SGD" if name != "Adagrad" else name for name in case.optimizers) if sparse else case.optimizers
    reduction = "sum" if not (case.shift or case.weights) and dice.chance(0.15) else ""
    memory = "" if reduction and case.loss_memory == "is a parameter" else case.loss_memory
    hooks = dict(dict.fromkeys(dice.some(0.3, TAKE_OUTPUTS), "star"), **dict(case.hooks))
    return {
        "hooks": tuple(hooks.items()),
        "extras": extras,
        "sparse": sparse,
        "optimizers": optimizers,
        "clipping": ("none", 0.0) if sparse else case.clipping,
        "reduction": reduction,
        "loss_memory": memory,
        "poison": () if case.weights else case.poison,
        "poisoned": dice.one(None, 0) if case.poison else None,
    }


def _arguments(dice: Dice, case: Case, size: int) -> dict[str, Any]:
    omitted = ("fit_micro_batch", "max_val_steps_per_epoch")  # they count batches of a rank
    kept = {name: value for name, value in case.arguments.items() if name not in omitted}
    return {"arguments": kept, "unlike_start": dice.chance(0.15)}


def _failure(dice: Dice, case: Case, size: int) -> dict[str, Any]:
    raises = case.raises if dice.chance(0.5) else None  # replacing failed ranks takes time
    return {"raises": raises, "raises_on": dice.one(*range(size))}


def _without_reasons(case: Case) -> Case:
    extras = tuple(name for name in case.extras if not depends_on_split(replace(case, extras=(name,), modes="")))
    modes = "" if case.modes == "trainable part" else case.modes
    case = replace(case, extras=extras, modes=modes)
    return replace(case, sparse=case.sparse and not depends_on_split(case))


def _places(case: Case) -> dict[str, Any]:
    """Remove counts of calls in a micro-batch from steps that can have several passes."""
    if one_pass(case):
        actions = tuple(one for one in case.actions if one.where != "val_step")
        return {"actions": actions}
    actions = tuple(_moved(one) for one in case.actions)
    subscribers = tuple(
        one._replace(every=None, once=None) if one.event in IN_MICRO_BATCH else one for one in case.subscribers
    )
    return {"actions": tuple(one for one in actions if one is not None), "subscribers": subscribers}


def _moved(action: Action) -> Action | None:
    """The action at a place that is called once in a step; None if there is none."""
    if action.where not in IN_MICRO_BATCH:
        return action
    if "gradients" in action.what:
        return action._replace(where="before_optimizer_step", what="write gradients")
    if action.what in CHANGE_PARAMETERS:
        return action._replace(where="on_end_train_step")
    return None


def _options(dice: Dice, case: Case) -> dict[str, Any]:
    """Options of `DistributedDataParallel`."""
    partly = {*PARTLY_USED, "sometimes unused"} & {*case.extras} or case.loss_memory == "is a parameter"
    # A static graph needs equal steps, and torch does not find tensors in a dataclass.
    static = one_pass(case) and not (case.weights or case.poison or case.find_lr or CHANGE_PARAMETERS & case.deeds)
    options: dict[str, Any] = {}
    if partly or dice.chance(0.2):
        options["find_unused_parameters"] = True
    elif static and case.returns != "dataclass" and dice.chance(0.2):
        options["static_graph"] = True
    if dice.chance(0.3) and not case.sparse:
        options["gradient_as_bucket_view"] = True
    if dice.chance(0.4):
        options["bucket_cap_mb"] = 0.0003  # about one bucket for each layer
    return options
