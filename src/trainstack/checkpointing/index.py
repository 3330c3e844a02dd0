"""The index of a tensor file: its header, and the hashes of its chunks by tensor name and range of elements.

The header is that of the safetensors format: 8 bytes of its length, and JSON with dtype, shape and offsets of each
tensor. A chunk has `CHUNK_BYTES` of the contiguous row-major bytes of a tensor; the last one may be shorter. So the
chunks of a tensor depend only on its values, dtype and shape, and not on its position in files or on ranks.

In format version 3 the rows of each tensor are distributed over the files of several processes. There a `RowGrid`
determines the chunks. If a file has a part of a chunk, the index has the hash of that part and that of the whole chunk.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from trainstack.checkpointing.checksums import (
    ALGORITHM,
    CHUNK_BYTES,
    CheckedReader,
    Chunk,
    FileRecord,
    PaceFn,
    check_file,
    digest,
    is_digest,
    open_recorded,
)
from trainstack.checkpointing.field_types import build, fits_type, short
from trainstack.checkpointing.format import ITEM_BYTES, MAX_DIMENSIONS, RESERVED, check_shape
from trainstack.checkpointing.regular_files import check_json_memory, check_memory
from trainstack.checkpointing.sharded.row_grid import RowGrid
from trainstack.errors import CheckpointDamagedError


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The entry of a tensor in the index.

    Attributes:
        dtype: its name in the header of a safetensors file.
        shape: of the tensor in the file.
        chunks: hashes by range of elements of the whole tensor, such as `"0:1048576"`, in ascending order.
        whole: the shape of the whole tensor, of which the file has consecutive rows; None in format version 2.
        first: the first of these rows.
    """

    dtype: str
    shape: list[int]
    chunks: dict[str, str]
    whole: list[int] | None = None
    first: int = 0

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return ITEM_BYTES[self.dtype]

    @property
    def size(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape) * self.item_size

    @property
    def start(self) -> int:
        """Bytes of the whole tensor before those in the file."""
        return self.first * math.prod(self.shape[1:]) * self.item_size

    @property
    def grid(self) -> RowGrid:
        """The chunks of format version 3."""
        return RowGrid.of(self.shape if self.whole is None else self.whole, self.item_size)

    def spans(self) -> Iterator[tuple[int, int]]:
        """First byte and end of each chunk, or part of one, in the whole tensor. Without elements, one empty span."""
        if self.whole is None:
            for first, end in ranges(math.prod(self.shape), self.item_size):
                yield first * self.item_size, end * self.item_size
        elif self.size == 0:
            yield 0, 0
        else:
            yield from self.grid.chunks(self.start, self.start + self.size)

    def key(self, span: tuple[int, int]) -> str:
        """The range of elements of a span of bytes, as in `chunks`."""
        return f"{span[0] // self.item_size}:{span[1] // self.item_size}"

    def digest_at(self, start: int) -> Callable[[memoryview], str]:
        """The hash function of the chunk, or part of one, that begins at this byte of the whole tensor."""
        return digest if self.whole is None else partial(self.grid.digest, start=start)


@dataclass(frozen=True, slots=True)
class FileIndex:
    """The entry of a tensor file in the index.

    Attributes:
        header: the hash of the header, with the 8 bytes of its length.
        tensors: by name, in the order of the file.
    """

    header: str
    tensors: dict[str, TensorEntry]

    def to_json(self) -> dict[str, Any]:
        """The entry in the form of an index."""
        tensors = {}
        for name, entry in self.tensors.items():
            rows = {} if entry.whole is None else {"whole": entry.whole, "first": entry.first}
            tensors[name] = {"dtype": entry.dtype, "shape": entry.shape, **rows, "chunks": entry.chunks}
        return {"header": self.header, "tensors": tensors}

    @property
    def combined(self) -> str:
        """The hash of the file in a manifest: of all its hashes in the order of its bytes, one in each line."""
        hashes = (value for entry in self.tensors.values() for value in entry.chunks.values())
        return digest("\n".join([self.header, *hashes]).encode())

    def chunks(self, start: int, targets: Mapping[str, memoryview] | None = None) -> Iterator[Chunk]:
        """The chunks with the tensors of the file; the first is at `start`. `targets` receive the bytes, by name."""
        for name, entry in self.tensors.items():
            view = None if targets is None else targets.get(name)
            total = math.prod(entry.shape if entry.whole is None else entry.whole)
            for span, (key, expected) in zip(entry.spans(), entry.chunks.items(), strict=True):
                place, size = span[0] - entry.start, span[1] - span[0]
                label = f"tensor {name!r}, elements {key.replace(':', ' to ')} of {total},"
                target = None if view is None else view[place : place + size]
                if size:
                    yield Chunk(start, size, expected, label, target, entry.digest_at(span[0]))
                start += size


def ranges(elements: int, item_size: int) -> Iterator[tuple[int, int]]:
    """First element and end of each chunk. A tensor without elements has one chunk without bytes."""
    step = CHUNK_BYTES // item_size
    for first in range(0, max(elements, 1), step):
        yield first, min(first + step, elements)


def render(files: Mapping[str, FileIndex], joined: Joined | None = None) -> bytes:
    """Return the bytes of the index of these tensor files, by name; see `root_of` for `joined`."""
    return render_listing(
        {file: one.to_json() for file, one in files.items()}, {} if joined is None else {"joined": joined}
    )


def render_listing(files: Mapping[str, Any], more: Mapping[str, Any]) -> bytes:
    """Return the bytes of an index of these files, with `more`."""
    body = {"hash": ALGORITHM, "chunk_bytes": CHUNK_BYTES, "files": files, **more}
    return (json.dumps(body, separators=(",", ":")) + "\n").encode("ascii")


Joined = dict[str, dict[str, str]]
"""The hashes of the chunks that are divided over several files, by tensor and range of elements."""


def root_of(files: Iterable[FileIndex], joined: Joined | None = None) -> str:
    """Return the hash over all chunks of all tensors, ordered by name and range, independent of their files.

    Args:
        files: of the checkpoint.
        joined: the hashes of chunks that are divided over several files; None in format version 2.
    """
    entries = sorted(
        (item for file in files for item in file.tensors.items()), key=lambda item: (item[0], item[1].first)
    )
    if joined is None:
        lines = (
            json.dumps([name, entry.dtype, entry.shape, place, value])
            for name, entry in entries
            for place, value in entry.chunks.items()
        )
        return digest("\n".join(lines).encode())
    whole: dict[tuple[str, int], str] = {}
    for name, entry in entries:
        grid, head = entry.grid, [name, entry.dtype, entry.whole]
        for span, (key, value) in zip(entry.spans(), entry.chunks.items(), strict=True):
            if not entry.size or grid.chunk_at(span[0]) == span:
                whole[name, span[0]] = json.dumps([*head, key, value])
            else:
                chunk = grid.chunk_at(span[0])
                key = entry.key(chunk)
                whole[name, chunk[0]] = json.dumps([*head, key, joined[name][key]])
    return digest("\n".join(line for _, line in sorted(whole.items())).encode())


def parse(data: bytes, path: Path) -> dict[str, FileIndex]:
    """Return the index in `data`, the content of the file `path`, with every field validated.

    Raises:
        CheckpointDamagedError: it is not a result of `render`.
    """
    return _parsed(data, path, sharded=False)[0]


def parse_sharded(data: bytes, path: Path) -> tuple[dict[str, FileIndex], Joined]:
    """`parse` for format version 3; also returns the hashes of the chunks that are divided over several files.

    It checks that the files contain each row of each whole tensor once.
    """
    files, body = _parsed(data, path, sharded=True)
    try:
        joined: Any = body.get("joined")
        if not fits_type(joined, dict[str, dict[str, str]]):
            raise ValueError("it has no hashes of joined chunks")
        if not all(is_digest(value) for chunks in joined.values() for value in chunks.values()):
            raise ValueError("the hash of a joined chunk is not a hash")
        shared: dict[str, list[str]] = {}
        for name, entries in runs_of(files).items():
            check_runs(name, entries)
            found = {entry.key(chunk) for entry in entries for chunk in split_chunks(entry)}
            if found:
                shared[name] = sorted(found)
        if {name: sorted(chunks) for name, chunks in joined.items()} != shared:
            raise ValueError("its joined chunks are not those that several files share")
    except ValueError as error:
        raise _not_an_index(path, error) from error
    return files, joined


def runs_of(files: Mapping[str, FileIndex]) -> dict[str, list[TensorEntry]]:
    """The entries of each tensor, in the order of their rows."""
    found: dict[str, list[TensorEntry]] = {}
    for file in files.values():
        for name, entry in file.tensors.items():
            found.setdefault(name, []).append(entry)
    return {name: sorted(entries, key=lambda one: one.first) for name, entries in found.items()}


def check_runs(name: str, entries: list[TensorEntry]) -> None:
    """Refuse entries, in the order of their rows, that do not contain each row of one tensor once.

    Raises:
        ValueError: the message names the tensor and the first row that is missing or occurs twice.
    """
    whole, row = entries[0].whole, 0
    for entry in entries:
        if (entry.dtype, entry.whole) != (entries[0].dtype, whole):
            raise ValueError(f"two files have another dtype or shape of {short(name)}")
        if entry.first != row:
            raise ValueError(f"row {min(row, entry.first)} of {short(name)} is in no file, or in two")
        row += entry.shape[0] if entry.shape else 1
    if row != (whole[0] if whole else 1):
        raise ValueError(f"row {row} of {short(name)} is in no file")


def split_chunks(entry: TensorEntry) -> Iterator[tuple[int, int]]:
    """The chunks of which `entry` has only a part; at most the first and the last."""
    for span in entry.spans() if entry.size else ():
        if (chunk := entry.grid.chunk_at(span[0])) != span:
            yield chunk


def parse_part(data: bytes, path: Path) -> tuple[dict[str, FileIndex], dict[str, Any]]:
    """The files in the listing of one rank for the main process, and the whole listing. Raises as `parse` does."""
    return _parsed(data, path, sharded=True)


def _parsed(data: bytes, path: Path, *, sharded: bool) -> tuple[dict[str, FileIndex], dict[str, Any]]:
    check_json_memory(path, data)
    try:
        body = json.loads(data)
        if type(body) is not dict or (body.get("hash"), body.get("chunk_bytes")) != (ALGORITHM, CHUNK_BYTES):
            raise ValueError(f"it is not an index of {ALGORITHM} over chunks of {CHUNK_BYTES} bytes")
        found = {file: _file_index(value, sharded) for file, value in _items(body.get("files"))}
    except (ValueError, RecursionError, MemoryError) as error:
        raise _not_an_index(path, error) from error
    return found, body


def _not_an_index(path: Path, error: BaseException) -> CheckpointDamagedError:
    return CheckpointDamagedError(f"{path} is not an index of a checkpoint: {error}. Load another checkpoint.")


def _file_index(body: Any, sharded: bool) -> FileIndex:
    given = _items(body.get("tensors") if type(body) is dict else None)
    tensors = {name: _entry(name, value, sharded) for name, value in given}
    index = build(FileIndex, body, tensors=tensors)
    if not is_digest(index.header):
        raise ValueError("the hash of a header is not a hash")
    return index


def _entry(name: str, body: Any, sharded: bool) -> TensorEntry:
    entry = build(TensorEntry, body, **({} if sharded else {"whole": None, "first": 0}))
    if entry.dtype not in ITEM_BYTES or len(entry.shape) > MAX_DIMENSIONS:
        raise ValueError(f"the dtype or shape of {short(name)} is unknown")
    if sharded:
        _check_rows(name, entry)
    count = max(1, -(-entry.size // CHUNK_BYTES))  # a lower bound, because a shape may claim any number of chunks
    if not count <= len(entry.chunks) <= 2 * count + 2 or not all(map(is_digest, entry.chunks.values())):
        raise ValueError(f"the chunks of {short(name)} are not those of its shape")
    if list(entry.chunks) != list(map(entry.key, islice(entry.spans(), len(entry.chunks) + 1))):
        raise ValueError(f"the chunks of {short(name)} have other bounds than those of its shape")
    return entry


def _check_rows(name: str, entry: TensorEntry) -> None:
    """Refuse a shape that cannot be that of consecutive rows of the whole tensor."""
    whole = entry.whole
    if whole is None or (check_shape(entry.shape) == 0) != (check_shape(whole) == 0):
        raise ValueError(f"{short(name)} has no rows")
    rows = entry.shape[0] if entry.shape else 1
    if whole[1:] != entry.shape[1:] or len(whole) != len(entry.shape) or entry.first + rows > (whole[:1] or [1])[0]:
        raise ValueError(f"the rows of {short(name)} are not rows of the whole tensor")


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    if type(value) is not dict:
        raise ValueError(f"{short(value)} is not an object")
    return value.items()


Layout = list[tuple[str, str, list[int]]]
"""Name, name of the dtype and shape of each tensor of a file, in its order."""


def render_header(entries: Mapping[str, TensorEntry]) -> bytes:
    """Return the header of a file with these tensors, including its length."""
    header: dict[str, Any] = {RESERVED: {"format": "pt"}}
    start = 0
    for name, entry in entries.items():
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [start, start + entry.size]}
        start += entry.size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # aligns the data to 8 bytes, the largest element size
    return len(text).to_bytes(8, "little") + text


def check_tensors(path: Path, record: FileRecord, index: FileIndex | None, pace: PaceFn | None = None) -> None:
    """Read a tensor file and compare all its hashes. It keeps no tensor in memory.

    Args:
        path: of the file.
        record: its entry in the manifest.
        index: its entry in the index; None for a checkpoint of format version 1, which has no index.
        pace: may slow down the reading.

    Raises:
        CheckpointDamagedError: size, header or a tensor differ from the written ones.
    """
    if index is None:
        check_file(path, record, pace)
        return
    with open_recorded(path, record.size, pace) as reader:
        read_header(reader, index)
        reader.read_chunks(index.chunks(reader.position))


def read_header(reader: CheckedReader, index: FileIndex | None) -> Layout:
    """Read the header and return its tensors in file order. It checks that they fill the file without a gap."""
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
        raise ValueError("it is not a JSON object")
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
