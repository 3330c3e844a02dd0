"""An append-only file of small records, each on the disk before `append` returns, readable after any crash.

A line is a checksum and a JSON object. Only the last line can be torn, for a line is written and synced under a lock
before the next one begins; a torn line is one whose `append` has not returned: nothing relies on it, and it is cut off.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from trainstack._files import make_directories, sync_directory
from trainstack.errors import PrivacyLedgerError

try:
    import fcntl
except ImportError:  # Windows: one process a file
    fcntl = None  # type: ignore[assignment]


class LedgerFile:
    """Reads what was added since it last looked, and adds to it. The file is opened anew each time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._read_to = 0
        self._name_is_synced = False

    def read_new(self) -> list[dict[str, Any]]:
        """The records that were not read yet, whoever wrote them; none if there is no file.

        Raises:
            PrivacyLedgerError: the file is damaged, or has become shorter.
        """
        if not self.path.exists() and self._read_to == 0:
            return []
        with self._opened(os.O_RDONLY) as descriptor:
            return self._read(descriptor)

    def append(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Write `record` durably; returns what was not read yet, `record` last.

        Raises:
            PrivacyLedgerError: the file is damaged, has become shorter, or cannot be written.
        """
        text = json.dumps(record, sort_keys=True, allow_nan=False, separators=(",", ":"))
        with self._opened(os.O_RDWR | os.O_APPEND | os.O_CREAT) as descriptor:
            _lock(descriptor)
            new = self._read(descriptor)
            if os.fstat(descriptor).st_size > self._read_to:
                cut(descriptor, self._read_to)
            write(descriptor, f"{_digest(text)} {text}\n".encode())
            sync(descriptor)
            if not self._name_is_synced:
                sync_directory(self.path.parent)
                self._name_is_synced = True
            return new + self._read(descriptor)

    @contextlib.contextmanager
    def _opened(self, flags: int) -> Iterator[int]:
        """The descriptor of the file; failures of the file system get the path and the way to go on."""
        try:
            if flags & os.O_CREAT:
                make_directories(self.path.parent)
            descriptor = os.open(self.path, flags | getattr(os, "O_BINARY", 0), 0o644)
            try:
                yield descriptor
            finally:
                os.close(descriptor)  # gives the lock back
        except OSError as error:
            raise PrivacyLedgerError(
                f"The privacy ledger {self.path} cannot be used: {error.strerror or error}. No private step is taken "
                "without it: free the disk or correct the permissions, then resume."
            ) from error

    def _read(self, descriptor: int) -> list[dict[str, Any]]:
        size = os.fstat(descriptor).st_size
        if size < self._read_to:
            raise PrivacyLedgerError(
                f"The privacy ledger {self.path} has become shorter while it was in use: {size} bytes, of which "
                f"{self._read_to} had been read. Put the original back."
            )
        os.lseek(descriptor, self._read_to, os.SEEK_SET)
        data = b""
        while piece := os.read(descriptor, 1 << 20):
            data += piece
        lines = data.split(b"\n")[:-1]  # what follows the last newline is torn, or being written
        records = [self._parse(line) for line in lines]
        self._read_to += sum(len(line) + 1 for line in lines)
        return records

    def _parse(self, line: bytes) -> dict[str, Any]:
        with contextlib.suppress(ValueError):  # decoding, splitting or JSON
            digest, text = line.decode("utf-8").split(" ", 1)
            if digest == _digest(text):
                return dict(json.loads(text))
        raise PrivacyLedgerError(
            f"The privacy ledger {self.path} is damaged in the line {line[:40]!r}..., so it does not say what was "
            "spent. Put an undamaged copy of the file in its place."
        )


def _digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())


def _lock(descriptor: int) -> None:
    if fcntl is not None:
        with contextlib.suppress(OSError):  # file systems without locks: there, one process at a time
            fcntl.flock(descriptor, fcntl.LOCK_EX)


# Calls that change the file system, so that tests can break any of them.


def write(descriptor: int, data: bytes) -> None:
    """Write all of `data`."""
    while data:
        data = data[os.write(descriptor, data) :]


def sync(descriptor: int) -> None:
    """Force what was written to the disk."""
    os.fsync(descriptor)


def cut(descriptor: int, size: int) -> None:
    """Drop what lies beyond `size`."""
    os.ftruncate(descriptor, size)
