"""What is known of a tensor file without its tensors: the header, and the chunk hashes by name and range of elements.

The header is that of the safetensors format: 8 bytes of its length, and JSON with dtype, shape and offsets of each
tensor. A chunk has `CHUNK_BYTES` of the contiguous row-major bytes of a tensor; the last one may be shorter. So the
chunks of a tensor depend on its values, dtype and shape alone, and not on its place in files or on ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainstack.checkpointing.checksums import (
    ALGORITHM,
    CHUNK_BYTES,
    CheckedReader,
    Chunk,
    FileRecord,
    check_file,
    digest,
    is_digest,
    open_recorded,
)
from trainstack.checkpointing.field_types import build, short
from trainstack.checkpointing.format import ITEM_BYTES, MAX_DIMENSIONS, RESERVED, check_shape
from trainstack.checkpointing.regular_files import check_json_memory, check_memory
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
        return ITEM_BYTES[self.dtype]

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.item_size


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
    if entry.dtype not in ITEM_BYTES or len(entry.shape) > MAX_DIMENSIONS:
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


Layout = list[tuple[str, str, list[int]]]
"""Name, name of the dtype and shape of each tensor of a file, in its order."""


def render_header(entries: Mapping[str, TensorEntry]) -> bytes:
    """Return the header of a file with these tensors, its length included."""
    header: dict[str, Any] = {RESERVED: {"format": "pt"}}
    start = 0
    for name, entry in entries.items():
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [start, start + entry.size]}
        start += entry.size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so the data begins aligned
    return len(text).to_bytes(8, "little") + text


def check_tensors(path: Path, record: FileRecord, index: FileIndex | None) -> None:
    """Read a tensor file and compare all its hashes; keeps no tensor in memory.

    Args:
        path: of the file.
        record: what the manifest says of it.
        index: what the index says of it; None for a checkpoint of format version 1, which has none.

    Raises:
        CheckpointDamagedError: size, header or a tensor are not as they were written.
    """
    if index is None:
        check_file(path, record)
        return
    with open_recorded(path, record.size) as reader:
        read_header(reader, index)
        reader.read_chunks(index.chunks(reader.position))


def read_header(reader: CheckedReader, index: FileIndex | None) -> Layout:
    """Read the header and return its tensors in file order; they fill the file without a gap."""
    try:
        length_bytes = reader.read(8)
        length = int.from_bytes(length_bytes, "little")
        if 8 + length > reader.size:
            raise ValueError("its length exceeds the file")
        check_memory(reader.path, length)
        text = reader.read(length)
        if index is not None and digest(length_bytes + text) != index.header:
            raise ValueError("its hash differs")
        check_json_memory(reader.path, text)
        layout = _parse_header(text, reader.size - reader.position)
        if index is not None and not _agree(layout, index):
            raise ValueError("the index has other tensors")
        return layout
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointDamagedError(
            f"{reader.path} is damaged: its header is not valid ({error}). Load another checkpoint."
        ) from error


def _agree(layout: Layout, index: FileIndex) -> bool:
    theirs = [(name, entry.dtype, entry.shape) for name, entry in index.tensors.items()]
    return layout == theirs


def _parse_header(text: bytes, available: int) -> Layout:
    entries = json.loads(text)
    if type(entries) is not dict:
        raise ValueError("it is no JSON object")
    entries.pop(RESERVED, None)
    places = [(_place(name, entry), name) for name, entry in entries.items()]
    position = 0
    layout: Layout = []
    for (start, end), name in sorted(places, key=lambda item: item[0]):  # tensors without bytes keep their order
        dtype, shape = str(entries[name].get("dtype")), entries[name].get("shape")
        if dtype not in ITEM_BYTES:
            raise ValueError(f"the dtype of {short(name)} is unknown")
        if start != position or end - start != check_shape(shape) * ITEM_BYTES[dtype]:
            raise ValueError(f"the entry of {short(name)} does not fit")
        layout.append((name, dtype, shape))
        position = end
    if position != available:
        raise ValueError("the tensors do not fill the file")
    return layout


def _place(name: str, entry: Any) -> tuple[int, int]:
    place = entry.get("data_offsets") if type(entry) is dict else None
    if type(place) is not list or len(place) != 2 or not all(type(offset) is int for offset in place):
        raise ValueError(f"the entry of {short(name)} has no place")
    return place[0], place[1]
