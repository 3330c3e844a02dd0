"""How values that JSON lacks are marked in a checkpoint's JSON tree.

A value that JSON lacks is an object `{"$type": <tag>, ...}`. A user's own dict that has the key
`"$type"` is written as the tag `DICT`, with its items in a list, so nothing can be mistaken.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
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
DEFAULTDICT = "defaultdict"
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

_KINDS = (bool, int, float, str, list, tuple, dict, set, Counter, deque)
FACTORIES: dict[str | None, Callable[[], Any] | None] = {None: None, **{kind.__name__: kind for kind in _KINDS}}
"""What the `default_factory` of a defaultdict may be, by the name that stands for it."""

MAX_DEPTH = 128
"""How deep a state may nest; deeper ones would exhaust the stack of a JSON parser."""
