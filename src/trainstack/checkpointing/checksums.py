"""Hashes, and readers that compare files with them."""

from __future__ import annotations

import mmap
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

import xxhash

from trainstack._files import open_regular
from trainstack.checkpointing import filesystem
from trainstack.checkpointing.regular_files import check_memory
from trainstack.errors import CheckpointDamagedError, CheckpointError

ALGORITHM = "xxh3_128"
"""The hash of all files and chunks, by its name in a manifest."""

CHUNK_BYTES = 4 << 20
"""A constant of the format: tensors are hashed in chunks of this size. A chunk is written after it was hashed, and this
one is small enough to be still in the processor's cache then."""

READERS = min(4, os.cpu_count() or 1) if hasattr(os, "preadv") else 1
"""Threads that read one file. Most of the time is spent on new memory, which the system clears page by page."""

_DIGEST = re.compile("[0-9a-f]{32}")

PaceFn = Callable[[int], None]
"""Called with the number of bytes before they are read. It may wait, or raise to end the reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """The entry of one file in a manifest.

    Attributes:
        size: in bytes.
        hash: of the bytes; of a tensor file, `FileIndex.combined` of the hashes of its header and chunks.
    """

    size: int
    hash: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a file with a hash.

    Attributes:
        start: of the part in the file.
        size: of the part, in bytes.
        expected: its hash; None if it is unknown.
        label: its name in an error.
        target: the memory for its bytes; None if they are only compared.
        digest: computes the hash of its bytes.
    """

    start: int
    size: int
    expected: str | None
    label: str
    target: memoryview | None = None
    digest: Callable[[memoryview], str] = field(default=lambda data: digest(data), repr=False)


def digest(data: bytes | memoryview) -> str:
    """Return the xxh3_128 of `data` in hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def is_digest(text: str) -> bool:
    """Return whether `text` has the form of a result of `digest`."""
    return _DIGEST.fullmatch(text) is not None


class FileWriter:
    """Writes to a new file and counts the bytes.

    If `abandoned` is set, writing raises CheckpointError.
    """

    size: int

    def __init__(self, handle: BinaryIO, abandoned: threading.Event | None = None) -> None:
        self._handle = handle
        self._abandoned = abandoned or threading.Event()
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), CHUNK_BYTES):
            if self._abandoned.is_set():
                raise CheckpointError("the checkpoint being written was abandoned. Earlier checkpoints are intact.")
            filesystem.write(self._handle, view[start : start + CHUNK_BYTES])
        self.size += len(view)


class CheckedReader:
    """Reads a file of known size, and compares the data with hashes."""

    position: int

    def __init__(self, handle: FileIO, path: Path, size: int, pace: PaceFn | None = None) -> None:
        self._handle = handle
        self._pace = pace
        self.path = path
        self.size = size
        self.position = 0

    def read(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        buffer = bytearray(count)
        self.read_into(memoryview(buffer), self.position)
        self.position += count
        return bytes(buffer)

    def read_into(self, target: memoryview, start: int) -> None:
        """Fill `target`, a view of writable bytes, with the bytes from `start` on."""
        done = 0
        if self._pace is not None:
            self._pace(len(target))
        while done < len(target):
            if READERS == 1:
                self._handle.seek(start + done)
                count = self._handle.readinto(target[done:]) or 0
            else:
                count = os.preadv(self._handle.fileno(), [target[done:]], start + done)
            if not count:
                raise CheckpointDamagedError(f"{self.path} ends too early; it was truncated. Load another checkpoint.")
            done += count

    def read_chunks(self, chunks: Iterable[Chunk]) -> None:
        """Read `chunks` into their targets, or only compare them, in several threads.

        Raises:
            CheckpointDamagedError: the hash of a chunk is wrong. The message names the first one.
        """
        batches = list(_batches(chunks))
        if len(batches) == 1 and all(chunk.target is not None for chunk in batches[0]):
            for chunk in batches[0]:  # a small tensor needs no threads and no buffers
                self._read_chunk(chunk, memoryview(b""))
            return
        buffers: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(READERS):
            buffers.put(memoryview(bytearray(min(CHUNK_BYTES, self.size))))

        def work(batch: list[Chunk]) -> None:
            spare = buffers.get()
            try:
                for chunk in batch:
                    self._read_chunk(chunk, spare)
            finally:
                buffers.put(spare)

        if READERS == 1:
            for batch in batches:
                work(batch)
            return
        with ThreadPoolExecutor(READERS) as pool:
            for _ in pool.map(work, batches):
                pass

    def map(self, chunks: Iterable[Chunk]) -> mmap.mmap:
        """Compare `chunks`, and return the whole file as private memory: changes are not written to the file."""
        mapping = mmap.mmap(self._handle.fileno(), 0, access=mmap.ACCESS_COPY)
        view = memoryview(mapping)

        def work(batch: list[Chunk]) -> None:
            for chunk in batch:
                self._compare(chunk, view[chunk.start : chunk.start + chunk.size])

        with ThreadPoolExecutor(READERS) as pool:
            for _ in pool.map(work, _batches(chunks)):
                pass
        return mapping

    def _read_chunk(self, chunk: Chunk, spare: memoryview) -> None:
        target = spare[: chunk.size] if chunk.target is None else chunk.target
        self.read_into(target, chunk.start)
        self._compare(chunk, target)

    def _compare(self, chunk: Chunk, data: memoryview) -> None:
        if chunk.expected is not None and (found := chunk.digest(data)) != chunk.expected:
            raise CheckpointDamagedError(
                f"{self.path} is damaged: the hash of {chunk.label} is {found}, and {chunk.expected} was written. "
                "Load another checkpoint."
            )


def _batches(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """`chunks` in lists of about `CHUNK_BYTES`, so that many small ones do not cost a task each."""
    batch: list[Chunk] = []
    held = 0
    for chunk in chunks:
        batch.append(chunk)
        held += chunk.size
        if held >= CHUNK_BYTES or len(batch) >= 1000:  # the second limit is for many tiny chunks
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


@contextmanager
def open_recorded(path: Path, size: int | None, pace: PaceFn | None = None) -> Iterator[CheckedReader]:
    """Open a regular file for reading, of `size` bytes if that is known. `pace` may slow down the reading.

    Raises:
        CheckpointDamagedError: the file is missing, unreadable, not a regular file, or has another size.
    """
    try:
        with open_regular(path) as handle:
            found = os.fstat(handle.fileno()).st_size
            if size is not None and found != size:
                raise CheckpointDamagedError(
                    f"{path} is damaged: it has {found} bytes, and {size} in the manifest. Load another checkpoint."
                )
            yield CheckedReader(handle, path, found, pace)
    except FileNotFoundError as error:
        raise CheckpointDamagedError(f"{path} is missing. Load another checkpoint.") from error
    except OSError as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {error}. Load another checkpoint.") from error


def check_file(path: Path, record: FileRecord, pace: PaceFn | None = None) -> None:
    """Read `path` and compare its size and hash. Raises CheckpointDamagedError."""
    with open_recorded(path, record.size, pace) as reader:
        whole = xxhash.xxh3_128()
        buffer = memoryview(bytearray(min(CHUNK_BYTES, record.size)))
        for start in range(0, record.size, CHUNK_BYTES):
            piece = buffer[: min(CHUNK_BYTES, record.size - start)]
            reader.read_into(piece, start)
            whole.update(piece)
    _compare_whole(path, whole.hexdigest(), record)


def read_file(path: Path, record: FileRecord) -> bytes:
    """Return the bytes of `path` after comparing their hash. Raises CheckpointDamagedError."""
    with open_recorded(path, record.size) as reader:
        check_memory(path, record.size)
        data = reader.read(record.size)
    _compare_whole(path, digest(data), record)
    return data


def _compare_whole(path: Path, found: str, record: FileRecord) -> None:
    if found != record.hash:
        raise CheckpointDamagedError(
            f"{path} is damaged: its hash is {found}, and {record.hash} in the manifest. Load another checkpoint."
        )
