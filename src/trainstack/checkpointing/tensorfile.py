"""Tensor files in the safetensors format, hashed in the same pass that writes or reads them.

The format is 8 bytes of header length, a JSON header with dtype, shape and place of each tensor, and
the bytes of the tensors. Written by hand because the safetensors package offers no way to hash what
it writes or to decode what was hashed without a further copy of everything.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainstack.checkpointing.checksums import FileRecord, HashingReader, HashingWriter, open_recorded
from trainstack.checkpointing.encoding import RESERVED
from trainstack.checkpointing.format import BY_NATIVE_NAME, NATIVE
from trainstack.errors import CheckpointDamagedError, CheckpointError


def write_tensors(writer: HashingWriter, tensors: dict[str, torch.Tensor]) -> None:
    """Write the tensors; one at a time is brought to the CPU and made contiguous."""
    if sys.byteorder != "little":
        raise CheckpointError("checkpoints can only be written and read on little-endian machines.")
    # wide elements first: so each tensor is aligned, as readers that map the file need it
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    writer.write(_header(ordered))
    for _, tensor in ordered:
        if tensor.numel():
            flat = tensor.detach().resolve_conj().resolve_neg()
            plain = flat.to("cpu").contiguous()  # apex O1 lets .cpu() give float32
            writer.write(_bytes_of(plain))


def read_tensors(path: Path, record: FileRecord) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, each in memory of its own on the CPU, in the file's order.

    Raises:
        CheckpointDamagedError: size, hash or header are not as they were written.
    """
    with open_recorded(path, record) as reader:
        tensors = _read_all(reader, record.size, path)
        reader.finish(record)
        return tensors


def map_tensors(path: Path, record: FileRecord) -> dict[str, torch.Tensor]:
    """As `read_tensors`, but the tensors are the mapped file; a page that is written to becomes memory of its own."""
    with open_recorded(path, record) as reader:
        mapping = reader.map()
        reader.finish(record)
        header = _read_header(mapping.read, record.size, path)
        tensors, start = {}, mapping.tell()
        for name, dtype, shape in header:
            size = math.prod(shape) * dtype.itemsize
            flat = torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=start) if size else torch.empty(0)
            tensors[name] = flat.view(dtype).reshape(shape)
            start += size
        return tensors


def read_unverified_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file that no manifest speaks for; otherwise as `read_tensors`."""
    size = path.stat().st_size
    with open_recorded(path, FileRecord(size=size, xxh3_128="")) as reader:
        return _read_all(reader, size, path)


def read_placeholders(path: Path, record: FileRecord) -> dict[str, torch.Tensor]:
    """Return tensors of the names, dtypes and shapes of a file, without memory or values; as `read_tensors`."""
    with open_recorded(path, record) as reader:
        layout = _read_header(reader.read, record.size, path)
        return {name: torch.zeros((), dtype=dtype).expand(shape) for name, dtype, shape in layout}


def _read_all(reader: HashingReader, size: int, path: Path) -> dict[str, torch.Tensor]:
    header = _read_header(reader.read, size, path)
    tensors = {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in header}
    reader.read_into_all(_bytes_of(tensor) for tensor in tensors.values() if tensor.numel())
    return tensors


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _header(ordered: list[tuple[str, torch.Tensor]]) -> bytes:
    entries: dict[str, Any] = {RESERVED: {"format": "pt"}}
    start = 0
    for name, tensor in ordered:
        end = start + tensor.numel() * tensor.element_size()
        native = NATIVE.get(tensor.dtype)
        shape = list(tensor.shape) if native else [end - start]
        entries[name] = {"dtype": native or "U8", "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so the data begins aligned
    return len(text).to_bytes(8, "little") + text


def _read_header(read: Callable[[int], bytes], size: int, path: Path) -> list[tuple[str, torch.dtype, list[int]]]:
    try:
        length = int.from_bytes(read(8), "little")
        if 8 + length > size:
            raise ValueError("its length exceeds the file")
        entries = json.loads(read(length))
        entries.pop(RESERVED, None)
        return _layout(entries, size - 8 - length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamagedError(
            f"{path} is damaged: its header is not valid ({error}). Load another checkpoint."
        ) from error


def _layout(entries: dict[str, Any], available: int) -> list[tuple[str, torch.dtype, list[int]]]:
    """Return the tensors in file order; they fill the file without a gap."""
    layout = []
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        start, end = entry["data_offsets"]
        dtype, shape = BY_NATIVE_NAME[entry["dtype"]], entry["shape"]
        negative = any(type(length) is not int or length < 0 for length in shape)
        if negative or start != position or end - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"the entry of {name!r} does not fit")
        layout.append((name, dtype, shape))
        position = end
    if position != available:
        raise ValueError("the tensors do not fill the file")
    return layout
