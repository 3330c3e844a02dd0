"""`RANK_CLASSES` has kinds of trainings on several ranks, and `RANK_PENDING` those that differ from `sp`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tools.differential.case import Case
from tools.differential.classes import CLASSES, Class, acts, compared
from tools.differential.datasets import batch_sizes
from tools.differential.networks import PARTLY_USED
from tools.differential.rank_cases import CHANGE_PARAMETERS, CONTIGUOUS_BATCHES

RANDOM = "the random numbers of ranks"
BATCHES = "counter batches"


def _rows(case: Case) -> int:
    """The number of samples of an epoch."""
    return sum(index % 4 > 0 for index in range(case.samples)) if case.data == "subset" else case.samples


def lacks_samples(case: Case) -> bool:
    """Whether ranks have different numbers of samples or of passes in some step."""
    if case.ordered:
        return not case.drop_last and _rows(case) % case.batch > 0
    if case.data in CONTIGUOUS_BATCHES:
        batches = len(batch_sizes(case.samples))
    else:
        batches = case.samples // case.micro_batch if case.drop_last else -(-case.samples // case.micro_batch)
    return batches % (case.ranks * case.accumulation) > 0


def _even(case: Case) -> dict[str, Any]:
    return {"data": "tensors" if case.data == "subset" or not case.ordered else case.data, "samples": 2 * case.batch}


_DRAWING = ("batch sampler", "sampler", "loader with own __iter__", "loader with own _get_iterator")

RANK_CLASSES: dict[str, Class] = {
    RANDOM: compared(RANDOM, lambda case: True),
    "a step in which ranks have different numbers of passes": Class(lacks_samples, _even),
    "parameters that not every step uses": Class(
        lambda case: bool({*PARTLY_USED} & {*case.extras}),
        lambda case: {"extras": tuple(name for name in case.extras if name not in PARTLY_USED)},
    ),
    "parameters that are changed by hand": acts(*CHANGE_PARAMETERS),
    "a layer that is added": acts("add a layer"),
    **{name: CLASSES[name] for name in ("batches of similar lengths", "a dict of loaders")},
    "sparse gradients": Class(lambda case: case.sparse, lambda case: {"sparse": False}),
    "a loader that draws its order, on ranks with different generators": Class(
        lambda case: case.data in _DRAWING and case.unlike_start, lambda case: {"unlike_start": False}
    ),
    "a loss that leaves outputs unused": Class(
        lambda case: case.loss_memory == "is a parameter", lambda case: {"loss_memory": ""}
    ),
    "a sparse layer that is frozen": Class(
        lambda case: case.sparse and "freeze" in case.deeds,
        lambda case: {"sparse": False},
    ),
    BATCHES: compared(BATCHES, lambda case: not case.ordered),
    "outputs of a validation": Class(
        lambda case: bool(case.val) and case.returns != "loss" and dict(case.hooks).get("on_end_val_epoch") == "star",
        lambda case: {"hooks": tuple(one for one in case.hooks if one[0] != "on_end_val_epoch")},
    ),
    "outputs of an epoch": Class(
        lambda case: case.returns != "loss" and dict(case.hooks).get("on_end_train_epoch") == "star",
        lambda case: {"hooks": tuple(one for one in case.hooks if one[0] != "on_end_train_epoch")},
    ),
    "a loader with its own order": Class(
        lambda case: not case.ordered, lambda case: {"data": "tensors", "samples": 2 * case.batch}
    ),
}
RANK_PENDING: dict[str, str] = {}
"""Classes that differ, each with the reason."""


def rank_classes_of(case: Case) -> list[str]:
    """The classes of `case`."""
    return [name for name, one in RANK_CLASSES.items() if one.holds(case)]


def without_rank_classes(case: Case, names: Iterable[str]) -> Case:
    """`case` with the changes after which it belongs to none of the classes `names`."""
    for name in names:
        if RANK_CLASSES[name].holds(case):
            case = replace(case, **RANK_CLASSES[name].without(case))
    return case
