"""How values that JSON lacks are marked in a checkpoint's JSON tree.

A value that JSON lacks is an object `{"$type": <tag>, ...}`. A user's own dict that has the key
`"$type"` is written as the tag `DICT`, with its items in a list, so nothing can be mistaken.
"""

from __future__ import annotations

from typing import Any

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
ORDERED_DICT = "OrderedDict"
COUNTER = "Counter"
SIZE = "torch.Size"
DTYPE = "torch.dtype"
DEVICE = "torch.device"
TENSOR = "tensor"
ARRAY = "ndarray"
NUMPY_SCALAR = "numpy"
NUMPY_TEXT = "numpy.str"
NUMPY_BYTES = "numpy.bytes"
PATH = "path"

MAX_DEPTH = 128
"""How deep a state may nest; deeper ones would exhaust the stack of a JSON parser."""
