"""Tags of the checkpoint format, and the decoder of plain values. It needs neither torch nor numpy.

A value that JSON lacks is an object `{"$type": <tag>, ...}`. A dict of the user with the key `"$type"` is written with
the tag `DICT` and a list of its items, so the two cannot be confused.
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
"""The deepest nesting of a state; deeper ones would exhaust the stack of a JSON parser."""

MAX_DIMENSIONS = 64
"""The largest number of dimensions of a tensor; torch's operations allow no more."""

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
"""The key of such a header that does not name a tensor."""

STATES = (
    "module_interface_state",
    "trainer_state",
    "trainer_backend_state",
    "rng_state",
    "history_state",
    "callback_states",
)
"""The fields of `Checkpoint` that may contain tensors and that all ranks share."""

RANK_STATES = "rank_states"
"""The field of `Checkpoint` with one state for each rank, each in separate files. In the tree: their number."""

MODEL_STATE = "model_state"
"""The key of the state of an export in the tree."""


def check_shape(shape: Any) -> int:
    """Return the number of elements of a tensor of this shape.

    Raises:
        ValueError: torch does not allow this shape, not even without elements.
    """
    if type(shape) is not list or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"the shape is not a list of at most {MAX_DIMENSIONS} lengths")
    if not all(type(length) is int and 0 <= length < 2**63 for length in shape):
        raise ValueError("a length of the shape is not an integer from 0 to 2^63 - 1")
    if math.prod(length or 1 for length in shape) >= 2**63:
        raise ValueError("the shape has too many elements")
    return math.prod(shape)


def are_versions(value: Any) -> bool:
    """Return whether `value` has the form of `_metadata` of `Module.state_dict`: a dict for each submodule."""
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(part, dict) for name, part in value.items()
    )


class PlainDecoder:
    """Decodes JSON trees whose values are plain objects of Python."""

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
            CheckpointDamagedError: the tree is not a result of `StateEncoder`.
            ConfigurationError: it contains a tensor subclass that is not registered, or whose package is missing.
        """
        self._depth = 0
        try:
            return self._decode(tree)
        except ConfigurationError:  # a class is not registered
            raise
        except Exception as error:  # the tree may be of any origin, and torch and numpy raise errors of any class
            raise CheckpointDamagedError(
                f"the state tree cannot be decoded ({type(error).__name__}: {str(error)[:300]}). "
                "It was not written by this version of trainstack: load another checkpoint."
            ) from error

    def _decode(self, tree: Json) -> Any:
        if type(tree) not in (list, dict):
            return tree
        if self._depth > 2 * MAX_DEPTH:  # twice, because the encoder does not count tuples in keys
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
            raise ValueError(f"a {type(trees).__name__} is in the place of a list")
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
    """Return `value`, which has to be a text."""
    if type(value) is not str:
        raise ValueError(f"a {type(value).__name__} is in the place of a text")
    return value


def _length(value: Json) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value <= sys.maxsize):
        raise ValueError(f"maxlen={short(value)} is not a length")
    return value


_SAME_HASH = 100
"""The largest number of keys of a dict or items of a set with one hash. -1 and -2 share one; more are an attack."""


def _check_hashes(items: list[Any]) -> None:
    """Refuse items with equal hashes, for which building a set or dict takes quadratic time."""
    if len(items) > _SAME_HASH and not all(type(item) is str for item in items):  # hashes of strings are randomized
        most = max(Counter(map(hash, items)).values())
        if most > _SAME_HASH:
            raise ValueError(f"{most:,} keys of a dict or items of a set have the same hash")


def _versions(value: Any) -> Any:
    if not are_versions(value):
        raise ValueError("the versions of modules are not a dict of dicts")
    return value
