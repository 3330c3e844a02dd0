"""Find the leaves of states that differ between ranks, gather them by rank, and put them back into a state."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from trainstack._tensor_classes import is_sharded
from trainstack.backends import Communicator
from trainstack.checkpointing import format
from trainstack.checkpointing.encoding import StateEncoder, tensor_identity
from trainstack.trainer.core.fingerprints import checksums, hash_text

Place = tuple[Any, ...]
"""The keys that lead to a leaf of a state tree."""
Part = dict[Any, Any] | list[Any]
"""The differing leaves of one rank: a tree of dicts, in which each leaf is a list. The list has the value, or is empty
if the rank has no such leaf."""

_DICTS = (dict, OrderedDict)
_MAX_DEPTH = 64
"""Deeper dicts are leaves, which limits the recursion. No real state is nearly as deep."""


def divide_by_rank(
    comm: Communicator, states: Mapping[str, Any], replicated: Iterable[Tensor], *, everywhere: bool = False
) -> tuple[list[dict[str, Any]] | None, list[Place]]:
    """Find the leaves of `states` whose bits differ between ranks, and gather them.

    All ranks call this together, and get the same places. The items of dicts are compared separately; every other value
    is a leaf.

    Args:
        comm: the communicator of the ranks.
        states: the state trees of this rank, by name.
        replicated: tensors that are equal on all ranks. Leaves that share their memory are omitted.
        everywhere: whether all ranks get the parts of all ranks. By default only rank 0 does.

    Returns:
        the part of each rank (on ranks other than 0, only that of the rank itself), and the places of the leaves; None
        and no places if nothing differs.
    """
    if comm.size == 1:
        return None, []
    known = {tensor_identity(tensor.detach()) for tensor in replicated if not is_sharded(tensor)}
    leaves, order = _Leaves(known), dict[Place, None]()
    leaves.add(states, ())
    texts = leaves.texts()
    hashes = comm.gather(hash_text(repr(texts)), "comparing the states of the ranks")
    if hashes.count(hashes[0]) == comm.size:
        return None, []
    reports = [dict(report) for report in comm.gather(texts, "the leaves of the ranks' states")]
    for report in reports:
        order |= {place: None for place in report if place not in order}
    differing = [place for place in order if len({report.get(place) for report in reports}) > 1]
    places = _outermost(differing, {place for report in reports for place, text in report.items() if text == _OPEN})
    if not places:
        return None, []
    mine: dict[str, Any] = {}
    for place in places:
        _put(mine, place, _leaf(states, place))
    gather = comm.gather if everywhere else comm.gather_to_main
    return gather(mine, "states that differ between ranks"), places


_OPEN = "open dict"
"""Marks a dict that contains replicated tensors. It is never stored as a whole for a rank."""


class _Leaves:
    """Computes a text for each leaf, equal for equal bits. It reads from each device once, for all leaves."""

    def __init__(self, known: set[Any]) -> None:
        self._known = known
        self._texts = dict[Place, str]()
        self._tensors = list[tuple[Place, Tensor]]()

    def add(self, value: Any, place: Place) -> bool:
        """Add the value at `place`. Returns whether it contains a replicated tensor."""
        if type(value) in _DICTS and len(place) < _MAX_DEPTH:
            opened = [self.add(item, (*place, key)) for key, item in value.items()]
            is_open = any(opened)
            # The order of a plain dict may come from a set of strings, which each process iterates in another order.
            keys = list(value) if type(value) is OrderedDict else sorted(value, key=repr)
            self._texts[place] = _OPEN if is_open or not place else f"{type(value).__name__} {keys}"
            return is_open
        if is_sharded(value) or (isinstance(value, Tensor) and tensor_identity(value.detach()) in self._known):
            return True
        encoder = StateEncoder()
        tree = encoder.encode(value, root=".".join(map(str, place)))
        self._texts[place] = f"leaf {hash_text(json.dumps(_sorted(tree), sort_keys=True))}"
        self._tensors += [(place, tensor) for tensor in encoder.pop_tensors().values()]
        return False

    def texts(self) -> list[tuple[Place, str]]:
        sums = checksums(tensor for _, tensor in self._tensors)
        for (place, tensor), bits in zip(self._tensors, sums, strict=True):
            self._texts[place] += f" {tuple(tensor.shape)} {tensor.dtype} {bits:x}"
        return sorted(self._texts.items(), key=repr)


_UNORDERED = (format.SET, format.FROZENSET, format.DICT, format.DEFAULTDICT, format.COUNTER)


def _sorted(tree: Any) -> Any:
    """`tree` of JSON with sorted items of sets and plain dicts."""
    if isinstance(tree, list):
        return [_sorted(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    out = {key: _sorted(item) for key, item in tree.items()}
    if out.get(format.KEY) in _UNORDERED:
        out["items"] = sorted(out["items"], key=json.dumps)
    return out


def _outermost(differing: Sequence[Place], opened: set[Place]) -> list[Place]:
    """The places to store. A dict whose keys differ is stored as a whole, unless it contains replicated tensors."""
    whole = {place for place in differing if place not in opened}
    return [place for place in whole if not any(place[:length] in whole for length in range(len(place)))]


def _leaf(tree: Any, place: Place) -> list[Any]:
    for key in place:
        if not isinstance(tree, Mapping) or key not in tree:
            return []
        tree = tree[key]
    return [tree]


def _put(tree: dict[Any, Any], place: Place, leaf: list[Any]) -> None:
    for key in place[:-1]:
        tree = tree.setdefault(key, {})
    tree[place[-1]] = leaf


def apply_part(tree: Any, part: Part) -> Any:
    """A copy of `tree` with the leaves of `part`. `tree` is not changed."""
    if isinstance(part, list):
        return part[0] if part else None
    out = copy.copy(tree) if isinstance(tree, Mapping) else {}
    assert isinstance(out, dict)
    for key, inner in part.items():
        if isinstance(inner, list) and not inner:
            out.pop(key, None)
        else:
            out[key] = apply_part(out.get(key), inner)
    return out


def places_in(part: Part, place: Place = ()) -> Iterator[Place]:
    """The places of the leaves of `part`."""
    if isinstance(part, list):
        yield place
        return
    for key, inner in part.items():
        yield from places_in(inner, (*place, key))


def describe_place(place: Place) -> str:
    """ "module.noise"."""
    return ".".join(map(str, place))
