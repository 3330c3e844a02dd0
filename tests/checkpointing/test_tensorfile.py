"""Tensor files are safetensors files: what we write others read, and the reverse."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.checkpointing.support import raw, same
from trainstack.checkpointing import checksums, tensorfile
from trainstack.checkpointing.checksums import FileRecord, HashingReader, HashingWriter, digest
from trainstack.checkpointing.format import NATIVE
from trainstack.checkpointing.tensorfile import map_tensors, read_tensors, write_tensors
from trainstack.errors import CheckpointDamagedError

Reader = Callable[[Path, FileRecord], dict[str, torch.Tensor]]
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


@pytest.mark.parametrize("read", [read_tensors, map_tensors])
def test_we_read_what_the_safetensors_package_writes(tmp_path: Path, read: Reader) -> None:
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file({name: t.contiguous() for name, t in TENSORS.items()}, path, {"format": "pt"})
    data = path.read_bytes()
    found = read(path, FileRecord(size=len(data), xxh3_128=digest(data)))
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


def test_mapped_tensors_may_be_changed_and_the_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    record = write(path, TENSORS)
    data = path.read_bytes()
    found = map_tensors(path, record)
    for tensor in found.values():
        tensor.zero_()
    assert path.read_bytes() == data
    again = map_tensors(path, record)
    path.unlink()
    assert all(same(again[name], tensor.contiguous()) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("read", [read_tensors, map_tensors])
@pytest.mark.parametrize("readers", [1, 3])
def test_tensors_larger_than_a_chunk_and_many_small_ones(
    tmp_path: Path, read: Reader, readers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "READERS", readers)
    monkeypatch.setattr(checksums, "CHUNK_BYTES", 4096)
    tensor = torch.randn(30_001)
    tensors = {"t": tensor, "u": tensor[:7], **{f"small {i}": tensor[i : i + 3] for i in range(1000)}}
    record = write(tmp_path / "a", tensors)
    found = read(tmp_path / "a", record)
    assert all(raw(found[name]) == raw(tensor) for name, tensor in tensors.items())


def test_a_file_that_is_cut_off_while_it_is_read_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = write(tmp_path / "a", {"t": torch.randn(1000)})
    open_recorded = tensorfile.open_recorded

    @contextmanager
    def cutting(path: Path, record: FileRecord) -> Iterator[HashingReader]:
        with open_recorded(path, record) as reader:
            os.truncate(path, 3000)
            yield reader

    monkeypatch.setattr(tensorfile, "open_recorded", cutting)
    with pytest.raises(CheckpointDamagedError, match="ends too early"):
        read_tensors(tmp_path / "a", record)


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
@pytest.mark.parametrize("read", [read_tensors, map_tensors])
def test_a_nonsensical_header_is_damage_even_if_the_hash_agrees(tmp_path: Path, header: bytes, read: Reader) -> None:
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(CheckpointDamagedError, match="header"):
        read(tmp_path / "a", FileRecord(size=len(data), xxh3_128=digest(data)))
