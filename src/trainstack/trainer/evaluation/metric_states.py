"""`MergedMetrics` merges the states of metrics of torchmetrics that each rank has updated with its part.

Only states whose merge gives the same bits as one process are merged: sums of integers, maxima, minima, and lists,
which are concatenated in data set order. A sum of floats depends on the order of its terms.
"""

from __future__ import annotations

import hashlib
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainstack.backends import Communicator
from trainstack.backends.generator_search import is_of_user
from trainstack.trainer.core.state_tree import copied, same

# torchmetrics 1.9.0: the functions behind dist_reduce_fx, by name
_KINDS = {"dim_zero_sum": "sum", "dim_zero_max": "max", "dim_zero_min": "min", "dim_zero_cat": "cat"}
_PLAIN = (str, int, float, list, tuple, dict, set, frozenset, deque, Tensor, np.ndarray, Enum, type(None))
_OF_EACH_UPDATE = {"_update_count", "_computed"}


def kinds_of_states(metric: Any) -> dict[str, str] | None:
    """The reduction of each state of `metric`; None if the merge would not give the same bits as one process.

    torchmetrics declares the reductions. A metric that contains other metrics is not merged, nor one with an object of
    a class of the user, because an update could change the content of the object.
    """
    library = sys.modules.get("torchmetrics")
    base = getattr(library, "Metric", None)
    if base is None or not isinstance(metric, base) or any(isinstance(one, base) for one in list(metric.modules())[1:]):
        return None
    kinds = dict[str, str]()
    for name, reduction in metric._reductions.items():  # torchmetrics 1.9.0: private, as is `_defaults`
        kind, state = _KINDS.get(getattr(reduction, "__name__", "")), metric._defaults[name]
        exact = isinstance(state, Tensor) and (kind in ("max", "min") or (kind == "sum" and _is_whole(state)))
        if kind is None or not (exact or (kind == "cat" and isinstance(state, list))):
            return None
        kinds[name] = kind
    if any(is_of_user(type(value)) and not _is_plain(value) for _, value in _attributes(metric, kinds)):
        return None
    return kinds or None


class MergedMetrics:
    """The metrics of one pass whose states can be merged.

    Args:
        metrics: all metrics of the pass, after `reset`.
        used: whether ranks evaluate parts. If not, no metric is merged.
    """

    def __init__(self, metrics: Mapping[str, Any], *, used: bool) -> None:
        kinds = {name: kinds_of_states(metric) for name, metric in metrics.items()} if used else {}
        self._kinds = {name: found for name, found in kinds.items() if found is not None}
        self._metrics = {name: metrics[name] for name in self._kinds}
        self._before = {
            name: {
                key: copied(value) if _is_plain(value) else value
                for key, value in _attributes(metric, self._kinds[name])
            }
            for name, metric in self._metrics.items()
        }

    @property
    def names(self) -> list[str]:
        """The names of the metrics that each rank updates after each of its batches."""
        return list(self._metrics)

    def merge(self, comm: Communicator, updates: int) -> tuple[set[str], int]:
        """Merge the states of all ranks in every metric. All ranks call this together.

        A metric is not merged if an update has changed an attribute that is not a state, or if the states of the ranks
        have different shapes or types. It is then reset, and must be updated with the inputs of all ranks.

        Args:
            comm: the communicator.
            updates: the number of updates of each metric on this rank.

        Returns:
            the names of the merged metrics, and the number of updates on all ranks.
        """
        facts = [fact for name in self._metrics for fact in self._facts(name)]
        (agreed,) = comm.merge_tensors([torch.tensor(facts, dtype=torch.int64)], ["max"], "the states of metrics")
        rows = agreed.view(-1, 3).tolist()  # the three facts of each metric
        merged = [
            name for name, (bad, one, other) in zip(self._metrics, rows, strict=True) if not bad and one == -other
        ]
        places = [(name, state, kind) for name in merged for state, kind in self._kinds[name].items()]
        tensors = [place for place in places if place[2] != "cat"]
        values = [getattr(self._metrics[name], state).detach().cpu() for name, state, _ in tensors]
        found = comm.merge_tensors(values, [kind for *_, kind in tensors], "the states of metrics") if tensors else []
        for (name, state, _), value in zip(tensors, found, strict=True):
            self._set(name, state, value)
        self._join_lists(comm, [(name, state) for name, state, kind in places if kind == "cat"])
        total = int(comm.sum([float(updates)], "the updates of metrics")[0])
        for name, metric in self._metrics.items():
            if name not in merged:
                metric.reset()
                self._undo(name)
                continue
            metric._update_count, metric._computed = total, None  # private, checked on torchmetrics 1.9.0
        return set(merged), total

    def _undo(self, name: str) -> None:
        """Restore the attributes from before the first update, which `reset` may not restore."""
        attributes, before = vars(self._metrics[name]), self._before[name]
        for key in dict(_attributes(self._metrics[name], self._kinds[name])).keys() - before.keys():
            del attributes[key]
        attributes.update(before)

    def _join_lists(self, comm: Communicator, places: Sequence[tuple[str, str]]) -> None:
        if not places:
            return
        mine = [[one.detach().cpu() for one in getattr(self._metrics[name], state)] for name, state in places]
        everyone = zip(*comm.gather(mine, "the lists of metrics"), strict=True)
        for (name, state), by_rank in zip(places, everyone, strict=True):
            self._set(name, state, [one for part in by_rank for one in part])

    def _set(self, name: str, state: str, value: Any) -> None:
        metric = self._metrics[name]
        at = metric.device
        setattr(metric, state, [one.to(at) for one in value] if isinstance(value, list) else value.to(at))

    def _facts(self, name: str) -> tuple[int, int, int]:
        """Whether a metric must not be merged, and a hash of the forms of its states, positive and negated.

        The hashes of all ranks are equal if the maxima of the two agree.
        """
        metric, kinds = self._metrics[name], self._kinds[name]
        looks, bad = list[str](), not _are_same(dict(_attributes(metric, kinds)), self._before[name])
        for state, kind in kinds.items():
            value = getattr(metric, state)
            if kind == "cat":
                bad = bad or not (isinstance(value, list) and all(isinstance(one, Tensor) for one in value))
                continue
            bad = bad or not isinstance(value, Tensor) or (kind == "sum" and not _is_whole(value))
            looks.append(f"{state} {getattr(value, 'shape', None)} {getattr(value, 'dtype', None)}")
        digest = hashlib.blake2b("\n".join(looks).encode(), digest_size=7).digest()  # 56 bits fit into an int64
        number = int.from_bytes(digest, "little")
        return int(bad), number, -number


def _is_whole(state: Tensor) -> bool:
    return not (state.is_floating_point() or state.is_complex() or state.dtype is torch.bool)


def _attributes(metric: Any, states: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """The attributes other than states, which an update may change."""
    apart = {*states, *_OF_EACH_UPDATE, *vars(nn.Module()), "_defaults", "_reductions", "_persistent"}
    return ((name, value) for name, value in vars(metric).items() if name not in apart)


def _are_same(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether no attribute has changed since copies of the plain ones were made."""
    return now.keys() == before.keys() and all(
        same(value, before[key]) if _is_plain(value) else value is before[key] for key, value in now.items()
    )


def _is_plain(value: Any) -> bool:
    """Whether a change of the content shows in a comparison with a copy."""
    return isinstance(value, _PLAIN)
