"""Tensor files are safetensors files: the safetensors package reads ours, and we read its files."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.checkpointing.support import raw, same
from trainstack.checkpointing import checksums, index, tensorfile
from trainstack.checkpointing.checksums import CheckedReader, FileRecord, FileWriter, digest
from trainstack.checkpointing.encoding import NATIVE
from trainstack.checkpointing.format import ITEM_BYTES
from trainstack.checkpointing.index import FileIndex
from trainstack.checkpointing.tensorfile import TensorPart, map_tensors, read_tensors, write_tensors
from trainstack.errors import CheckpointDamagedError, CheckpointError

Reader = Callable[[Path, FileRecord, FileIndex | None], dict[str, torch.Tensor]]
TENSORS = {str(dtype): torch.arange(2 * dtype.itemsize, dtype=torch.uint8).view(dtype) for dtype in NATIVE} | {
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "turned": torch.arange(6).reshape(2, 3).T,
    "ü.weight": torch.ones(3, dtype=torch.bfloat16),
}
TENSORS.pop("torch.bool")


def test_the_sizes_of_elements_are_those_of_torch() -> None:
    assert {name: dtype.itemsize for dtype, name in NATIVE.items()} == ITEM_BYTES


def write(path: Path, tensors: dict[str, torch.Tensor]) -> tuple[FileRecord, FileIndex]:
    with open(path, "wb") as handle:
        writer = FileWriter(handle)
        index = write_tensors(writer, TensorPart.of(tensors))
    return FileRecord(size=writer.size, hash=index.combined), index


def record_of(data: bytes) -> FileRecord:
    """Of a file that has a hash over all bytes and no index, as in format version 1."""
    return FileRecord(size=len(data), hash=digest(data))


def test_the_safetensors_package_reads_our_files(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", TENSORS)
    found = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert found.keys() == TENSORS.keys()
    assert all(same(found[name], tensor.contiguous()) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("read", [read_tensors, map_tensors])
def test_we_read_files_of_the_safetensors_package(tmp_path: Path, read: Reader) -> None:
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file({name: t.contiguous() for name, t in TENSORS.items()}, path, {"format": "pt"})
    data = path.read_bytes()
    found = read(path, record_of(data), None)
    assert all(same(found[name], tensor.contiguous()) for name, tensor in TENSORS.items())


def test_loaded_tensors_own_their_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    found = read_tensors(path, *write(path, TENSORS))
    path.unlink()
    found["scalar"].fill_(7.0)
    places = [tensor.untyped_storage().data_ptr() for tensor in found.values() if tensor.numel()]
    assert len(set(places)) == len(places)
    assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in found.values())


def test_mapped_tensors_may_be_changed_and_the_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    written = write(path, TENSORS)
    data = path.read_bytes()
    found = map_tensors(path, *written)
    for tensor in found.values():
        tensor.zero_()
    assert path.read_bytes() == data
    again = map_tensors(path, *written)
    path.unlink()
    assert all(same(again[name], tensor.contiguous()) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("read", [read_tensors, map_tensors])
@pytest.mark.parametrize("readers", [1, 3])
def test_large_tensors_and_many_small_ones_are_read_back(
    tmp_path: Path, read: Reader, readers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "READERS", readers)
    for module in (checksums, index):
        monkeypatch.setattr(module, "CHUNK_BYTES", 4096)
    tensor = torch.randn(30_001)
    tensors = {"t": tensor, "u": tensor[:7], **{f"small {i}": tensor[i : i + 3] for i in range(1000)}}
    found = read(tmp_path / "a", *write(tmp_path / "a", tensors))
    assert all(raw(found[name]) == raw(tensor) for name, tensor in tensors.items())


def test_a_file_truncated_while_it_is_read_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = write(tmp_path / "a", {"t": torch.randn(1000)})
    open_recorded = tensorfile.open_recorded

    @contextmanager
    def cutting(path: Path, size: int | None) -> Iterator[CheckedReader]:
        with open_recorded(path, size) as reader:
            os.truncate(path, 3000)
            yield reader

    monkeypatch.setattr(tensorfile, "open_recorded", cutting)
    with pytest.raises(CheckpointDamagedError, match="ends too early"):
        read_tensors(tmp_path / "a", *written)


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
        b'{"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": {"0": 0, "4": 4}}}',
        b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
        *(
            b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
            b'"b": {"dtype": "F32", "shape": %s, "data_offsets": [4, 4]}}' % shape
            for shape in (
                b"[0, 9223372036854775808]",
                b"[0, 4611686018427387904, 4611686018427387904]",
                b"[18446744073709551616, 0]",
                b"[0, -1]",
                b"[0, 1e3]",
                b"[%s0]" % (b"1, " * 64),
            )
        ),
        b"[" * 100_000,
        b"{}",
    ],
)
@pytest.mark.parametrize("read", [read_tensors, map_tensors])
def test_an_invalid_header_is_damage_even_if_the_hash_agrees(tmp_path: Path, header: bytes, read: Reader) -> None:
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(CheckpointDamagedError, match="header"):
        read(tmp_path / "a", record_of(data), None)


@pytest.mark.parametrize("length", range(1, 18))
def test_the_data_begin_aligned(tmp_path: Path, length: int) -> None:
    write(tmp_path / "a", {"n" * length: torch.ones(2, dtype=torch.float64)})
    assert (8 + int.from_bytes((tmp_path / "a").read_bytes()[:8], "little")) % 8 == 0


def test_writing_from_an_iterator_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    whole = torch.arange(60.0).reshape(6, 10)
    alive: list[int] = []

    def rows() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(6):
            tensor = whole[number].clone()
            alive.append(number)
            weakref.finalize(tensor, alive.remove, number)
            assert len(alive) <= 2  # the previous one is released when the next exists
            yield f"row {number}", tensor
            del tensor

    part = TensorPart([(f"row {number}", torch.float32, [10]) for number in range(6)], rows())
    with open(tmp_path / "a", "wb") as handle:
        hashes = write_tensors(FileWriter(handle), part)
    record = FileRecord(size=(tmp_path / "a").stat().st_size, hash=hashes.combined)
    found = read_tensors(tmp_path / "a", record, hashes)
    assert torch.equal(torch.stack(list(found.values())), whole)


@pytest.mark.parametrize("given", [[], [("b", torch.ones(2))], [("a", torch.ones(3))]])
def test_tensors_that_differ_from_the_layout_are_an_error(
    tmp_path: Path, given: list[tuple[str, torch.Tensor]]
) -> None:
    part = TensorPart([("a", torch.float32, [2])], given)
    with open(tmp_path / "a", "wb") as handle, pytest.raises(CheckpointError, match="layout"):
        write_tensors(FileWriter(handle), part)
