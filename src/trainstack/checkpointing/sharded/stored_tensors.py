"""`StoredTensors` reads single tensors of a checkpoint, or some of their rows, and verifies them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from trainstack._deferred import DeferredTensor
from trainstack.checkpointing import manifest
from trainstack.checkpointing.checksums import Chunk, open_recorded
from trainstack.checkpointing.encoding import BY_NATIVE_NAME
from trainstack.checkpointing.index import FileIndex, TensorEntry, read_header
from trainstack.checkpointing.manifest import Manifest
from trainstack.checkpointing.regular_files import check_memory
from trainstack.checkpointing.tensorfile import DEFERRED_BYTES
from trainstack.checkpointing.verification import open_checkpoint, read_index
from trainstack.errors import CheckpointMismatchError


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive rows of a tensor in a file; `start` is their first byte after the header of the file."""

    file: str
    entry: TensorEntry
    start: int  # after the header


class StoredTensors(Mapping[str, torch.Tensor]):
    """The tensors in the files of a checkpoint or export, by their names there. A tensor is read at each access.

    Each returned tensor has separate memory on the CPU. A tensor of a dtype that safetensors lacks, such as complex128,
    is a 1-dim uint8 tensor here. Several threads may read at the same time.

    Args:
        root: the directory.
        content: its manifest.
        hashes: the index.
        files: a selection of the tensor files; by default all.

    Raises:
        CheckpointDamagedError: by all methods that read; the message names the file and the damaged part.
    """

    def __init__(
        self, root: Path, content: Manifest, hashes: Mapping[str, FileIndex], files: tuple[str, ...] | None = None
    ) -> None:
        self._root, self._content, self._hashes = root, content, hashes
        self._data_starts: dict[str, int] = {}
        self._runs: dict[str, list[_Run]] = {}
        for file in content.files if files is None else files:
            place = 0
            for name, entry in hashes[file].tensors.items() if file in hashes else ():
                self._runs.setdefault(name, []).append(_Run(file, entry, place))
                place += entry.size
        for runs in self._runs.values():
            runs.sort(key=lambda run: run.entry.first)

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self.shape(name)
        return self._read(name, 0, math.prod(shape) * self.dtype(name).itemsize).reshape(shape)

    def shape(self, name: str) -> list[int]:
        """The shape of the whole tensor."""
        entry = self._runs[name][0].entry
        return entry.shape if entry.whole is None else entry.whole

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of the tensor."""
        return BY_NATIVE_NAME[self._runs[name][0].entry.dtype]

    def rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        """The rows `begin` to `end`, without `end`, along the first dimension; shape `(end - begin, ...)`.

        It reads only the chunks with these rows, and compares them with their hashes.

        Raises:
            ValueError: the tensor has no such rows.
        """
        shape = self.shape(name)
        if not shape or not 0 <= begin <= end <= shape[0]:
            raise ValueError(f"{name!r} has the shape {shape}, and so no rows {begin} to {end}")
        row = math.prod(shape[1:]) * self.dtype(name).itemsize
        return self._read(name, begin * row, end * row).reshape([end - begin, *shape[1:]])

    def placeholders(self) -> dict[str, torch.Tensor]:
        """Tensors of the same shapes and dtypes, without memory or values."""
        return {name: torch.zeros((), dtype=self.dtype(name)).expand(self.shape(name)) for name in self}

    def read_all(self) -> dict[str, torch.Tensor]:
        """All tensors, in memory."""
        check_memory(self._root, sum(run.entry.size for runs in self._runs.values() for run in runs))
        return dict(self)

    def deferred(self, *, verified: bool = False) -> dict[str, torch.Tensor]:
        """All tensors; those of more than `DEFERRED_BYTES` bytes are a `DeferredTensor`.

        All bytes are compared with their hashes now, unless they are already `verified`. Later reads are compared
        again. The files must not be moved as long as the tensors are used.
        """
        if not verified:
            self._compare_all()
        return {name: self._deferred(name) for name in self}

    def _deferred(self, name: str) -> torch.Tensor:
        shape, dtype = self.shape(name), self.dtype(name)
        if math.prod(shape) * dtype.itemsize <= DEFERRED_BYTES:
            return self[name]
        return DeferredTensor(shape, dtype, partial(self.__getitem__, name), partial(self.rows, name))

    def _compare_all(self) -> None:
        for file in {run.file for runs in self._runs.values() for run in runs}:
            with open_recorded(self._root / file, self._content.files[file].size) as reader:
                read_header(reader, self._hashes[file])
                reader.read_chunks(self._hashes[file].chunks(reader.position))

    def _read(self, name: str, begin: int, end: int) -> torch.Tensor:
        """The bytes `begin` to `end` of a tensor, as elements."""
        check_memory(self._root, end - begin)
        made = torch.empty(end - begin, dtype=torch.uint8)
        target = made.numpy().data if end > begin else memoryview(b"")
        for run in self._runs[name]:
            if run.entry.start < end and begin < run.entry.start + run.entry.size:
                self._read_run(name, run, target, begin, end)
        return made.view(self.dtype(name))

    def _read_run(self, name: str, run: _Run, target: memoryview, begin: int, end: int) -> None:
        """Copy the bytes from this run to `target`, which begins at the byte `begin` of the tensor."""
        wanted, borders = list[Chunk](), list[tuple[Chunk, int]]()
        first = run.entry.start
        for chunk in FileIndex("", {name: run.entry}).chunks(first):
            last = chunk.start + chunk.size
            if chunk.start >= end or last <= begin:
                continue
            place = replace(chunk, start=self._data_start(run.file) + run.start + chunk.start - first)
            if begin <= chunk.start and last <= end:
                wanted.append(replace(place, target=target[chunk.start - begin : last - begin]))
            else:  # the hash needs the whole chunk, of which a part is used
                whole = memoryview(bytearray(chunk.size))
                wanted.append(replace(place, target=whole))
                borders.append((wanted[-1], chunk.start))
        with open_recorded(self._root / run.file, self._content.files[run.file].size) as reader:
            reader.read_chunks(wanted)
        for chunk, start in borders:
            low, high = max(begin, start), min(end, start + chunk.size)
            assert chunk.target is not None
            target[low - begin : high - begin] = chunk.target[low - start : high - start]

    def _data_start(self, file: str) -> int:
        """The position of the tensors in a file. Reads and compares its header, once."""
        if file not in self._data_starts:
            with open_recorded(self._root / file, self._content.files[file].size) as reader:
                read_header(reader, self._hashes[file])
                self._data_starts[file] = reader.position
        return self._data_starts[file]

    def check_headers(self) -> None:
        """Compare size and header of each file; reads no tensor."""
        for file in {run.file for runs in self._runs.values() for run in runs}:
            self._data_start(file)


def open_tensors(path: str | os.PathLike[str]) -> StoredTensors:
    """The tensors of the checkpoint or export at `path`, whole or sharded, for reading one by one or by rows.

    Tensors of the model have the names of the module's state; those of other states begin with the name of the state.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at `path`.
        CheckpointDamagedError: the manifest or the index is damaged.
        CheckpointMismatchError: `path` is a single file, marks the beginning of a run, or has an older format.

    Examples:
        >>> path = ts.export_model(module, "line")
        >>> ts.open_tensors(path)["model.weight"].shape
        torch.Size([1, 1])
    """
    root, content = open_checkpoint(path)
    if content.kind == "begin" or content.format_version == 1:
        what = "marks the beginning of a run and has no state" if content.kind == "begin" else "has format version 1"
        raise CheckpointMismatchError(f"{root} {what}. Name a checkpoint, or read its weights with read_model(path).")
    return StoredTensors(root, content, read_index(root, content))


def files_of(content: Manifest, whole_file: str) -> tuple[str, ...]:
    """The files of a checkpoint that are `whole_file`, or that contain the rows of one rank of it."""
    return tuple(file for file in content.files if manifest.is_part_of(file, whole_file))
