"""Encoder from a state tree to a JSON tree with named tensors."""

from __future__ import annotations

import base64
import dataclasses
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from trainstack._deferred import DeferredTensor
from trainstack._tensor_classes import inner_tensors, is_sharded, registered_name
from trainstack.checkpointing import format
from trainstack.checkpointing.format import RESERVED, Json
from trainstack.errors import UnsupportedStateError

SPARSE_LAYOUTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""The methods of a sparse tensor that return its parts. Those of `sparse_coo` also work on uncoalesced tensors."""

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
"""The dtypes of safetensors, with their names in its header."""

AS_BYTES: dict[torch.dtype, str] = {
    getattr(torch, name): name
    for name in ("complex128", "complex32", "float8_e8m0fnu", "float4_e2m1fn_x2")
    if hasattr(torch, name)
}
"""dtypes that are stored as flat bytes; the JSON tree has dtype and shape."""

BY_NATIVE_NAME: dict[str, torch.dtype] = {name: dtype for dtype, name in NATIVE.items()}
BY_BYTES_NAME: dict[str, torch.dtype] = {name: dtype for dtype, name in AS_BYTES.items()}

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
"""All dtypes by name. `getattr(torch, name)` would import a module for some names."""

LAYOUTS: dict[str, torch.layout] = {str(layout).removeprefix("torch."): layout for layout in SPARSE_LAYOUTS}


def type_name(value: Any) -> str:
    """Return the type of `value` with its module, for a message."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def explain_refusal(where: str, value: Any) -> str:
    """Return the error message for a value that the format cannot store."""
    if isinstance(value, Enum):
        advice = "Store its .value or its .name in get_state()."
    elif isinstance(value, torch.Generator):
        advice = "Store generator.get_state() in get_state()."
    elif inner_tensors(value) is not None:
        advice = "Call trainstack.register_tensor_class with this class when your program starts."
    elif isinstance(value, torch.Tensor):
        advice = (
            "Convert it in get_state() to a plain torch.Tensor of a standard dtype, or register a buffer with "
            "persistent=False. DefaultCheckpointerArguments(keep_frozen=False) omits frozen parameters."
        )
    elif type(value) is defaultdict:
        known = ", ".join(name for name in format.FACTORIES if name is not None)
        advice = f"Return dict(...) of it in get_state(), or use one of these factories: {known}."
    else:
        advice = "Convert it in get_state() to tensors, numbers, strings, lists or dicts."
    return f"{where} contains a {_kind_of(value)}, which a checkpoint cannot store. {advice}"


def _kind_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        layout = "quantized" if value.is_quantized else str(value.layout).removeprefix("torch.")
        return f"{type_name(value)} (layout {layout}, {value.dtype}, device {value.device.type})"
    if isinstance(value, (np.ndarray, np.generic)):
        return f"{type_name(value)} of dtype {value.dtype}"
    if type(value) is defaultdict:
        return f"{type_name(value)} with a custom factory"
    return type_name(value)


def tensor_identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that two tensors share if they are the same view of the same memory."""
    is_plain = tensor.layout is torch.strided and not isinstance(tensor, DeferredTensor)
    if tensor.numel() == 0 or not is_plain or inner_tensors(tensor) is not None:
        return ("without separate memory", id(tensor))
    view = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    return (tensor.device, tensor.untyped_storage().data_ptr(), *view, tensor.is_conj(), tensor.is_neg())


def is_storable(tensor: torch.Tensor) -> bool:
    """Whether the format can store tensors of this layout."""
    known = tensor.layout is torch.strided or tensor.layout in SPARSE_LAYOUTS
    return (
        known
        and tensor.dim() <= format.MAX_DIMENSIONS
        and not (tensor.is_quantized or tensor.is_meta or tensor.is_nested)
    )


def array_as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return `array` as a tensor: with shared memory if that is safe, as raw bytes for dtypes that torch lacks."""
    if not (array.flags.c_contiguous and array.flags.writeable and array.flags.aligned):
        array = np.array(array, order="C", copy=True)
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):  # text, dates, foreign byte order: stored as bytes with their dtype
        return torch.from_numpy(array.reshape(-1).view(np.uint8))


class Index(int):
    """A position in a sequence, as opposed to an integer key of a dict."""


def describe(root: str, place: list[Any]) -> str:
    """`("trainer_state", ["optimizers", Index(0), "state"])` -> `trainer_state.optimizers[0].state`."""
    text = root
    for part in place:
        plain = isinstance(part, str) and part.isidentifier()
        text += f".{part}" if plain else f"[{part!r}]"
    return text.lstrip(".") or "the state itself"


class StateEncoder:
    """Encodes any number of state trees. A tensor that several of them share is stored once.

    The encoder keeps references to the encoded values, and copies only numpy arrays that are read-only or not
    contiguous.

    Args:
        taken: names that no tensor may get, and to which the names of this encoder are added. Encoders that share it
            use different names.
        sharded: accept sharded tensors too. The trees have their whole shapes, and `pop_tensors` returns them
            unchanged.
    """

    def __init__(self, taken: set[str] | None = None, *, sharded: bool = False) -> None:
        self._takes_shards = sharded
        self._taken = set() if taken is None else taken
        self._taken.add(RESERVED)
        self._tensors: dict[str, torch.Tensor] = {}
        self._seen: dict[tuple[Any, ...], str] = {}
        self._alive: list[Any] = []
        self._root = ""
        self._prefix = ""
        self._place: list[Any] = []
        self._handlers = self._make_handlers()

    def encode(self, value: Any, root: str = "", prefix: str = "") -> Json:
        """Return the JSON tree of `value`.

        Args:
            value: the state. Exact types only: a subclass of dict is not a dict here.
            root: the name of the state in error messages.
            prefix: of the names of its tensors.

        Raises:
            UnsupportedStateError: an object cannot be stored. The message has its place in the tree and its type.
        """
        self._root, self._prefix, self._place = root, prefix, []
        return self._encode(value)

    def pop_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors since the last call, detached, on their devices."""
        taken, self._tensors = self._tensors, {}
        return taken

    def _make_handlers(self) -> dict[type, Callable[[Any], Json]]:
        same: Callable[[Any], Json] = lambda value: value  # noqa: E731
        return {
            type(None): same,
            bool: same,
            str: same,
            int: lambda v: v if -(2**63) <= v < 2**63 else _tag(format.INT, hex=hex(v)),
            float: lambda v: v if v - v == 0.0 else _tag(format.FLOAT, value=repr(v)),  # inf - inf is nan
            complex: lambda v: _tag(format.COMPLEX, parts=[self._encode(v.real), self._encode(v.imag)]),
            bytes: lambda v: _tag(format.BYTES, base64=_base64(v)),
            bytearray: lambda v: _tag(format.BYTEARRAY, base64=_base64(v)),
            list: self._items,
            tuple: lambda v: _tag(format.TUPLE, items=self._items(v)),
            set: lambda v: _tag(format.SET, items=self._items(v)),
            frozenset: lambda v: _tag(format.FROZENSET, items=self._items(v)),
            deque: lambda v: _tag(format.DEQUE, items=self._items(v), maxlen=v.maxlen),
            dict: self._dict,
            defaultdict: self._defaultdict,
            Counter: lambda v: _tag(format.COUNTER, items=self._pairs(v)),
            OrderedDict: self._ordered_dict,
            torch.Size: lambda v: _tag(format.SIZE, items=list(v)),
            torch.dtype: lambda v: _tag(format.DTYPE, name=str(v).removeprefix("torch.")),
            torch.device: lambda v: _tag(format.DEVICE, name=str(v)),
            torch.Tensor: self._tensor,
            torch.nn.Parameter: self._tensor,
            DeferredTensor: self._tensor,
            np.ndarray: self._array,
            np.str_: lambda v: _tag(format.NUMPY_TEXT, value="".join(v)),  # str(v) would drop zeros at the end
            np.bytes_: lambda v: _tag(format.NUMPY_BYTES, base64=_base64(bytes(list(v)))),
        }

    def _encode(self, value: Any) -> Json:
        handler = self._handlers.get(type(value))
        if handler is not None:
            return handler(value)
        if isinstance(value, np.generic):
            return self._numpy_scalar(value)
        if isinstance(value, Path):
            return _tag(format.PATH, value=str(value))
        if self._takes_shards and is_sharded(value):
            return self._shard(value)
        name = registered_name(type(value))
        if name is not None:
            return self._registered(name, value)
        return self._raise_unsupported(value)

    def _at(self, part: Any, value: Any) -> Json:
        if len(self._place) >= format.MAX_DEPTH:
            where = describe(self._root, self._place[:4])
            raise UnsupportedStateError(
                f"{where} is nested deeper than {format.MAX_DEPTH} levels, or contains itself. "
                "Return a flatter state from get_state()."
            )
        self._place.append(part)
        encoded = self._encode(value)
        self._place.pop()
        return encoded

    def _items(self, values: Iterable[Any]) -> list[Json]:
        return [self._at(Index(i), value) for i, value in enumerate(values)]

    def _pairs(self, value: dict[Any, Any]) -> list[Json]:
        return [[self._key(key), self._at(key, item)] for key, item in value.items()]

    def _dict(self, value: dict[Any, Any]) -> Json:
        if format.KEY in value or any(type(key) is not str for key in value):
            return _tag(format.DICT, items=self._pairs(value))
        return {key: self._at(key, item) for key, item in value.items()}

    def _defaultdict(self, value: defaultdict[Any, Any]) -> Json:
        for name, factory in format.FACTORIES.items():
            if factory is value.default_factory:
                return _tag(format.DEFAULTDICT, factory=name, items=self._pairs(value))
        return self._raise_unsupported(value)

    def _ordered_dict(self, value: OrderedDict[Any, Any]) -> Json:
        encoded = _tag(format.ORDERED_DICT, items=self._pairs(value))
        versions = getattr(value, "_metadata", None)
        if format.are_versions(versions):  # the module versions that Module.state_dict() attaches
            encoded["versions"] = self._at("_metadata", versions)
        return encoded

    def _key(self, key: Any) -> Json:
        if type(key) is tuple:
            return _tag(format.TUPLE, items=[self._key(part) for part in key])
        if type(key) not in (str, int, float, bool, type(None)):
            raise UnsupportedStateError(
                f"{describe(self._root, self._place)} has the key {key!r} of type {type_name(key)}. "
                "Keys may be strings, numbers, booleans, None, or tuples of those: "
                "convert the keys in get_state()."
            )
        return self._encode(key)

    def _store(self, identity: tuple[Any, ...], owner: Any, tensor: torch.Tensor) -> str:
        name = self._seen.get(identity)
        if name is None:
            parts = ([self._prefix] if self._prefix else []) + [str(part) for part in self._place]
            readable = ".".join(parts).encode("utf-8", "replace").decode() or "tensor"
            name, count = readable, 1
            while name in self._taken:  # readable, and unique in the checkpoint
                count += 1
                name = f"{readable}#{count}"
            self._taken.add(name)
            self._seen[identity] = name
            self._tensors[name] = tensor
            self._alive.append(owner)
        return name

    def _tensor(self, value: torch.Tensor) -> Json:
        if not is_storable(value):
            self._raise_unsupported(value)
        if value.layout is not torch.strided:
            return self._sparse(value.detach())
        if value.dtype in NATIVE:
            extra = {}
        elif value.dtype in AS_BYTES:
            extra = {"dtype": AS_BYTES[value.dtype], "shape": list(value.shape)}
        else:
            self._raise_unsupported(value)
        plain = value if isinstance(value, DeferredTensor) else value.detach()
        return _tag(format.TENSOR, name=self._store(tensor_identity(value), value, plain), **extra)

    def _shard(self, value: Any) -> Json:
        if value.dtype not in NATIVE and value.dtype not in AS_BYTES:
            self._raise_unsupported(value)
        local = value.detach().to_local()
        identity = tensor_identity(local) if local.numel() else ("no rows", id(value))
        extra = {} if value.dtype in NATIVE else {"dtype": AS_BYTES[value.dtype], "shape": list(value.shape)}
        return _tag(format.TENSOR, name=self._store(identity, value, value.detach()), **extra)

    def _sparse(self, value: torch.Tensor) -> Json:
        parts = {name: self._at(name.lstrip("_"), getattr(value, name)()) for name in SPARSE_LAYOUTS[value.layout]}
        layout = str(value.layout).removeprefix("torch.")
        coalesced = value.is_coalesced() if value.layout is torch.sparse_coo else None
        return _tag(format.SPARSE, layout=layout, shape=list(value.shape), coalesced=coalesced, parts=parts)

    def _registered(self, name: str, value: Any) -> Json:
        if isinstance(value, Enum):
            return _tag(format.ENUM, name=name, member=value.name)
        found = inner_tensors(value)
        if found is None:
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return _tag(format.DATACLASS, name=name, fields=self._dict(fields))
        inner = {key: self._at(key, part) for key, part in found[0].items()}
        attributes = self._at("attributes", found[1])
        layout = {"shape": list(value.size()), "stride": list(value.stride())}
        return _tag(format.SUBCLASS, name=name, **layout, inner=inner, attributes=attributes)

    def _array(self, value: np.ndarray[Any, Any]) -> Json:
        if value.dtype.kind in "OV":
            self._raise_unsupported(value)
        name = self._store(("array", id(value)), value, array_as_tensor(value))
        return _tag(format.ARRAY, name=name, dtype=value.dtype.str, shape=list(value.shape))

    def _numpy_scalar(self, value: np.generic) -> Json:
        if value.dtype.kind in "OV":
            self._raise_unsupported(value)
        return _tag(format.NUMPY_SCALAR, dtype=value.dtype.str, base64=_base64(value.tobytes()))

    def _raise_unsupported(self, value: Any) -> NoReturn:
        raise UnsupportedStateError(explain_refusal(describe(self._root, self._place), value))


def _tag(kind: str, /, **fields: Json) -> dict[str, Json]:
    return {format.KEY: kind, **fields}


def _base64(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode("ascii")
