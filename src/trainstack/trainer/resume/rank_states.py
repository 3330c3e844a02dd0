"""States that differ between ranks: which leaves do, the part of each rank, and the way back."""

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
"""The leaves of one rank that differ: a tree of dicts, in which each leaf is a list. The list
holds the value, or nothing where the rank has no such leaf."""

_DICTS = (dict, OrderedDict)
_MAX_DEPTH = 64


def divide_by_rank(
    comm: Communicator, states: Mapping[str, Any], replicated: Iterable[Tensor], *, everywhere: bool = False
) -> tuple[list[dict[str, Any]] | None, list[Place]]:
    """Find the leaves of `states` that are not the same bits on all ranks, and bring them together.

    All ranks call it, and all get the same places. Dicts are gone through, everything else is a leaf.

    Args:
        comm: of the ranks.
        states: the state trees of this rank, by name.
        replicated: tensors that are known to be the same on all ranks; leaves that are these very tensors are left out.
        everywhere: whether all ranks get the parts of all, in place of rank 0 alone.

    Returns:
        The part of each rank, on others than rank 0 their own alone, and the places of the leaves; None and no places
        where nothing differs.
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
"""Marks a dict with replicated tensors in it, which is never stored whole for a rank."""


class _Leaves:
    """Texts that are equal where the bits of leaves are; values are read from a device once, for all of them."""

    def __init__(self, known: set[Any]) -> None:
        self._known = known
        self._texts = dict[Place, str]()
        self._tensors = list[tuple[Place, Tensor]]()

    def add(self, value: Any, place: Place) -> bool:
        """Add the value at `place`; returns whether a replicated tensor was in it."""
        if type(value) in _DICTS and len(place) < _MAX_DEPTH:
            opened = [self.add(item, (*place, key)) for key, item in value.items()]
            is_open = any(opened)
            # A plain dict may come from a set of texts, whose order is another one in each process.
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
    """`tree` of JSON with the items of sets and plain dicts in one order."""
    if isinstance(tree, list):
        return [_sorted(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    out = {key: _sorted(item) for key, item in tree.items()}
    if out.get(format.KEY) in _UNORDERED:
        out["items"] = sorted(out["items"], key=json.dumps)
    return out


def _outermost(differing: Sequence[Place], opened: set[Place]) -> list[Place]:
    """The places that are stored: a dict whose keys differ as a whole, unless it is to be gone through."""
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
    """`tree` with the leaves of `part` in it; `tree` itself stays as it is."""
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
