"""Tensor files are safetensors files: what we write others read, and the reverse."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.checkpointing.support import raw, same
from trainstack.checkpointing.checksums import FileRecord, HashingWriter, digest
from trainstack.checkpointing.dtypes import NATIVE
from trainstack.checkpointing.tensorfile import read_tensors, write_tensors
from trainstack.errors import CheckpointDamagedError

TENSORS = {str(dtype): torch.arange(2 * dtype.itemsize, dtype=torch.uint8).view(dtype) for dtype in NATIVE} | {
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "turned": torch.arange(6).reshape(2, 3).T,
    "ü.weight": torch.ones(3, dtype=torch.bfloat16),
}
TENSORS.pop("torch.bool")


def write(path: Path, tensors: dict[str, torch.Tensor]) -> FileRecord:
    with open(path, "wb") as handle:
        writer = HashingWriter(handle)
        write_tensors(writer, tensors)
    return writer.record()


def test_the_safetensors_package_reads_what_we_write(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", TENSORS)
    found = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert found.keys() == TENSORS.keys()
    assert all(same(found[name], tensor.contiguous()) for name, tensor in TENSORS.items())


def test_we_read_what_the_safetensors_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file({name: t.contiguous() for name, t in TENSORS.items()}, path, {"format": "pt"})
    data = path.read_bytes()
    found = read_tensors(path, FileRecord(size=len(data), xxh3_128=digest(data)))
    assert all(same(found[name], tensor.contiguous()) for name, tensor in TENSORS.items())


def test_loaded_tensors_own_their_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    record = write(path, TENSORS)
    found = read_tensors(path, record)
    path.unlink()
    found["scalar"].fill_(7.0)
    places = [tensor.untyped_storage().data_ptr() for tensor in found.values() if tensor.numel()]
    assert len(set(places)) == len(places)
    assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in found.values())


def test_tensors_larger_than_a_chunk(tmp_path: Path) -> None:
    tensor = torch.randn(3_000_001)
    record = write(tmp_path / "a", {"t": tensor, "u": tensor[:7]})
    assert raw(read_tensors(tmp_path / "a", record)["t"]) == raw(tensor)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"not json",
        b'{"a": 3}',
        b'{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b"{}",
    ],
)
def test_a_nonsensical_header_is_damage_even_if_the_hash_agrees(tmp_path: Path, header: bytes) -> None:
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(CheckpointDamagedError, match="header"):
        read_tensors(tmp_path / "a", FileRecord(size=len(data), xxh3_128=digest(data)))
