"""Tags of the checkpoint format, and the decoder of plain values. Needs neither torch nor numpy.

A value that JSON lacks is an object `{"$type": <tag>, ...}`. A user's own dict that has the key
`"$type"` is written as the tag `DICT`, with its items in a list, so nothing can be mistaken.
"""

from __future__ import annotations

import base64
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainstack.checkpointing.field_types import short
from trainstack.errors import CheckpointDamagedError, ConfigurationError

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
SUBCLASS = "tensor subclass"
ENUM = "enum"
DATACLASS = "dataclass"
ARRAY = "ndarray"
NUMPY_SCALAR = "numpy"
NUMPY_TEXT = "numpy.str"
NUMPY_BYTES = "numpy.bytes"
PATH = "path"

_KINDS = (bool, int, float, str, list, tuple, dict, set, Counter, deque)
FACTORIES: dict[str | None, Callable[[], Any] | None] = {None: None, **{kind.__name__: kind for kind in _KINDS}}
"""The allowed values of the `default_factory` of a defaultdict, by name."""

MAX_DEPTH = 128
"""How deep a state may nest; deeper ones would exhaust the stack of a JSON parser."""

MAX_DIMENSIONS = 64
"""How many dimensions a tensor may have; torch computes with no more."""

ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "C64": 8,
    "F8_E4M3": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2": 1,
    "F8_E5M2FNUZ": 1,
}
"""Bytes of an element, by the name of the dtype in the header of a safetensors file."""

RESERVED = "__metadata__"
"""The key of such a header that names no tensor."""

STATES = (
    "module_interface_state",
    "trainer_state",
    "trainer_backend_state",
    "rng_state",
    "history_state",
    "callback_states",
)
"""The fields of `Checkpoint` that may hold tensors and that all ranks share."""

RANK_STATES = "rank_states"
"""The field of `Checkpoint` that has one state for each rank, each in separate files. In the tree: their number."""

MODEL_STATE = "model_state"
"""The state of an export, in the tree."""


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
    """Return whether `value` has the form of `_metadata` of `Module.state_dict`: a dict for each part of the module."""
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(part, dict) for name, part in value.items()
    )


class PlainDecoder:
    """Decodes JSON trees whose values are plain: those of Python itself."""

    def __init__(self) -> None:
        self._handlers: dict[str, Callable[[dict[str, Json]], Any]] = {
            INT: lambda f: int(f["hex"], 16),
            FLOAT: lambda f: float(text_of(f["value"])),
            COMPLEX: lambda f: complex(*self._items(f["parts"])),
            BYTES: lambda f: bytes_of(f),
            BYTEARRAY: lambda f: bytearray(bytes_of(f)),
            TUPLE: lambda f: tuple(self._items(f["items"])),
            SET: lambda f: set(self._hashed(f["items"])),
            FROZENSET: lambda f: frozenset(self._hashed(f["items"])),
            DEQUE: lambda f: deque(self._items(f["items"]), _length(f["maxlen"])),
            DICT: lambda f: dict(self._pairs(f["items"])),
            DEFAULTDICT: lambda f: defaultdict(FACTORIES[f["factory"]], self._pairs(f["items"])),
            COUNTER: lambda f: Counter(dict(self._pairs(f["items"]))),
            ORDERED_DICT: self._ordered_dict,
            PATH: lambda f: Path(text_of(f["value"])),
        }

    def decode(self, tree: Json) -> Any:
        """Return the state tree.

        Raises:
            CheckpointDamagedError: the tree is not one that `StateEncoder` writes.
            ConfigurationError: it holds a tensor subclass that is not registered, or whose package is missing.
        """
        self._depth = 0
        try:
            return self._decode(tree)
        except ConfigurationError:  # a class is not registered
            raise
        except Exception as error:  # the tree may come from anywhere, and torch and numpy raise errors of any class
            raise CheckpointDamagedError(
                f"the state tree cannot be decoded ({type(error).__name__}: {str(error)[:300]}). "
                "It was not written by this version of trainstack: load another checkpoint."
            ) from error

    def _decode(self, tree: Json) -> Any:
        if type(tree) not in (list, dict):
            return tree
        if self._depth > 2 * MAX_DEPTH:  # tuples in keys count here, and not in the encoder
            raise ValueError(f"it nests deeper than {MAX_DEPTH} levels")
        self._depth += 1
        if type(tree) is list:
            made: Any = self._items(tree)
        elif KEY in tree:
            made = self._handlers[tree[KEY]](tree)
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


def bytes_of(fields: dict[str, Json]) -> bytes:
    """The bytes of a tagged object."""
    return base64.b64decode(text_of(fields["base64"]), validate=True)


def text_of(value: Json) -> str:
    """`value`, which has to be a text."""
    if type(value) is not str:
        raise ValueError(f"a {type(value).__name__} stands where a text should")
    return value


def _length(value: Json) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value <= sys.maxsize):
        raise ValueError(f"maxlen={short(value)} is no length")
    return value


_SAME_HASH = 100
"""How many keys of a dict or items of a set may have one hash. -1 and -2 have one; more come from an attacker."""


def _check_hashes(items: list[Any]) -> None:
    """Refuse items that would make a set or dict compare each of them with each other."""
    if len(items) > _SAME_HASH and not all(type(item) is str for item in items):  # those of texts are random
        most = max(Counter(map(hash, items)).values())
        if most > _SAME_HASH:
            raise ValueError(f"{most:,} keys of a dict or items of a set have the same hash")


def _versions(value: Any) -> Any:
    if not are_versions(value):
        raise ValueError("the versions of modules are no dict of dicts")
    return value
