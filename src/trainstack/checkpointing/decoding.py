"""Decoder from a JSON tree with named tensors to a state tree."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch

from trainstack._deferred import materialized
from trainstack._tensor_classes import join_inner, registered_class
from trainstack.checkpointing import format
from trainstack.checkpointing.encoding import BY_BYTES_NAME, DTYPES, LAYOUTS, SPARSE_LAYOUTS
from trainstack.checkpointing.field_types import short
from trainstack.checkpointing.format import Json, PlainDecoder, bytes_of, text_of


class StateDecoder(PlainDecoder):
    """Decodes JSON trees of states. Every reference to one stored tensor becomes the same object.

    The result contains the tensors that were passed, not copies; numpy arrays share their memory. Deferred tensors are
    read if they are parts of an object of several tensors, or of one that is not a dict, list or tuple.

    Args:
        tensors: by the names in the trees.
        outline: `tensors` have no values, so a sparse tensor is returned as the dict of its parts.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, outline: bool = False) -> None:
        super().__init__()
        self._tensors, self._outline = tensors, outline
        self._made: dict[tuple[str, str], Any] = {}
        self._handlers |= {
            format.SIZE: lambda f: torch.Size(_shape(f["items"])),
            format.DTYPE: lambda f: DTYPES[f["name"]],
            format.DEVICE: lambda f: torch.device(text_of(f["name"])),
            format.TENSOR: self._tensor,
            format.SPARSE: self._sparse,
            format.SUBCLASS: self._subclass,
            format.ENUM: lambda f: _registered(f, Enum)[text_of(f["member"])],
            format.DATACLASS: lambda f: _registered(f, object)(**materialized(self._decode(f["fields"]))),
            format.ARRAY: self._array,
            format.NUMPY_SCALAR: lambda f: np.frombuffer(bytes_of(f), dtype=_numpy_dtype(f), count=1)[0],
            format.NUMPY_TEXT: lambda f: np.str_(text_of(f["value"])),
            format.NUMPY_BYTES: lambda f: np.bytes_(bytes_of(f)),
        }

    def _tensor(self, fields: dict[str, Json]) -> Any:
        tensor = self._tensors[fields["name"]]
        if "dtype" not in fields:
            return tensor
        key = (format.TENSOR, fields["name"])
        if key not in self._made:
            dtype = BY_BYTES_NAME[fields["dtype"]]
            if self._outline:
                return torch.zeros((), dtype=dtype).expand(_shape(fields["shape"]))
            flat = tensor if tensor.dtype == dtype else tensor.reshape(-1).view(dtype)
            self._made[key] = flat.reshape(_shape(fields["shape"]))
        return self._made[key]

    def _sparse(self, fields: dict[str, Json]) -> Any:
        if self._outline:
            return self._decode(fields["parts"])
        layout, shape = LAYOUTS[fields["layout"]], torch.Size(_shape(fields["shape"]))
        parts = materialized([self._decode(fields["parts"][name]) for name in SPARSE_LAYOUTS[layout]])
        # indices out of range would make torch read and write memory outside the tensor
        if layout is torch.sparse_coo:
            indices, values = parts
            coalesced = fields["coalesced"]
            return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True, is_coalesced=coalesced)
        outer, inner, values = parts
        return torch.sparse_compressed_tensor(outer, inner, values, shape, layout=layout, check_invariants=True)

    def _subclass(self, fields: dict[str, Json]) -> Any:
        inner = materialized(self._decode(fields["inner"]))
        if self._outline:
            return inner
        cls, layout = _registered(fields, torch.Tensor), _Layout(_shape(fields["shape"]), _shape(fields["stride"]))
        return join_inner(cls, inner, self._decode(fields["attributes"]), layout)

    def _array(self, fields: dict[str, Json]) -> Any:
        key = (format.ARRAY, fields["name"])
        if key not in self._made:
            array = self._tensors[fields["name"]].numpy()
            dtype = _numpy_dtype(fields)
            if array.dtype != dtype:
                array = array.reshape(-1).view(np.uint8).view(dtype)
            self._made[key] = array.reshape(_shape(fields["shape"]))
        return self._made[key]


class _Layout:
    """The properties of the outer tensor that `__tensor_unflatten__` gets."""

    def __init__(self, size: list[int], stride: list[int]) -> None:
        self.size, self.stride = lambda: torch.Size(size), lambda: tuple(stride)


def _registered(fields: dict[str, Json], base: type) -> Any:
    cls = registered_class(text_of(fields["name"]))
    if not issubclass(cls, base):
        raise ValueError(f"{short(cls.__name__)} is not a {base.__name__}")
    return cls


def _shape(value: Json) -> list[int]:
    format.check_shape(value)
    return list(value)


_DTYPE = re.compile(r"[<>|=][biufcSUmM][0-9]{1,9}(\[[0-9a-zA-Z/]{1,20}\])?")


def _numpy_dtype(fields: dict[str, Json]) -> np.dtype[Any]:
    name = text_of(fields["dtype"])
    if not _DTYPE.fullmatch(name):
        raise ValueError(f"{short(name)} is not the dtype of a stored array")
    return np.dtype(name)
