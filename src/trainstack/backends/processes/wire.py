"""Encoding of values that ranks exchange as bytes. Decoding imports, calls and executes nothing.

A message has a head and blobs. The head has one tag byte and its fields for each value, in preorder. The blobs are the
bytes of large tensors and arrays, so that they are sent from and received into separate memory. All lengths are checked
against the existing bytes before memory is allocated.

Dataclasses and named tuples are sent as the name of their class and their fields. The receiver uses that class if its
message of the same exchange contained it, and a plain container otherwise.
"""

from __future__ import annotations

import math
import pickle
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainstack._tensor_bytes import bytes_of
from trainstack.errors import ModuleContractError, PeerError

BLOB_BYTES = 1 << 16
"""Tensors and arrays with more bytes are blobs; smaller ones are copied into the head, which costs less."""

MAX_DEPTH = 100
"""The deepest nesting of values. Encoding and decoding recurse, and Python's recursion limit is 1,000."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_LAYOUTS: dict[str, tuple[torch.layout, tuple[str, ...]]] = {
    "coo": (torch.sparse_coo, ("_indices", "_values")),
    "csr": (torch.sparse_csr, ("crow_indices", "col_indices", "values")),
    "csc": (torch.sparse_csc, ("ccol_indices", "row_indices", "values")),
    "bsr": (torch.sparse_bsr, ("crow_indices", "col_indices", "values")),
    "bsc": (torch.sparse_bsc, ("ccol_indices", "row_indices", "values")),
}
_LAYOUT_NAMES = {layout: name for name, (layout, _) in _LAYOUTS.items()}
_FACTORIES = {
    kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict, set, Counter, deque, OrderedDict)
}
_NUMPY_DTYPE = re.compile(r"[<>|][biufcmMSU][1-9]\d{0,8}(\[\d{0,9}[A-Za-z]{1,2}\])?")
_SENDABLE = "tensors, numbers, strings, or lists, tuples, dicts, named tuples and dataclasses of these"
_ALLOW = (
    "backend_options={'ddp': {'allow_pickle': True}}, or DistributedTrainingArguments(allow_pickle=True), if you trust "
    "every process that can reach this run's ports"
)


class At(NamedTuple):
    """A value with its name in error messages; only the value is sent."""

    place: str
    value: Any


@dataclass(slots=True)
class Message:
    """The result of `encode`.

    Attributes:
        head: the structure and all small values; it begins with the sizes of the head and of the blobs.
        blobs: the bytes of large tensors, flat uint8 on the CPU; they may share memory with the value.
        classes: the dataclasses and named tuples in the value, by their names in the message.
    """

    head: bytes
    blobs: list[Tensor]
    classes: dict[str, type]

    def packed(self) -> bytes | Tensor:
        """The message as one piece."""
        if not self.blobs:
            return self.head
        return torch.cat([torch.frombuffer(bytearray(self.head), dtype=torch.uint8), *self.blobs])


def encode(value: Any, root: str = "the value", *, allow_pickle: bool = False) -> Message:
    """Encode `value`, of exact types: a subclass of dict does not count as a dict.

    Args:
        value: the value to send.
        root: its name in error messages.
        allow_pickle: pickle objects without an encoding.

    Raises:
        ModuleContractError: an object has no encoding. The message has its place in the value and its type.
    """
    encoder = _Encoder(root, allow_pickle)
    encoder.put(value)
    sizes = [blob.numel() for blob in encoder.blobs]
    prefix = struct.pack(f"<QQ{len(sizes)}Q", 16 + 8 * len(sizes) + len(encoder.body), len(sizes), *sizes)
    return Message(prefix + bytes(encoder.body), encoder.blobs, encoder.classes)


def blob_sizes(head: bytes) -> list[int]:
    """The sizes in bytes of the blobs that follow a message's head.

    Raises:
        PeerError: `head` is not a result of `encode`.
    """
    if len(head) >= 16:
        length, count = struct.unpack_from("<QQ", head)
        if length == len(head) and count <= (length - 16) // 8:
            return list(struct.unpack_from(f"<{count}Q", head, 16))
    raise _damaged("its sizes are wrong")


def decode(
    head: bytes, blobs: Sequence[Tensor], classes: Mapping[str, type] | None = None, *, allow_pickle: bool = False
) -> Any:
    """Return the value of a message. Its tensors are on the CPU, own their memory and require no gradient.

    Args:
        head: of the message.
        blobs: of the message; they belong to the result.
        classes: the classes of dataclasses and named tuples, by name; others become a `SimpleNamespace` or a tuple.
        allow_pickle: unpickle pickled objects.

    Raises:
        PeerError: it is not a message that `encode` made.
        ModuleContractError: it contains a pickle, and `allow_pickle` is False.
    """
    try:
        sizes = blob_sizes(head)
        if sizes != [blob.numel() for blob in blobs]:
            raise _damaged("its blobs are missing")
        decoder = _Decoder(head, 16 + 8 * len(sizes), blobs, classes or {}, allow_pickle)
        value = decoder.get()
        if decoder.left:
            raise _damaged(f"{decoder.left} bytes are left over")
    except (PeerError, ModuleContractError):
        raise
    except Exception as error:
        raise _damaged(f"{type(error).__name__}: {error}") from error
    return value


def decode_packed(packed: Tensor, classes: Mapping[str, type] | None = None, *, allow_pickle: bool = False) -> Any:
    """`decode` for a result of `Message.packed`, flat uint8."""
    length = int.from_bytes(packed[:8].numpy().tobytes(), "little")
    head = packed[:length].numpy().tobytes() if length <= packed.numel() else b""
    sizes, blobs = blob_sizes(head), list[Tensor]()
    if length + sum(sizes) != packed.numel():
        raise _damaged("its blobs are missing")
    for size in sizes:
        blobs.append(packed[length : length + size].clone())  # separate memory, aligned for any dtype
        length += size
    return decode(head, blobs, classes, allow_pickle=allow_pickle)


def _damaged(why: str) -> PeerError:
    return PeerError(
        f"the data of another process is not a message of this library ({why}). All processes have to run the same "
        "version of trainstack, and no other program may use the ports of the run."
    )


class _Encoder:
    """Appends values to a head."""

    def __init__(self, root: str, allow_pickle: bool) -> None:
        self.body = bytearray()
        self.blobs: list[Tensor] = []
        self.classes: dict[str, type] = {}
        self._root, self._allow_pickle = root, allow_pickle
        self._place: list[str] = []
        self._seen: dict[tuple[Any, ...], int] = {}
        self._alive: list[Any] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            type(None): lambda v: self._tag("N"),
            bool: lambda v: self._tag("T" if v else "F"),
            int: self._int,
            float: lambda v: self._tag("f", struct.pack("<d", v)),
            complex: lambda v: self._tag("c", struct.pack("<dd", v.real, v.imag)),
            str: lambda v: self._sized("s", v.encode("utf-8", "surrogatepass")),
            bytes: lambda v: self._sized("b", v),
            bytearray: lambda v: self._sized("y", v),
            list: self._list,
            tuple: lambda v: self._items("t", v),
            set: lambda v: self._items("e", v),
            frozenset: lambda v: self._items("z", v),
            deque: self._deque,
            dict: lambda v: self._pairs("d", v),
            Counter: lambda v: self._pairs("C", v),
            OrderedDict: self._ordered_dict,
            defaultdict: self._defaultdict,
            torch.Size: lambda v: self._items("S", v),
            torch.dtype: lambda v: self._sized("p", str(v).removeprefix("torch.").encode()),
            torch.device: lambda v: self._sized("v", str(v).encode()),
            Tensor: self._tensor,
            torch.nn.Parameter: self._tensor,
            np.ndarray: self._array,
            np.str_: lambda v: self._sized("u", "".join(v).encode("utf-8", "surrogatepass")),
            np.bytes_: lambda v: self._sized("w", bytes(list(v))),  # bytes(v) would drop zeros at the end
            At: self._at,
        }

    def put(self, value: Any) -> None:
        handler = self._handlers.get(type(value))
        if handler is not None:
            handler(value)
        elif isinstance(value, np.generic) and value.dtype.kind not in "OV":
            self._tag("a")
            self._text(value.dtype.str)
            self._bytes(value.tobytes())
        elif isinstance(value, PurePath):
            self._sized("P", str(value).encode("utf-8", "surrogateescape"))
        elif isinstance(value, tuple) and hasattr(value, "_fields") and not getattr(value, "__dict__", None):
            self._record("tuple", value, zip(value._fields, value, strict=True))
        elif is_dataclass(value) and not isinstance(value, type) and type(value).__new__ is object.__new__:
            names = dict.fromkeys([*(field.name for field in fields(value)), *getattr(value, "__dict__", ())])
            items = [(name, getattr(value, name)) for name in names if hasattr(value, name)]
            self._record("dataclass", value, items)
        else:
            self._refuse(value)

    def _tag(self, tag: str, rest: bytes = b"") -> None:
        self.body += tag.encode() + rest

    def _bytes(self, data: bytes | bytearray) -> None:
        self.body += struct.pack("<Q", len(data))
        self.body += data

    def _text(self, text: str) -> None:
        self._bytes(text.encode("utf-8", "surrogatepass"))

    def _sized(self, tag: str, data: bytes | bytearray) -> None:
        self._tag(tag)
        self._bytes(data)

    def _int(self, value: int) -> None:
        if -(2**63) <= value < 2**63:
            self._tag("i", struct.pack("<q", value))
        else:
            self._sized("I", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))

    def _put_at(self, part: str, value: Any) -> None:
        if len(self._place) >= MAX_DEPTH:
            raise ModuleContractError(
                f"{self._root}{''.join(self._place[:4])} is nested deeper than {MAX_DEPTH} levels, or contains itself. "
                "Use a flatter value."
            )
        self._place.append(part)
        self.put(value)
        self._place.pop()

    def _at(self, at: At) -> None:
        root, place, self._root, self._place = self._root, self._place, at.place, []
        self.put(at.value)
        self._root, self._place = root, place

    def _list(self, values: list[Any]) -> None:
        if set(map(type, values)) == {float}:  # such as the losses of a validation: 8 bytes each, without tags
            self._tag("D", struct.pack(f"<Q{len(values)}d", len(values), *values))
        else:
            self._items("l", values)

    def _items(self, tag: str, values: Any) -> None:
        self._tag(tag, struct.pack("<Q", len(values)))
        for position, value in enumerate(values):
            self._put_at(f"[{position}]", value)

    def _pairs(self, tag: str, value: Mapping[Any, Any]) -> None:
        self._tag(tag, struct.pack("<Q", len(value)))
        for key, item in value.items():
            self._put_at(" (a key)", key)
            self._put_at(f"[{key!r}]", item)

    def _deque(self, value: deque[Any]) -> None:
        self._items("q", value)
        self.put(value.maxlen)

    def _ordered_dict(self, value: OrderedDict[Any, Any]) -> None:
        self._pairs("O", value)
        self._put_at("._metadata", getattr(value, "_metadata", None))  # an attribute of `Module.state_dict()`

    def _defaultdict(self, value: defaultdict[Any, Any]) -> None:
        name = next((name for name, kind in _FACTORIES.items() if kind is value.default_factory), "")
        if value.default_factory is not None and not name:
            self._refuse(value)
            return
        self._pairs("g", value)
        self._text(name)

    def _record(self, kind: str, value: Any, items: Iterable[tuple[str, Any]]) -> None:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        self.classes[name] = type(value)
        self._tag("R")
        self._text(kind)
        self._text(name)
        known = list(items)
        self.body += struct.pack("<Q", len(known))
        for field, item in known:
            self._text(field)
            self._put_at(f".{field}", item)

    def _tensor(self, value: Tensor) -> None:
        sparse = _LAYOUT_NAMES.get(value.layout)
        whole = value.layout is torch.strided and not (value.is_quantized or value.is_meta or value.is_nested)
        value = value.detach()
        if sparse is not None:
            self._tag("Y")
            self._text(sparse)
            self._shape(value.shape)
            self._tag("T" if value.layout is torch.sparse_coo and value.is_coalesced() else "F")
            for part in _LAYOUTS[sparse][1]:
                self._tensor(getattr(value, part)())
            return
        try:
            flat = bytes_of(value.resolve_conj().resolve_neg().cpu()) if whole else None
        except RuntimeError:  # a dtype without a storage
            flat = None
        if flat is None:
            self._refuse(value)
            return
        self._tag("X")
        self._text(str(value.dtype).removeprefix("torch."))
        self._shape(value.shape)
        view = (value.data_ptr(), value.stride(), value.is_conj(), value.is_neg(), value.device)
        self._raw(value, (value.dtype, value.shape, *view), flat)

    def _array(self, value: np.ndarray[Any, Any]) -> None:
        if not _NUMPY_DTYPE.fullmatch(value.dtype.str):
            self._refuse(value)
            return
        self._tag("A")
        self._text(value.dtype.str)
        self._shape(value.shape)
        flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        if not flat.flags.writeable:
            flat = flat.copy()  # torch warns of a tensor in read-only memory
        self._raw(value, ("array", id(value)), torch.from_numpy(flat))

    def _shape(self, shape: Sequence[int]) -> None:
        self.body += struct.pack(f"<B{len(shape)}Q", len(shape), *shape)

    def _raw(self, value: Any, key: tuple[Any, ...], flat: Tensor) -> None:
        """Add the bytes of a tensor. A large tensor that occurs several times is sent once."""
        if flat.numel() <= BLOB_BYTES:
            self._tag("<")
            self._bytes(flat.numpy().tobytes())
            return
        if key not in self._seen:
            self._seen[key] = len(self.blobs)
            self._alive.append(value)  # so that no other tensor gets its address
            self.blobs.append(flat)
        self._tag(">", struct.pack("<Q", self._seen[key]))

    def _refuse(self, value: Any) -> None:
        """Pickle `value` if that is allowed, or raise."""
        kind = type(value)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        place = f"{self._root}{''.join(self._place)}"
        if self._allow_pickle:
            try:
                self._sized("K", pickle.dumps(value))
            except Exception as error:
                raise ModuleContractError(
                    f"{place} is a {name}, which cannot be pickled ({error}). Use {_SENDABLE}."
                ) from error
            return
        if isinstance(value, Enum):
            advice = "Use its .value or its .name."
        elif isinstance(value, (Tensor, np.ndarray, np.generic)):
            facts = f"{value.dtype}, {value.layout}" if isinstance(value, Tensor) else f"{value.dtype}"
            name, advice = f"{name} ({facts})", "Convert it to a plain tensor of a standard dtype."
        else:
            advice = f"Use {_SENDABLE}."
        raise ModuleContractError(
            f"{place} is a {name}, which has no encoding for other processes. {advice} To send it as a pickle, which "
            f"can run code in the process that reads it, write {_ALLOW}."
        )


class _Decoder:
    """Reads values from a head."""

    def __init__(
        self, head: bytes, begin: int, blobs: Sequence[Tensor], classes: Mapping[str, type], allow_pickle: bool
    ) -> None:
        self._head, self._at, self._blobs = memoryview(head), begin, blobs
        self._classes, self._allow_pickle = classes, allow_pickle
        self._depth, self._made = 0, dict[tuple[Any, ...], Any]()
        self._handlers: dict[bytes, Callable[[], Any]] = {
            b"N": lambda: None,
            b"T": lambda: True,
            b"F": lambda: False,
            b"i": lambda: self._unpack("<q")[0],
            b"I": lambda: int.from_bytes(self._bytes(), "little", signed=True),
            b"f": lambda: self._unpack("<d")[0],
            b"c": lambda: complex(*self._unpack("<dd")),
            b"s": self._text,
            b"b": lambda: bytes(self._bytes()),
            b"y": lambda: bytearray(self._bytes()),
            b"l": self._items,
            b"D": self._floats,
            b"t": lambda: tuple(self._items()),
            b"e": lambda: set(self._items()),
            b"z": lambda: frozenset(self._items()),
            b"q": lambda: deque(self._items(), self.get()),
            b"d": self._pairs,
            b"C": lambda: Counter(self._pairs()),
            b"O": self._ordered_dict,
            b"g": self._defaultdict,
            b"S": lambda: torch.Size(self._items()),
            b"p": lambda: _DTYPES[self._text()],
            b"v": lambda: torch.device(self._text()),
            b"X": self._tensor,
            b"Y": self._sparse,
            b"A": self._array,
            b"a": self._numpy_scalar,
            b"u": lambda: np.str_(self._text()),
            b"w": lambda: np.bytes_(bytes(self._bytes())),
            b"P": lambda: Path(bytes(self._bytes()).decode("utf-8", "surrogateescape")),
            b"R": self._record,
            b"K": self._pickle,
        }

    @property
    def left(self) -> int:
        """Bytes that have not been read."""
        return len(self._head) - self._at

    def get(self) -> Any:
        """The next value."""
        self._depth += 1
        if self._depth > MAX_DEPTH + 10:  # the encoder does not count some inner values, such as a `maxlen`
            raise _damaged("it is nested too deeply")
        value = self._handlers[bytes(self._take(1))]()
        self._depth -= 1
        return value

    def _take(self, size: int) -> memoryview:
        if size > self.left:
            raise _damaged(f"{size} bytes are announced and {self.left} are left")
        self._at += size
        return self._head[self._at - size : self._at]

    def _unpack(self, format: str) -> tuple[Any, ...]:
        return struct.unpack(format, self._take(struct.calcsize(format)))

    def _bytes(self) -> memoryview:
        return self._take(self._unpack("<Q")[0])

    def _text(self) -> str:
        return bytes(self._bytes()).decode("utf-8", "surrogatepass")

    def _count(self, size: int = 1) -> int:
        """The number of items that follow, each of at least `size` bytes."""
        count = int(self._unpack("<Q")[0])
        if count > self.left // size:
            raise _damaged(f"{count} items are announced and {self.left} bytes are left")
        return count

    def _items(self) -> list[Any]:
        return [self.get() for _ in range(self._count())]

    def _floats(self) -> list[float]:
        count = self._count(8)
        return list(self._unpack(f"<{count}d"))

    def _pairs(self) -> dict[Any, Any]:
        result = {}
        for _ in range(self._count(2)):
            key = self.get()
            result[key] = self.get()
        return result

    def _ordered_dict(self) -> OrderedDict[Any, Any]:
        result = OrderedDict(self._pairs())
        versions = self.get()
        if versions is not None:
            result._metadata = versions  # type: ignore[attr-defined]
        return result

    def _defaultdict(self) -> defaultdict[Any, Any]:
        pairs, name = self._pairs(), self._text()
        return defaultdict(_FACTORIES[name] if name else None, pairs)

    def _record(self) -> Any:
        kind, cls = self._text(), self._classes.get(self._text())
        values = {}
        for _ in range(self._count(9)):
            field = self._text()
            if not field.isidentifier() or field.startswith("__"):
                raise _damaged(f"{field!r} is not the name of a field")
            values[field] = self.get()
        if kind == "tuple":
            known = cls is not None and getattr(cls, "_fields", None) == tuple(values)
            return tuple.__new__(cls, values.values()) if known and cls is not None else tuple(values.values())
        if cls is None or not is_dataclass(cls):
            return SimpleNamespace(**values)
        made = object.__new__(cls)
        for field, value in values.items():
            object.__setattr__(made, field, value)  # the class may be frozen; its __init__ is not called
        return made

    def _shape(self) -> tuple[int, ...]:
        shape = self._unpack(f"<{self._unpack('<B')[0]}Q")
        if math.prod(length or 1 for length in shape) >= 2**63:
            raise _damaged(f"a tensor has the shape {shape}")
        return shape

    def _raw(self, make: Callable[[Tensor], Any], key: tuple[Any, ...]) -> Any:
        """The result of `make` for the bytes of a tensor. Values that shared a blob become one object."""
        if bytes(self._take(1)) == b"<":
            data = self._bytes()
            flat = torch.empty(len(data), dtype=torch.uint8, device="cpu")
            flat.numpy()[:] = np.frombuffer(data, dtype=np.uint8)
            return make(flat)
        (index,) = self._unpack("<Q")
        made = (index, *key)
        if made not in self._made:
            self._made[made] = make(self._blobs[index])
        return self._made[made]

    def _tensor(self) -> Tensor:
        dtype, shape = _DTYPES[self._text()], self._shape()
        made: Tensor = self._raw(lambda flat: flat.view(dtype).reshape(shape), (dtype, shape))
        return made

    def _sparse(self) -> Tensor:
        layout, names = _LAYOUTS[self._text()]
        shape, coalesced = torch.Size(self._shape()), self.get()
        parts = []
        for _ in names:
            if bytes(self._take(1)) != b"X":
                raise _damaged("a part of a sparse tensor is not a tensor")
            parts.append(self._tensor())
        # Indices out of range would make torch read and write memory outside the tensor.
        if layout is torch.sparse_coo:
            indices, values = parts
            is_coalesced = coalesced or None
            return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True, is_coalesced=is_coalesced)
        outer, inner, values = parts
        return torch.sparse_compressed_tensor(outer, inner, values, shape, layout=layout, check_invariants=True)

    def _numpy_dtype(self) -> np.dtype[Any]:
        name = self._text()
        if not _NUMPY_DTYPE.fullmatch(name):
            raise _damaged(f"{name!r} is not a dtype of an array")
        return np.dtype(name)

    def _numpy_scalar(self) -> Any:
        dtype = self._numpy_dtype()
        return np.frombuffer(self._bytes(), dtype=dtype)[0]

    def _array(self) -> Any:
        dtype, shape = self._numpy_dtype(), self._shape()
        return self._raw(lambda flat: flat.numpy().view(dtype).reshape(shape), (dtype, shape))

    def _pickle(self) -> Any:
        data = self._bytes()
        if not self._allow_pickle:
            raise ModuleContractError(
                f"another process sent a pickle, and this one does not load pickles. Write on every process {_ALLOW}."
            )
        return pickle.loads(data)
