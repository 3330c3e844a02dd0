"""Short texts and hashes of values, with which ranks and runs compare their settings, data and weights."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from os import PathLike, fspath
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from trainstack._tensor_classes import inner_tensors, plain_parts

MAX_TEXT = 160
"""Longer texts are cut and end with a hash, so that a message about one fits on two lines."""
MAX_DEPTH = 6
"""Deeper levels of nested settings are described by their class, which also ends the recursion in cyclic objects."""
_MAX_PLACES = 32
"""Longer sequences in a sample, such as lists of tokens, have one hash instead of one for each item."""
CHUNK = 2**20
"""Elements whose weighted bits are computed at once: one int64 for each takes 8 MiB."""


def hash_text(text: str | bytes) -> str:
    """Return a hash of 16 hexadecimal digits: 64 bits of BLAKE2b."""
    return hashlib.blake2b(text if isinstance(text, bytes) else text.encode(), digest_size=8).hexdigest()


def shorten(text: str) -> str:
    """Return `text`, cut at `MAX_TEXT` characters; different texts stay different."""
    # 22 characters are "... (", 16 digits and ")".
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 22]}... ({hash_text(text)})"


def flatten(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield names and texts of the settings in `value`; dataclasses and mappings are taken apart."""
    if depth < MAX_DEPTH and dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if depth < MAX_DEPTH and isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flatten(f"{name}.{key}", item, depth + 1)
    else:
        yield name, shorten(describe(value, depth))


def describe(value: Any, depth: int = 0) -> str:
    """Return a text that is the same for equal values in all processes; for an unknown object only its class."""
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return f"tensor({value.item()!r})"
    if isinstance(value, Tensor | np.ndarray):
        return f"{type(value).__name__} {tuple(value.shape)} of {value.dtype}: {hash_value(value)}"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        return repr(value)
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, PathLike):
        return repr(fspath(value))
    if isinstance(value, FunctionType | MethodType | partial):
        return _describe_function(value, depth)
    if depth >= MAX_DEPTH:
        return type(value).__qualname__
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!s}: {describe(item, depth + 1)}" for key, item in value.items()) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(describe(item, depth + 1) for item in value)) + "}"
    if isinstance(value, list | tuple | range):
        return "[" + ", ".join(describe(item, depth + 1) for item in value) + "]"
    return type(value).__qualname__


def _describe_function(function: Any, depth: int) -> str:
    """Return the name and a hash of the code with its constants, its defaults and plain values of its closure."""
    if isinstance(function, partial):
        return f"partial({describe([function.func, function.args, function.keywords], depth + 1)})"
    inner = getattr(function, "__func__", function)
    held = [cell.cell_contents for cell in inner.__closure__ or () if _is_filled(cell)]
    parts = [hash_code(inner.__code__), describe([inner.__defaults__, inner.__kwdefaults__, held], depth + 2)]
    # 8 digits are enough to show a change of one function.
    return f"{inner.__qualname__} ({hash_text(repr(parts))[:8]})"


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


@lru_cache(maxsize=1024)  # all functions of a usual module and its dataset
def hash_code(code: CodeType) -> str:
    """Return a hash of byte code with its names and constants; equal in all processes of one version of Python.

    Line numbers and comments do not count.
    """
    return hash_text(repr(_code(code)))


def _code(code: CodeType) -> list[Any]:
    constants = [_code(item) if isinstance(item, CodeType) else describe(item) for item in code.co_consts]
    return [code.co_code.hex(), list(code.co_names), constants]


def describe_object(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield the class of `value`, its attributes that are plain values or functions, and those of objects in its lists.

    Objects of classes outside torch and trainstack are described only by their class, because their attributes may
    depend on the rank.
    """
    yield f"the class of {name}", type(value).__qualname__
    if type(value).__module__.partition(".")[0] not in ("torch", "trainstack"):
        return
    for key, item in getattr(value, "__dict__", {}).items():
        if isinstance(item, Optimizer) or (key.startswith("_") and callable(item)) or depth > 2:
            continue
        if isinstance(item, list | tuple) and any(_has_settings(one) for one in item):
            for position, one in enumerate(item):
                yield from describe_object(f"{name}, {key}[{position}]", one, depth + 1)
        elif not _has_settings(item):
            yield from ((f"{inner} of {name}", text) for inner, text in flatten(key.lstrip("_"), item, 1))


def _has_settings(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, type | FunctionType | MethodType | partial | Tensor)


# --- the bits of values on the host


def hash_value(value: Any) -> str:
    """Return a hash of all leaves of a nested value; of an unknown object only the class counts."""
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest, value, 0)
    return digest.hexdigest()


def hash_numbers(value: Any, place: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield hashes of the tensors, arrays, images and numbers of a nested value, such as a sample, by their place.

    Strings, paths and other objects are omitted, because file names may differ between hosts. A list of more than 32
    items has one hash of its numbers.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    items = range(len(value)) if isinstance(value, list | tuple) else value if isinstance(value, Mapping) else ()
    if depth < MAX_DEPTH and 0 < len(items) <= _MAX_PLACES:
        for key in items:
            yield from hash_numbers(value[key], f"{place}[{key!r}]", depth + 1)
    elif isinstance(value, list | tuple | Mapping):
        yield place, hash_value(_without_text(value))
    elif _is_number(value):
        yield place, hash_value(value)


def _without_text(value: Any, depth: int = 0) -> Any:
    if isinstance(value, Mapping) and depth < MAX_DEPTH:
        return {str(key): _without_text(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple) and depth < MAX_DEPTH:
        return [_without_text(item, depth + 1) for item in value]
    return value if _is_number(value) else None


def _is_number(value: Any) -> bool:
    """Whether a model may compute with `value` and its bits are accessible."""
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind in "biufc"
    return isinstance(value, Tensor | bool | int | float | complex) or _is_image(value)


def _is_image(value: Any) -> bool:
    """Whether `value` is a Pillow image; checked by its attributes, so that Pillow is not imported."""
    return callable(getattr(value, "tobytes", None)) and isinstance(getattr(value, "size", None), tuple)


def hash_around_tensors(value: Any) -> tuple[str, list[Tensor]]:
    """Return a hash of a nested value without the elements of its tensors, and these tensors. It reads no device."""
    digest, tensors = hashlib.blake2b(digest_size=8), list[Tensor]()
    _feed(digest, value, 0, tensors)
    return digest.hexdigest(), tensors


def _feed(digest: Any, value: Any, depth: int, tensors: list[Tensor] | None = None) -> None:
    """Update `digest` with all leaves of `value`; with a list `tensors`, tensors are appended to it, not hashed.

    Containers more than 32 levels deep are described, which ends the recursion in a container that contains itself.
    """
    if isinstance(value, Tensor):
        digest.update(f"{type(value).__name__}{tuple(value.shape)}{value.dtype}".encode())
        if tensors is not None:
            tensors.append(value)
            return
        for part in _dense_parts(value):
            for words in _words(part):
                digest.update(words.cpu().numpy().tobytes())
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest.update(f"{value.shape}{value.dtype.str}".encode() + value.tobytes())
    elif isinstance(value, bytes | bytearray):
        digest.update(bytes(value))
    elif isinstance(value, Mapping) and depth < 32:
        for key, item in value.items():
            digest.update(f"{key!s}=".encode())
            _feed(digest, item, depth + 1, tensors)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type) and depth < 32:
        _feed(digest, {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}, depth + 1, tensors)
    elif isinstance(value, list | tuple | np.ndarray) and depth < 32:
        digest.update(f"[{len(value)}".encode())
        for item in value:
            _feed(digest, item, depth + 1, tensors)
    elif _is_image(value):
        digest.update(f"{getattr(value, 'mode', '')}{value.size}".encode() + value.tobytes())
    else:
        digest.update(describe(value).encode())


# --- the bits of tensors on a device


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """Compute a 64-bit checksum of the bits of each tensor on its device, and read all of them in one transfer.

    The checksum is the sum modulo 2**64 of the words, each times an odd pseudo-random weight for its position. It
    therefore also changes if values change places, or if several changes have the sum 0. A strided tensor is read in
    logical order, so its strides do not count. No tensor is copied as a whole. Integers only, because MPS has no
    float64.
    """
    return read_checksums(start_checksums(tensors))


def start_checksums(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the checksums as 0-dim int64 tensors, each on the device of its tensor, without reading a device."""
    weights = dict[torch.device, tuple[Tensor, Tensor]]()
    return [_checksum(tensor.detach(), weights) for tensor in tensors]


def read_checksums(sums: Sequence[Tensor]) -> list[int]:
    """Return the values of the tensors from `start_checksums`, read in one transfer."""
    devices = {one.device for one in sums}
    target = sums[0].device if sums else torch.device("cpu")
    together = sums if len(devices) < 2 else [one.to(target) for one in sums]
    values: list[int] = torch.stack(list(together)).tolist() if together else []
    return values


def _checksum(tensor: Tensor, weights: dict[torch.device, tuple[Tensor, Tensor]]) -> Tensor:
    device = tensor.device
    if device.type == "meta":
        return torch.zeros((), dtype=torch.int64)
    total: Tensor | None = None
    for number, words in enumerate(words for part in _dense_parts(tensor) for words in _words(part)):
        for offset, chunk in enumerate(torch.split(words, CHUNK)):  # a chunk of float64 has two words an element
            if device not in weights or len(weights[device][0]) < len(chunk):
                made = _make_weights(1 << (len(chunk) - 1).bit_length(), device)
                weights[device] = made, torch.empty_like(made)
            # One buffer for all: with a new one for each chunk the heap of glibc grew by 8 MiB for each tensor.
            weight, products = (one[: len(chunk)] for one in weights[device])
            bits = products.copy_(chunk).mul_(weight).sum()
            total = bits if total is None else total + bits * _odd(2 * number + offset)
    return torch.zeros((), dtype=torch.int64, device=device) if total is None else total


def _make_weights(count: int, device: torch.device) -> Tensor:
    """Return odd int64 weights for the positions in a chunk, by mixing as in SplitMix64, without a generator."""
    weights = torch.arange(1, count + 1, device=device, dtype=torch.int64)
    # Constants of SplitMix64 (see `mix` in order.py) as signed 64-bit integers. The shifts carry high bits to low ones.
    for factor in (-7046029254386353131, -4658895280553007687, -7723592293110705685):
        weights *= factor
        weights ^= weights >> 29
    return weights.bitwise_or_(1)


def _odd(number: int) -> int:
    """Return an odd pseudo-random factor of 63 bits for a chunk; the shift by 1 keeps it within int64."""
    return int(hash_text(str(number)), 16) >> 1 | 1


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    """Return the strided tensors that hold the values of `tensor`."""
    if inner_tensors(tensor) is not None:
        return [dense for part in plain_parts(tensor) for dense in _dense_parts(part)]
    tensor = tensor.detach()
    if tensor.is_quantized:
        return [tensor.int_repr()]
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.is_nested:
        return list(tensor.unbind())
    return [tensor if tensor.layout is torch.strided else tensor.to_dense()]


_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Integer type for the bits of an element, by its size in bytes; 8 bytes are two words."""


def _words(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the bits of a strided tensor as 1-dim tensors of integers, of at most `CHUNK` elements each.

    The cuts depend only on the shape, so the checksum does not depend on the strides.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.numel() == 0:
        return
    if tensor.numel() <= CHUNK:
        flat = tensor.resolve_neg().contiguous().view(-1)
        yield flat.view(_WORD[flat.element_size()])
        return
    row = tensor.numel() // len(tensor)
    if row > CHUNK:
        for inner in tensor:
            yield from _words(inner)
    else:
        for rows in torch.split(tensor, CHUNK // row):
            yield from _words(rows)


def differing_names(mine: Mapping[str, str], theirs: Mapping[str, str]) -> Sequence[str]:
    """Return the names whose texts differ, in the order of `theirs`; names that `theirs` lacks come last."""
    names = dict.fromkeys([*theirs, *mine])
    return [name for name in names if mine.get(name) != theirs.get(name)]
