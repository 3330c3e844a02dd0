"""`CLASSES` has kinds of trainings that once had a fault, and `PENDING` those with a documented difference.

The battery changes a training of a pending class so that it does not belong to it, and compares the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from tools.differential.case import BETWEEN_STEPS, IN_VALIDATION, Action, Case, consistent
from tools.differential.optimizers import OWN


class Class(NamedTuple):
    """A kind of training.

    Attributes:
        holds: whether a case belongs to the class.
        without: the changes after which it does not.
    """

    holds: Callable[[Case], bool]
    without: Callable[[Case], Mapping[str, Any]]


def acts(*whats: str, at: Iterable[str] | None = None) -> Class:
    """User code does one of `whats`, at the places `at` or anywhere."""
    places = None if at is None else set(at)

    def is_one(action: Action) -> bool:
        return action.what in whats and (places is None or action.where in places)

    return Class(
        lambda case: any(map(is_one, case.actions)),
        lambda case: {"actions": tuple(action for action in case.actions if not is_one(action))},
    )


def _raising(*places: str, when: Callable[[Case], bool] = lambda case: True) -> Class:
    """User code raises at one of `places`."""
    return Class(
        lambda case: case.raises is not None and case.raises[0] in places and when(case), lambda case: {"raises": None}
    )


def _field(name: str, *values: Any, usual: Any = "", when: Callable[[Case], bool] = lambda case: True) -> Class:
    """A field has one of the values."""
    return Class(lambda case: getattr(case, name) in values and when(case), lambda case: {name: usual})


def compared(name: str, when: Callable[[Case], bool]) -> Class:
    """The battery compares `name`, and omits it while the class is pending."""
    return Class(
        lambda case: name not in case.uncompared and when(case), lambda case: {"uncompared": (*case.uncompared, name)}
    )


def _accumulates(case: Case) -> bool:
    return case.accumulation > 1


_WHOLE = {"limit": 512}
_STEP_EVENTS = ("before_optimizer_step", "after_optimizer_step")


def _may_skip(case: Case) -> bool:
    return bool(case.poison) or case.weights == "some are zero"


def _without_own(case: Case) -> dict[str, Any]:
    subscribers = tuple(one for one in case.subscribers if one.event not in _STEP_EVENTS)
    optimizers = tuple("SGD" if name in OWN else name for name in case.optimizers)
    actions = tuple(action for action in case.actions if action.where not in _STEP_EVENTS)
    return {"step_hooks": False, "optimizers": optimizers, "subscribers": subscribers, "actions": actions}


def _assigns(case: Case) -> bool:
    return "new buffer assigned" in case.extras or "assign a new buffer" in case.deeds


def _without_assigned(case: Case) -> dict[str, Any]:
    extras = tuple(name for name in case.extras if name != "new buffer assigned")
    return {"extras": extras, "actions": tuple(one for one in case.actions if one.what != "assign a new buffer")}


def _tries(case: Case) -> bool:
    return case.find_lr or bool(case.arguments.get("fit_micro_batch"))


_WITHIN_STEP = (
    *("train_step", "after forward", "on_end_backward", "batch_weight", "collate"),
    *("train_batch_begin", "before_backward", "after_backward", "before_optimizer_step"),
)

CLASSES: dict[str, Class] = {
    "a view of a one-element parameter": Class(
        lambda case: bool(case.shift) or case.loss_memory == "is a parameter",
        lambda case: {"shift": "", "loss_memory": ""},
    ),
    "a write to the data of gradients": acts("write the data of gradients"),
    "a write to the data of the loss's gradient": _field("loss_memory", "hook on the loss"),
    "parameters that are added within an epoch": acts("add a layer", "add a parameter outside the module"),
    "parameters that are removed within an epoch": acts("remove a layer"),
    "parameters that are removed from the module only": acts("remove a layer from the module alone"),
    "parameters that are replaced": acts("replace a parameter"),
    "parameters that are frozen or unfrozen by hand": acts("freeze", "unfreeze"),
    "batches of weight 0": _field("weights", "some are zero"),
    "memory that batches share": Class(
        lambda case: _accumulates(case) and (case.collate == "recycles" or case.data == "recycling loader"),
        lambda case: _WHOLE,
    ),
    "weights that are known after the last micro-batch": Class(
        lambda case: _accumulates(case) and (bool(case.weights) or not case.ordered), lambda case: _WHOLE
    ),
    "a loss that user code writes to later": _field("loss_memory", "kept by the user", "view of a large tensor"),
    "a validation loss that user code writes to later": _field("val_memory", "one tensor"),
    "a loss that is scaled in a hook": acts("scale the loss"),
    "outputs that user code writes to later": acts("write outputs"),
    "a logged tensor that user code writes to later": acts("log, then write"),
    "workers": _field("workers", True, usual=False),
    "a loader with its own _get_iterator": _field("data", "loader with own _get_iterator", usual="tensors"),
    "a skipped step and an optimizer that counts calls": Class(
        lambda case: (
            _may_skip(case)
            and (
                case.step_hooks
                or bool({*OWN} & {*case.optimizers})
                or any(one.event in _STEP_EVENTS for one in case.subscribers)
            )
        ),
        _without_own,
    ),
    "a skipped step and a new buffer": Class(
        lambda case: case.skip and _may_skip(case) and _assigns(case), _without_assigned
    ),
    "a trial and a new buffer": Class(lambda case: _tries(case) and _assigns(case), _without_assigned),
    "eval() in a hook": acts("call eval"),
    "a part in eval mode": _field("modes", "frozen part", "single layer"),
    "a trainable part in eval mode": _field("modes", "trainable part"),
    "indices of all dtypes": Class(
        lambda case: case.data == "subset" and case.indices in ("int8", "int16", "uint8", "uint16", "uint32", "uint64"),
        lambda case: {"indices": "list"},
    ),
    "batches of similar lengths": _field("data", "length groups", usual="tensors"),
    "a dict of loaders": _field("data", "several loaders", usual="tensors"),
    "channels last": _field("data", "channels last", usual="tensors"),
    "torch's table of functions that collate": _field("collate", "map"),
    "an overridden zero_grad": Class(
        lambda case: "ZeroesItself" in case.optimizers,
        lambda case: {"optimizers": tuple("SGD" if name == "ZeroesItself" else name for name in case.optimizers)},
    ),
    "an overridden backward": _field("loss_memory", "own backward", when=lambda case: not case.skip),
    "an overridden backward where steps may be skipped": _field(
        "loss_memory", "own backward", when=lambda case: case.skip
    ),
    "the logged rates of schedulers": compared(
        "lr", lambda case: bool(case.schedulers) or "change the rate" in case.deeds
    ),
    "the order of loading and training": compared("order of loading", lambda case: case.accumulation > 1),
    "the last step of max_steps without clipping": Class(
        lambda case: case.clipping[0] == "none" and case.max_steps is not None and not case.skip,
        lambda case: {"clipping": ("norm", 1.0)},
    ),
    "no limit of the micro-batch": _field("limit", None, usual=512),
    "an exception in a hook between steps": _raising(*BETWEEN_STEPS, "log", "train_epoch_begin", "train_epoch_end"),
    "an exception within a step": _raising(*_WITHIN_STEP, when=lambda case: not case.leaves_traces),
    "an exception within a step that leaves traces": _raising(*_WITHIN_STEP, when=lambda case: case.leaves_traces),
    "an exception around the update": _raising("after_optimizer_step", "before_zero_grad", "after_zero_grad"),
    "an exception in a validation": _raising(*IN_VALIDATION, "val_step"),
    "an exception at the end of an epoch": _raising("epoch_end"),
}

PENDING: dict[str, str] = {
    "an exception within a step that leaves traces": "docs/stopping.md: the step is repeated",
}
"""Classes that differ from the plain loop, each with the page of the reason."""


def classes_of(case: Case) -> list[str]:
    """The classes of `case`."""
    return [name for name, one in CLASSES.items() if one.holds(case)]


def without(case: Case, names: Iterable[str]) -> Case:
    """`case` with the changes after which it belongs to none of the classes `names`."""
    for name in names:
        if CLASSES[name].holds(case):
            case = replace(case, **CLASSES[name].without(case))
    return consistent(case)
