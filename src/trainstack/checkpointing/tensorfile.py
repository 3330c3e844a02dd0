"""Tensor files in the safetensors format, hashed in the pass that writes or reads them.

The format is a header, which `index.py` writes and reads, and the bytes of the tensors. The safetensors package is not
used, because it cannot hash the bytes that it writes, or decode hashed bytes without another copy of all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trainstack._deferred import DeferredTensor, whole
from trainstack._tensor_bytes import bytes_of
from trainstack.checkpointing.checksums import (
    CHUNK_BYTES,
    CheckedReader,
    Chunk,
    FileRecord,
    FileWriter,
    check_file,
    digest,
    open_recorded,
)
from trainstack.checkpointing.encoding import BY_NATIVE_NAME, NATIVE
from trainstack.checkpointing.index import FileIndex, TensorEntry, ranges, read_header, render_header
from trainstack.checkpointing.regular_files import check_memory
from trainstack.errors import CheckpointDamagedError, CheckpointError

_NOTHING = ("nothing", torch.empty(0))

RawTensor = tuple[str, torch.dtype, list[int]]
"""Name, dtype and shape of a tensor in a file."""


Rows = tuple[list[int], int]
"""The shape of a whole tensor, and the index of the first of its consecutive rows."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The tensors of one file, in its order.

    `tensors` may be an iterator that makes one tensor after the other, so that only one is in memory at a time. It has
    to yield the tensors of `layout` in that order. `rows` describes the rows of its tensors for a file of format
    version 3.
    """

    layout: list[RawTensor]
    tensors: Iterable[tuple[str, torch.Tensor]]
    rows: Mapping[str, Rows] | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], rows: Mapping[str, Rows] | None = None) -> TensorPart:
        """The part of existing tensors; for format version 3 with their `rows`."""
        # large elements first: each tensor is then aligned, which readers that map the file need
        ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
        return cls([(name, tensor.dtype, list(tensor.shape)) for name, tensor in ordered], ordered, rows)

    @property
    def size(self) -> int:
        """The approximate bytes of the file and of its part of the index."""
        tensors = [(name, _byte_count(dtype, shape)) for name, dtype, shape in self.layout]
        about = sum(2 * len(name) + 256 for name, _ in tensors)  # dtype, shape, offsets and a hash for each name
        return about + sum(size + 64 * (size // CHUNK_BYTES) for _, size in tensors)


OnPiece = Callable[[str, TensorEntry, int, memoryview], None]
"""Takes the name of a tensor, its entry, the first byte of a piece in the whole tensor, and the bytes."""


def write_tensors(writer: FileWriter, part: TensorPart, on_piece: OnPiece | None = None) -> FileIndex:
    """Write the tensors and return their hashes. One tensor at a time is copied to the CPU and made contiguous.

    Args:
        writer: of the file.
        part: the tensors.
        on_piece: called with each chunk.
    """
    if sys.byteorder != "little":
        raise CheckpointError("checkpoints can only be written and read on little-endian machines.")
    entries = _entries(part.layout, part.rows)
    header = render_header(entries)
    writer.write(header)
    given = iter(part.tensors)
    for name, entry in entries.items():
        found, tensor = next(given, _NOTHING)
        if found != name:
            raise CheckpointError(f"the tensors are not in the order of the layout: {name!r} expected, {found!r} came.")
        _write_tensor(writer, name, entry, tensor, on_piece)
    return FileIndex(digest(header), entries)


def _write_tensor(
    writer: FileWriter, name: str, entry: TensorEntry, tensor: torch.Tensor, on_piece: OnPiece | None
) -> None:
    """Write a tensor. A deferred one is freed at the end."""
    flat = whole(tensor).detach().resolve_conj().resolve_neg()
    plain = flat.to("cpu").contiguous()  # not `.cpu()`, which apex O1 replaces by one that returns float32
    data = _memory_of(plain) if plain.numel() else memoryview(b"")
    if len(data) != entry.size:
        raise CheckpointError(f"the tensors do not have the sizes of the layout: {name!r} has {len(data)} bytes.")
    start = entry.start
    for first, end in entry.spans():
        piece = data[first - start : end - start]
        entry.chunks[entry.key((first, end))] = entry.digest_at(first)(piece)
        if on_piece is not None:
            on_piece(name, entry, first, piece)
        writer.write(piece)


def read_tensors(path: Path, record: FileRecord, index: FileIndex | None) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, each in separate memory on the CPU, in the file's order.

    Args:
        path: of the file.
        record: its entry in the manifest.
        index: its entry in the index; None for a checkpoint of format version 1, which has no index.

    Raises:
        CheckpointDamagedError: size, header or a tensor differ from the written ones, or there is not enough memory.
    """
    if index is None:
        check_file(path, record)
    with open_recorded(path, record.size) as reader:
        return _read_all(reader, index)


def map_tensors(path: Path, record: FileRecord, index: FileIndex | None) -> dict[str, torch.Tensor]:
    """`read_tensors` without copies: the tensors are the mapped file, and a page becomes private when it is written."""
    if index is None:
        check_file(path, record)
    with open_recorded(path, record.size) as reader:
        return _map_all(reader, index)


DEFERRED_BYTES = 1 << 16
"""Tensors with more bytes are read at their use."""


def defer_tensors(
    path: Path, record: FileRecord, index: FileIndex | None, *, verified: bool = False
) -> dict[str, torch.Tensor]:
    """`read_tensors` with a `DeferredTensor` for each tensor of more than `DEFERRED_BYTES` bytes.

    All bytes are compared with their hashes now, unless they are already `verified`. Later reads are compared again.
    The file must not be moved as long as the tensors are used.
    """
    if index is None:
        return read_tensors(path, record, index)
    with open_recorded(path, record.size) as reader:
        tensors, targets = dict[str, torch.Tensor](), dict[str, memoryview]()
        layout = _layout(reader, index)
        start = reader.position
        for name, dtype, shape in layout:
            size = _byte_count(dtype, shape)
            if size > DEFERRED_BYTES:
                place = _StoredTensor(path, record.size, name, start, index.tensors[name])
                tensors[name] = DeferredTensor(shape, dtype, place.read, place.read_rows)
            else:
                tensors[name] = torch.empty(shape, dtype=dtype)
                targets |= {name: _memory_of(tensors[name])} if size else {}
            start += size
        chunks = index.chunks(reader.position, targets)
        reader.read_chunks((chunk for chunk in chunks if chunk.target is not None) if verified else chunks)
    return tensors


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """A tensor in a file, and its entry in the index."""

    path: Path
    file_size: int
    name: str
    start: int
    entry: TensorEntry

    def read(self) -> torch.Tensor:
        """The tensor, in separate memory.

        Raises:
            CheckpointDamagedError: the file no longer exists, or differs from the written one.
        """
        return self._read(0, self.entry.shape[0])

    def read_rows(self, first: int, end: int) -> torch.Tensor:
        """Rows `first` to `end`, without `end`. Other rows are read only if they share a chunk with these."""
        return self._read(first, end)

    def _read(self, first: int, end: int) -> torch.Tensor:
        entry = self.entry
        made = torch.empty([end - first, *entry.shape[1:]], dtype=BY_NATIVE_NAME[entry.dtype])
        if not made.numel():
            return made
        row = entry.size // entry.shape[0]
        target, begin, over = _memory_of(made), first * row, end * row
        edges = list[tuple[Chunk, int]]()

        def wanted() -> Iterator[Chunk]:
            for chunk in FileIndex("", {self.name: entry}).chunks(self.start):
                place = chunk.start - self.start
                if place >= over or place + chunk.size <= begin:
                    continue
                if begin <= place and place + chunk.size <= over:
                    yield replace(chunk, target=target[place - begin : place - begin + chunk.size])
                else:
                    edges.append((replace(chunk, target=memoryview(bytearray(chunk.size))), place))
                    yield edges[-1][0]

        with open_recorded(self.path, self.file_size) as reader:
            reader.read_chunks(wanted())
        for chunk, place in edges:
            assert chunk.target is not None
            low, high = max(place, begin), min(place + chunk.size, over)
            target[low - begin : high - begin] = chunk.target[low - place : high - place]
        return made


def read_unverified_tensors(path: Path, *, mapped: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file without a manifest.

    Otherwise like `read_tensors`, or, if `mapped`, like `map_tensors`.
    """
    with open_recorded(path, None) as reader:
        return _map_all(reader, None) if mapped else _read_all(reader, None)


def read_placeholders(path: Path, record: FileRecord, index: FileIndex | None) -> dict[str, torch.Tensor]:
    """Return tensors with the names, dtypes and shapes of a file, without memory or values. See `read_tensors`."""
    with open_recorded(path, record.size) as reader:
        layout = _layout(reader, index)
        return {name: torch.zeros((), dtype=dtype).expand(shape) for name, dtype, shape in layout}


def _map_all(reader: CheckedReader, index: FileIndex | None) -> dict[str, torch.Tensor]:
    layout = _layout(reader, index)
    start, tensors = reader.position, {}
    mapping = reader.map(index.chunks(start) if index else [])
    for name, dtype, shape in layout:
        size = _byte_count(dtype, shape)
        if start % dtype.itemsize:  # tensors in files of other libraries need not be aligned
            flat = torch.frombuffer(bytearray(mapping[start : start + size]), dtype=torch.uint8)
        else:
            flat = torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=start) if size else torch.empty(0)
        tensors[name] = flat.view(dtype).reshape(shape)
        start += size
    return tensors


def _read_all(reader: CheckedReader, index: FileIndex | None) -> dict[str, torch.Tensor]:
    layout = _layout(reader, index)
    check_memory(reader.path, reader.size)
    try:
        tensors = {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in layout}
    except (RuntimeError, MemoryError) as error:
        raise CheckpointDamagedError(
            f"{reader.path} is refused: not enough memory for {reader.size:,} bytes ({error})."
        ) from error
    targets = {name: _memory_of(tensor) for name, tensor in tensors.items() if tensor.numel()}
    start = reader.position
    reader.read_chunks(_unnamed(start, targets) if index is None else index.chunks(start, targets))
    return tensors


def _layout(reader: CheckedReader, index: FileIndex | None) -> list[RawTensor]:
    return [(name, BY_NATIVE_NAME[dtype], shape) for name, dtype, shape in read_header(reader, index)]


def _unnamed(start: int, targets: Mapping[str, memoryview]) -> Iterator[Chunk]:
    """The chunks of a file without hashes."""
    for name, view in targets.items():
        for first, end in ranges(len(view), 1):
            yield Chunk(start + first, end - first, None, name, view[first:end])
        start += len(view)


def _memory_of(tensor: torch.Tensor) -> memoryview:
    return bytes_of(tensor).numpy().data


def _byte_count(dtype: torch.dtype, shape: list[int]) -> int:
    count = dtype.itemsize
    for length in shape:
        count *= length
    return count


def _entries(layout: list[RawTensor], rows: Mapping[str, Rows] | None) -> dict[str, TensorEntry]:
    """The entries of the index, still without hashes. A tensor of a dtype that safetensors lacks is stored as bytes."""
    entries = {}
    for name, dtype, shape in layout:
        native = NATIVE.get(dtype)
        stored = shape if native else [_byte_count(dtype, shape)]
        whole, first = (None, 0) if rows is None else rows[name]
        if whole is not None and not native:
            whole, first = [_byte_count(dtype, whole)], first * _byte_count(dtype, whole[1:])
        entries[name] = TensorEntry(native or "U8", stored, {}, whole, first)
    return entries
