"""Hashing of files while they are written or read."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import xxhash

from trainstack.checkpointing import filesystem
from trainstack.errors import CheckpointDamagedError, CheckpointError

CHUNK_BYTES = 4 << 20
"""Pieces small enough to be still in the processor's cache when they are hashed."""

READERS = min(4, os.cpu_count() or 1) if hasattr(os, "preadv") else 1
"""Threads that read one file. Most of the time goes into fresh memory, which the system clears page by page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What a manifest says about one file."""

    size: int
    xxh3_128: str


def digest(data: bytes | memoryview) -> str:
    """Return the xxh3_128 of `data` in hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


class HashingWriter:
    """Writes to a new file and knows the record of what it wrote.

    Once `abandoned` is set, writing raises CheckpointError.
    """

    def __init__(self, handle: BinaryIO, abandoned: threading.Event | None = None) -> None:
        self._handle = handle
        self._abandoned = abandoned or threading.Event()
        self._hash = xxhash.xxh3_128()
        self._size = 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), CHUNK_BYTES):
            if self._abandoned.is_set():
                raise CheckpointError("the checkpoint being written was abandoned. Earlier checkpoints are intact.")
            piece = view[start : start + CHUNK_BYTES]
            self._hash.update(piece)
            filesystem.write(self._handle, piece)
        self._size += len(view)

    def record(self) -> FileRecord:
        return FileRecord(size=self._size, xxh3_128=self._hash.hexdigest())


class HashingReader:
    """Reads a file whose size is known, into memory of the caller's, hashing on the way."""

    def __init__(self, handle: FileIO, path: Path) -> None:
        self._handle = handle
        self._path = path
        self._hash = xxhash.xxh3_128()

    def read_into(self, target: memoryview) -> None:
        """Fill `target`, a view of writable bytes."""
        done = 0
        while done < len(target):
            piece = target[done : done + CHUNK_BYTES]
            count = self._handle.readinto(piece)
            if not count:
                raise CheckpointDamagedError(f"{self._path} ends too early; it was cut off.")
            self._hash.update(piece[:count])
            done += count

    def read_into_all(self, targets: Iterable[memoryview]) -> None:
        """Fill `targets` one after the other; several threads read while the pieces are hashed in order."""
        if READERS == 1:
            for target in targets:
                self.read_into(target)
            return
        start = self._handle.tell()
        with ThreadPoolExecutor(READERS) as pool:
            for pieces in pool.map(self._read_at, _batches(targets, start)):
                for _, piece in pieces:
                    self._hash.update(piece)
                start = pieces[-1][0] + len(pieces[-1][1])
        self._handle.seek(start)

    def _read_at(self, pieces: list[tuple[int, memoryview]]) -> list[tuple[int, memoryview]]:
        for position, piece in pieces:
            done = 0
            while done < len(piece):
                count = os.preadv(self._handle.fileno(), [piece[done:]], position + done)
                if not count:
                    raise CheckpointDamagedError(f"{self._path} ends too early; it was cut off.")
                done += count
        return pieces

    def read(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        buffer = bytearray(count)
        self.read_into(memoryview(buffer))
        return bytes(buffer)

    def map(self) -> mmap.mmap:
        """Return the whole file, hashed, as memory whose changes stay with this process."""
        mapping = mmap.mmap(self._handle.fileno(), 0, access=mmap.ACCESS_COPY)
        self._hash.update(mapping)
        return mapping

    def finish(self, record: FileRecord) -> None:
        """Compare what was read with the manifest.

        Raises:
            CheckpointDamagedError: the bytes are not those that were written.
        """
        found = self._hash.hexdigest()
        if found != record.xxh3_128:
            raise CheckpointDamagedError(
                f"{self._path} is damaged: its hash is {found}, the manifest says {record.xxh3_128}. "
                "Load another checkpoint."
            )


def _batches(targets: Iterable[memoryview], start: int) -> Iterator[list[tuple[int, memoryview]]]:
    """Pieces of `targets` with their positions in a file, in order: large ones cut, small ones put together."""
    batch: list[tuple[int, memoryview]] = []
    held = 0
    for target in targets:
        for begin in range(0, len(target), CHUNK_BYTES):
            piece = target[begin : begin + CHUNK_BYTES]
            batch.append((start, piece))
            start, held = start + len(piece), held + len(piece)
            if held >= CHUNK_BYTES:
                yield batch
                batch, held = [], 0
    if batch:
        yield batch


@contextmanager
def open_recorded(path: Path, record: FileRecord) -> Iterator[HashingReader]:
    """Open a file for reading after comparing its size with the manifest.

    Raises:
        CheckpointDamagedError: the file is missing, unreadable, or of another size.
    """
    try:
        with open(path, "rb", buffering=0) as handle:
            size = handle.seek(0, 2)
            handle.seek(0)
            if size != record.size:
                raise CheckpointDamagedError(
                    f"{path} is damaged: it has {size} bytes, the manifest says {record.size}. Load another checkpoint."
                )
            yield HashingReader(handle, path)
    except FileNotFoundError as error:
        raise CheckpointDamagedError(f"{path} is missing. Load another checkpoint.") from error
    except OSError as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {error}. Load another checkpoint.") from error


def check_file(path: Path, record: FileRecord) -> None:
    """Read `path` and compare size and hash; raises CheckpointDamagedError."""
    with open_recorded(path, record) as reader:
        buffer = memoryview(bytearray(min(CHUNK_BYTES, record.size)))
        for start in range(0, record.size, CHUNK_BYTES):
            reader.read_into(buffer[: min(CHUNK_BYTES, record.size - start)])
        reader.finish(record)


def read_file(path: Path, record: FileRecord) -> bytes:
    """Return the bytes of `path`, which were hashed; raises CheckpointDamagedError."""
    with open_recorded(path, record) as reader:
        data = reader.read(record.size)
        reader.finish(record)
        return data
