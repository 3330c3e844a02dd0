"""Decoder from a JSON tree with named tensors to a state tree."""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainstack.checkpointing import format
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
            format.FLOAT: lambda f: float(f["value"]),
            format.COMPLEX: lambda f: complex(*self._items(f["parts"])),
            format.BYTES: lambda f: base64.b64decode(f["base64"]),
            format.BYTEARRAY: lambda f: bytearray(base64.b64decode(f["base64"])),
            format.TUPLE: lambda f: tuple(self._items(f["items"])),
            format.SET: lambda f: set(self._items(f["items"])),
            format.FROZENSET: lambda f: frozenset(self._items(f["items"])),
            format.DEQUE: lambda f: deque(self._items(f["items"]), f["maxlen"]),
            format.DICT: lambda f: dict(self._pairs(f["items"])),
            format.DEFAULTDICT: lambda f: defaultdict(format.FACTORIES[f["factory"]], self._pairs(f["items"])),
            format.COUNTER: lambda f: Counter(dict(self._pairs(f["items"]))),
            format.ORDERED_DICT: self._ordered_dict,
            format.SIZE: lambda f: torch.Size(f["items"]),
            format.DTYPE: lambda f: _dtype(f["name"]),
            format.DEVICE: lambda f: torch.device(f["name"]),
            format.TENSOR: self._tensor,
            format.SPARSE: self._sparse,
            format.ARRAY: self._array,
            format.NUMPY_SCALAR: lambda f: np.frombuffer(base64.b64decode(f["base64"]), dtype=_numpy_dtype(f))[0],
            format.NUMPY_TEXT: lambda f: np.str_(f["value"]),
            format.NUMPY_BYTES: lambda f: np.bytes_(base64.b64decode(f["base64"])),
            format.PATH: lambda f: Path(f["value"]),
        }

    def decode(self, tree: Json) -> Any:
        """Return the state tree.

        Raises:
            CheckpointDamagedError: the tree is not one that `StateEncoder` writes.
        """
        try:
            return self._decode(tree)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, RecursionError) as error:
            raise CheckpointDamagedError(
                f"the state tree cannot be decoded ({type(error).__name__}: {error}). "
                "It was not written by this version of trainstack: load another checkpoint."
            ) from error

    def _decode(self, tree: Json) -> Any:
        if type(tree) is list:
            return self._items(tree)
        if type(tree) is not dict:
            return tree
        if format.KEY in tree:
            return self._handlers[tree[format.KEY]](tree)
        return {key: self._decode(value) for key, value in tree.items()}

    def _items(self, trees: list[Json]) -> list[Any]:
        return [self._decode(tree) for tree in trees]

    def _pairs(self, pairs: list[list[Json]]) -> list[tuple[Any, Any]]:
        return [(self._decode(key), self._decode(value)) for key, value in pairs]

    def _ordered_dict(self, fields: dict[str, Json]) -> OrderedDict[Any, Any]:
        result: OrderedDict[Any, Any] = OrderedDict(self._pairs(fields["items"]))
        if "versions" in fields:
            result._metadata = self._decode(fields["versions"])  # type: ignore[attr-defined]
        return result

    def _tensor(self, fields: dict[str, Json]) -> Any:
        tensor = self._tensors[fields["name"]]
        if "dtype" not in fields:
            return tensor
        key = (format.TENSOR, fields["name"])
        if key not in self._made:
            dtype = BY_BYTES_NAME[fields["dtype"]]
            flat = tensor if tensor.dtype == dtype else tensor.reshape(-1).view(dtype)
            self._made[key] = flat.reshape(fields["shape"])
        return self._made[key]

    def _sparse(self, fields: dict[str, Json]) -> Any:
        if self._outline:
            return self._decode(fields["parts"])
        layout, shape = getattr(torch, fields["layout"]), torch.Size(fields["shape"])
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
            self._made[key] = array.reshape(fields["shape"])
        return self._made[key]


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch.{name} is not a dtype")
    return dtype


def _numpy_dtype(fields: dict[str, Json]) -> np.dtype[Any]:
    dtype = np.dtype(fields["dtype"])
    if dtype.hasobject:
        raise ValueError(f"{dtype} would hold Python objects")
    return dtype
