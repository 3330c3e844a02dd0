"""The chunk hashes of a checkpoint's tensors, by name and range of elements.

A chunk has `CHUNK_BYTES` of the contiguous row-major bytes of a tensor; the last one may be shorter. So the chunks of a
tensor depend on its values, dtype and shape alone, and not on its place in files or on ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainstack.checkpointing.checksums import ALGORITHM, CHUNK_BYTES, Chunk, digest, is_digest
from trainstack.checkpointing.field_types import build, short
from trainstack.checkpointing.format import BY_NATIVE_NAME, MAX_DIMENSIONS
from trainstack.checkpointing.regular_files import check_json_memory
from trainstack.errors import CheckpointDamagedError


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The entry of a tensor in the index.

    Attributes:
        dtype: its name in the header of a safetensors file.
        shape: of the whole tensor.
        chunks: hashes by range of elements, such as `"0:1048576"`, in ascending order.
    """

    dtype: str
    shape: list[int]
    chunks: dict[str, str]

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return BY_NATIVE_NAME[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class FileIndex:
    """The entry of a tensor file in the index.

    Attributes:
        header: the hash of the header, with the 8 bytes of its length.
        tensors: by name, in the order of the file.
    """

    header: str
    tensors: dict[str, TensorEntry]

    @property
    def combined(self) -> str:
        """The hash that a manifest has of the file: of all its hashes in the order of its bytes, a line each."""
        hashes = (value for entry in self.tensors.values() for value in entry.chunks.values())
        return digest("\n".join([self.header, *hashes]).encode())

    def chunks(self, start: int, targets: Mapping[str, memoryview] | None = None) -> Iterator[Chunk]:
        """The parts of the file that hold tensors; the first begins at `start`. `targets` take the bytes by name."""
        for name, entry in self.tensors.items():
            view = None if targets is None else targets.get(name)
            total = math.prod(entry.shape)
            for (first, end), expected in zip(ranges(total, entry.item_size), entry.chunks.values(), strict=True):
                place, size = first * entry.item_size, (end - first) * entry.item_size
                label = f"tensor {name!r}, elements {first} to {end} of {total},"
                if size:
                    yield Chunk(start, size, expected, label, None if view is None else view[place : place + size])
                start += size


def ranges(elements: int, item_size: int) -> Iterator[tuple[int, int]]:
    """First element and end of each chunk; a tensor without elements has one chunk without bytes."""
    step = CHUNK_BYTES // item_size
    for first in range(0, max(elements, 1), step):
        yield first, min(first + step, elements)


def render(files: Mapping[str, FileIndex]) -> bytes:
    """Return the bytes of the index of these tensor files, by name."""
    body = {
        "hash": ALGORITHM,
        "chunk_bytes": CHUNK_BYTES,
        "files": {
            file: {
                "header": index.header,
                "tensors": {
                    name: {"dtype": entry.dtype, "shape": entry.shape, "chunks": entry.chunks}
                    for name, entry in index.tensors.items()
                },
            }
            for file, index in files.items()
        },
    }
    return (json.dumps(body, separators=(",", ":")) + "\n").encode("ascii")


def root_of(files: Iterable[FileIndex]) -> str:
    """Return the hash over all chunks of all tensors, ordered by name and range, whatever their files are."""
    entries = sorted((item for file in files for item in file.tensors.items()), key=lambda item: item[0])
    lines = (
        json.dumps([name, entry.dtype, entry.shape, place, value])
        for name, entry in entries
        for place, value in entry.chunks.items()
    )
    return digest("\n".join(lines).encode())


def parse(data: bytes, path: Path) -> dict[str, FileIndex]:
    """Return the index in `data`, the content of the file `path`, every field validated.

    Raises:
        CheckpointDamagedError: it is not one that `render` returns.
    """
    check_json_memory(path, data)
    try:
        body = json.loads(data)
        if type(body) is not dict or (body.get("hash"), body.get("chunk_bytes")) != (ALGORITHM, CHUNK_BYTES):
            raise ValueError(f"it is not an index of {ALGORITHM} over chunks of {CHUNK_BYTES} bytes")
        found = {file: _file_index(value) for file, value in _items(body.get("files"))}
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointDamagedError(
            f"{path} is not an index of a checkpoint: {error}. Load another checkpoint."
        ) from error
    return found


def _file_index(body: Any) -> FileIndex:
    tensors = {name: _entry(name, value) for name, value in _items(body.get("tensors") if type(body) is dict else None)}
    index = build(FileIndex, body, tensors=tensors)
    if not is_digest(index.header):
        raise ValueError("the hash of a header is not a hash")
    return index


def _entry(name: str, body: Any) -> TensorEntry:
    entry = build(TensorEntry, body)
    if entry.dtype not in BY_NATIVE_NAME or len(entry.shape) > MAX_DIMENSIONS:
        raise ValueError(f"the dtype or shape of {short(name)} is unknown")
    elements = math.prod(entry.shape)
    count = max(1, -(-elements * entry.item_size // CHUNK_BYTES))
    if count != len(entry.chunks) or not all(map(is_digest, entry.chunks.values())):
        raise ValueError(f"the chunks of {short(name)} are not those of its shape")
    if list(entry.chunks) != [f"{first}:{end}" for first, end in ranges(elements, entry.item_size)]:
        raise ValueError(f"the chunks of {short(name)} have other borders than those of its shape")
    return entry


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    if type(value) is not dict:
        raise ValueError(f"{short(value)} is not an object")
    return value.items()
