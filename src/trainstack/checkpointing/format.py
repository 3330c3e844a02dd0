"""Tags and dtypes of the checkpoint format.

A value that JSON lacks is an object `{"$type": <tag>, ...}`. A user's own dict that has the key
`"$type"` is written as the tag `DICT`, with its items in a list, so nothing can be mistaken.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch

Json = Any
"""A tree of dicts with string keys, lists, strings, finite numbers, booleans and None."""

KEY = "$type"

INT = "int"
FLOAT = "float"
COMPLEX = "complex"
BYTES = "bytes"
BYTEARRAY = "bytearray"
TUPLE = "tuple"
SET = "set"
FROZENSET = "frozenset"
DEQUE = "deque"
DICT = "dict"
DEFAULTDICT = "defaultdict"
ORDERED_DICT = "OrderedDict"
COUNTER = "Counter"
SIZE = "torch.Size"
DTYPE = "torch.dtype"
DEVICE = "torch.device"
TENSOR = "tensor"
SPARSE = "sparse tensor"
ARRAY = "ndarray"
NUMPY_SCALAR = "numpy"
NUMPY_TEXT = "numpy.str"
NUMPY_BYTES = "numpy.bytes"
PATH = "path"

SPARSE_LAYOUTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""The methods of a sparse tensor that give its parts. Those of `sparse_coo` work on uncoalesced tensors as well."""

_KINDS = (bool, int, float, str, list, tuple, dict, set, Counter, deque)
FACTORIES: dict[str | None, Callable[[], Any] | None] = {None: None, **{kind.__name__: kind for kind in _KINDS}}
"""What the `default_factory` of a defaultdict may be, by the name that stands for it."""

MAX_DEPTH = 128
"""How deep a state may nest; deeper ones would exhaust the stack of a JSON parser."""

MAX_DIMENSIONS = 64
"""How many dimensions a tensor may have; torch computes with no more."""

NATIVE: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
"""dtypes that safetensors knows, with their names in its header."""

AS_BYTES: dict[torch.dtype, str] = {
    getattr(torch, name): name
    for name in ("complex128", "complex32", "float8_e8m0fnu", "float4_e2m1fn_x2")
    if hasattr(torch, name)
}
"""dtypes stored as a flat row of bytes; the JSON tree remembers dtype and shape."""

BY_NATIVE_NAME: dict[str, torch.dtype] = {name: dtype for dtype, name in NATIVE.items()}
BY_BYTES_NAME: dict[str, torch.dtype] = {name: dtype for dtype, name in AS_BYTES.items()}

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
"""All dtypes by name. `getattr(torch, name)` would import a module for some names."""

LAYOUTS: dict[str, torch.layout] = {str(layout).removeprefix("torch."): layout for layout in SPARSE_LAYOUTS}


def check_shape(shape: Any) -> int:
    """Return the number of elements of a tensor of this shape.

    Raises:
        ValueError: torch has no such tensors, not even without elements.
    """
    if type(shape) is not list or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"the shape is not a list of at most {MAX_DIMENSIONS} lengths")
    if not all(type(length) is int and 0 <= length < 2**63 for length in shape):
        raise ValueError("a length of the shape is not an integer from 0 to 2^63 - 1")
    if math.prod(length or 1 for length in shape) >= 2**63:
        raise ValueError("the shape has too many elements")
    return math.prod(shape)


def are_versions(value: Any) -> bool:
    """Say whether `value` is what `Module.state_dict` attaches as `_metadata`: a dict for each part of the module."""
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(part, dict) for name, part in value.items()
    )
