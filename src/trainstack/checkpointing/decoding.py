"""Decoder from a JSON tree with named tensors to a state tree."""

from __future__ import annotations

import base64
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainstack.checkpointing import format
from trainstack.checkpointing.field_types import short
from trainstack.checkpointing.format import BY_BYTES_NAME, SPARSE_LAYOUTS, Json
from trainstack.errors import CheckpointDamagedError


class StateDecoder:
    """Decodes JSON trees; every mention of one stored tensor becomes the same object.

    The tensors of the result are those handed in, not copies; numpy arrays share their memory.

    Args:
        tensors: by the names in the trees.
        outline: `tensors` have no values, so a sparse tensor is given as the dict of its parts.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, outline: bool = False) -> None:
        self._tensors, self._outline = tensors, outline
        self._made: dict[tuple[str, str], Any] = {}
        self._handlers: dict[str, Callable[[dict[str, Json]], Any]] = {
            format.INT: lambda f: int(f["hex"], 16),
            format.FLOAT: lambda f: float(_text(f["value"])),
            format.COMPLEX: lambda f: complex(*self._items(f["parts"])),
            format.BYTES: lambda f: _bytes(f),
            format.BYTEARRAY: lambda f: bytearray(_bytes(f)),
            format.TUPLE: lambda f: tuple(self._items(f["items"])),
            format.SET: lambda f: set(self._hashed(f["items"])),
            format.FROZENSET: lambda f: frozenset(self._hashed(f["items"])),
            format.DEQUE: lambda f: deque(self._items(f["items"]), _length(f["maxlen"])),
            format.DICT: lambda f: dict(self._pairs(f["items"])),
            format.DEFAULTDICT: lambda f: defaultdict(format.FACTORIES[f["factory"]], self._pairs(f["items"])),
            format.COUNTER: lambda f: Counter(dict(self._pairs(f["items"]))),
            format.ORDERED_DICT: self._ordered_dict,
            format.SIZE: lambda f: torch.Size(_shape(f["items"])),
            format.DTYPE: lambda f: format.DTYPES[f["name"]],
            format.DEVICE: lambda f: torch.device(_text(f["name"])),
            format.TENSOR: self._tensor,
            format.SPARSE: self._sparse,
            format.ARRAY: self._array,
            format.NUMPY_SCALAR: lambda f: np.frombuffer(_bytes(f), dtype=_numpy_dtype(f), count=1)[0],
            format.NUMPY_TEXT: lambda f: np.str_(_text(f["value"])),
            format.NUMPY_BYTES: lambda f: np.bytes_(_bytes(f)),
            format.PATH: lambda f: Path(_text(f["value"])),
        }

    def decode(self, tree: Json) -> Any:
        """Return the state tree.

        Raises:
            CheckpointDamagedError: the tree is not one that `StateEncoder` writes.
        """
        self._depth = 0
        try:
            return self._decode(tree)
        except Exception as error:  # the tree may be anybody's, and torch and numpy raise whatever they like
            raise CheckpointDamagedError(
                f"the state tree cannot be decoded ({type(error).__name__}: {str(error)[:300]}). "
                "It was not written by this version of trainstack: load another checkpoint."
            ) from error

    def _decode(self, tree: Json) -> Any:
        if type(tree) not in (list, dict):
            return tree
        if self._depth > 2 * format.MAX_DEPTH:  # tuples in keys count here, and not in the encoder
            raise ValueError(f"it nests deeper than {format.MAX_DEPTH} levels")
        self._depth += 1
        if type(tree) is list:
            made: Any = self._items(tree)
        elif format.KEY in tree:
            made = self._handlers[tree[format.KEY]](tree)
        else:
            made = {key: self._decode(value) for key, value in tree.items()}
        self._depth -= 1
        return made

    def _items(self, trees: list[Json]) -> list[Any]:
        if type(trees) is not list:
            raise ValueError(f"a {type(trees).__name__} stands where a list should")
        return [self._decode(tree) for tree in trees]

    def _hashed(self, trees: list[Json]) -> list[Any]:
        """The items of a set."""
        items = self._items(trees)
        _check_hashes(items)
        return items

    def _pairs(self, pairs: list[list[Json]]) -> list[tuple[Any, Any]]:
        made = [(self._decode(key), self._decode(value)) for key, value in pairs]
        _check_hashes([key for key, _ in made])
        return made

    def _ordered_dict(self, fields: dict[str, Json]) -> OrderedDict[Any, Any]:
        result: OrderedDict[Any, Any] = OrderedDict(self._pairs(fields["items"]))
        if "versions" in fields:
            result._metadata = _versions(self._decode(fields["versions"]))  # type: ignore[attr-defined]
        return result

    def _tensor(self, fields: dict[str, Json]) -> Any:
        tensor = self._tensors[fields["name"]]
        if "dtype" not in fields:
            return tensor
        key = (format.TENSOR, fields["name"])
        if key not in self._made:
            dtype = BY_BYTES_NAME[fields["dtype"]]
            flat = tensor if tensor.dtype == dtype else tensor.reshape(-1).view(dtype)
            self._made[key] = flat.reshape(_shape(fields["shape"]))
        return self._made[key]

    def _sparse(self, fields: dict[str, Json]) -> Any:
        if self._outline:
            return self._decode(fields["parts"])
        layout, shape = format.LAYOUTS[fields["layout"]], torch.Size(_shape(fields["shape"]))
        parts = [self._decode(fields["parts"][name]) for name in SPARSE_LAYOUTS[layout]]
        # indices out of range would make torch read and write memory of others
        if layout is torch.sparse_coo:
            indices, values = parts
            coalesced = fields["coalesced"]
            return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True, is_coalesced=coalesced)
        outer, inner, values = parts
        return torch.sparse_compressed_tensor(outer, inner, values, shape, layout=layout, check_invariants=True)

    def _array(self, fields: dict[str, Json]) -> Any:
        key = (format.ARRAY, fields["name"])
        if key not in self._made:
            array = self._tensors[fields["name"]].numpy()
            dtype = _numpy_dtype(fields)
            if array.dtype != dtype:
                array = array.reshape(-1).view(np.uint8).view(dtype)
            self._made[key] = array.reshape(_shape(fields["shape"]))
        return self._made[key]


def _bytes(fields: dict[str, Json]) -> bytes:
    return base64.b64decode(_text(fields["base64"]), validate=True)


def _text(value: Json) -> str:
    if type(value) is not str:
        raise ValueError(f"a {type(value).__name__} stands where a text should")
    return value


def _shape(value: Json) -> list[int]:
    format.check_shape(value)
    return list(value)


def _length(value: Json) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value <= sys.maxsize):
        raise ValueError(f"maxlen={short(value)} is no length")
    return value


_DTYPE = re.compile(r"[<>|=][biufcSUmM][0-9]{1,9}(\[[0-9a-zA-Z/]{1,20}\])?")


def _numpy_dtype(fields: dict[str, Json]) -> np.dtype[Any]:
    name = _text(fields["dtype"])
    if not _DTYPE.fullmatch(name):
        raise ValueError(f"{short(name)} is no dtype of a stored array")
    return np.dtype(name)


_SAME_HASH = 100
"""How many keys of a dict or items of a set may have one hash. -1 and -2 have one; more come from an attacker."""


def _check_hashes(items: list[Any]) -> None:
    """Refuse items that would make a set or dict compare each of them with each other."""
    if len(items) > _SAME_HASH and not all(type(item) is str for item in items):  # those of texts are random
        most = max(Counter(map(hash, items)).values())
        if most > _SAME_HASH:
            raise ValueError(f"{most:,} keys of a dict or items of a set have the same hash")


def _versions(value: Any) -> Any:
    if not format.are_versions(value):
        raise ValueError("the versions of modules are no dict of dicts")
    return value
