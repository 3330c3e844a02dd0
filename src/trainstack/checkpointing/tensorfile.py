"""Tensor files in the safetensors format, hashed in the same pass that writes or reads them.

The format is a header, which `index.py` writes and reads, and the bytes of the tensors. Written by hand because the
safetensors package offers no way to hash what it writes or to decode what was hashed without a further copy of
everything.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

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


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The tensors of one file, in its order.

    `tensors` may be an iterator that makes one tensor after the other: a file is written with one of them in memory.
    It has to give what `layout` names, in that order.
    """

    layout: list[RawTensor]
    tensors: Iterable[tuple[str, torch.Tensor]]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> TensorPart:
        """The part of tensors that exist already."""
        # wide elements first: so each tensor is aligned, as readers that map the file need it
        ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
        return cls([(name, tensor.dtype, list(tensor.shape)) for name, tensor in ordered], ordered)

    @property
    def size(self) -> int:
        """About the bytes of the file and of its part of the index."""
        tensors = [(name, _byte_count(dtype, shape)) for name, dtype, shape in self.layout]
        about = sum(2 * len(name) + 256 for name, _ in tensors)  # dtype, shape, offsets and a hash beside a name
        return about + sum(size + 64 * (size // CHUNK_BYTES) for _, size in tensors)


def write_tensors(writer: FileWriter, part: TensorPart) -> FileIndex:
    """Write the tensors and return their hashes; one at a time is brought to the CPU and made contiguous."""
    if sys.byteorder != "little":
        raise CheckpointError("checkpoints can only be written and read on little-endian machines.")
    entries = _entries(part.layout)
    header = render_header(entries)
    writer.write(header)
    given = iter(part.tensors)
    for name, entry in entries.items():
        found, tensor = next(given, _NOTHING)
        flat = tensor.detach().resolve_conj().resolve_neg()
        plain = flat.to("cpu").contiguous()  # apex O1 lets .cpu() give float32
        data = _bytes_of(plain) if plain.numel() else memoryview(b"")
        if found != name or len(data) != entry.size:
            raise CheckpointError(f"the tensors do not come as the layout says: {name!r} was due, {found!r} came.")
        for first, end in ranges(len(data) // entry.item_size, entry.item_size):
            piece = data[first * entry.item_size : end * entry.item_size]
            entry.chunks[f"{first}:{end}"] = digest(piece)
            writer.write(piece)
    return FileIndex(digest(header), entries)


def read_tensors(path: Path, record: FileRecord, index: FileIndex | None) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, each in memory of its own on the CPU, in the file's order.

    Args:
        path: of the file.
        record: what the manifest says of it.
        index: what the index says of it; None for a checkpoint of format version 1, which has none.

    Raises:
        CheckpointDamagedError: size, header or a tensor are not as they were written, or there is not enough memory.
    """
    if index is None:
        check_file(path, record)
    with open_recorded(path, record.size) as reader:
        return _read_all(reader, index)


def map_tensors(path: Path, record: FileRecord, index: FileIndex | None) -> dict[str, torch.Tensor]:
    """As `read_tensors`, but the tensors are the mapped file; a page that is written to becomes memory of its own."""
    if index is None:
        check_file(path, record)
    with open_recorded(path, record.size) as reader:
        layout = _layout(reader, index)
        start, tensors = reader.position, {}
        mapping = reader.map(index.chunks(start) if index else [])
    for name, dtype, shape in layout:
        size = _byte_count(dtype, shape)
        flat = torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=start) if size else torch.empty(0)
        tensors[name] = flat.view(dtype).reshape(shape)
        start += size
    return tensors


def read_unverified_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file that no manifest speaks for; otherwise as `read_tensors`."""
    with open_recorded(path, None) as reader:
        return _read_all(reader, None)


def read_placeholders(path: Path, record: FileRecord, index: FileIndex | None) -> dict[str, torch.Tensor]:
    """Return tensors of the names, dtypes and shapes of a file, without memory or values; as `read_tensors`."""
    with open_recorded(path, record.size) as reader:
        layout = _layout(reader, index)
        return {name: torch.zeros((), dtype=dtype).expand(shape) for name, dtype, shape in layout}


def _read_all(reader: CheckedReader, index: FileIndex | None) -> dict[str, torch.Tensor]:
    layout = _layout(reader, index)
    check_memory(reader.path, reader.size)
    try:
        tensors = {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in layout}
    except (RuntimeError, MemoryError) as error:
        raise CheckpointDamagedError(
            f"{reader.path} is refused: no memory for {reader.size:,} bytes ({error})."
        ) from error
    targets = {name: _bytes_of(tensor) for name, tensor in tensors.items() if tensor.numel()}
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


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _byte_count(dtype: torch.dtype, shape: list[int]) -> int:
    count = dtype.itemsize
    for length in shape:
        count *= length
    return count


def _entries(layout: list[RawTensor]) -> dict[str, TensorEntry]:
    """The entries of the index, still without hashes; what safetensors does not know is a row of bytes there."""
    entries = {}
    for name, dtype, shape in layout:
        native = NATIVE.get(dtype)
        entries[name] = TensorEntry(native or "U8", shape if native else [_byte_count(dtype, shape)], {})
    return entries
