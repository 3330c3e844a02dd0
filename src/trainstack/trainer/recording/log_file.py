"""`LogFile` appends blocks to the step log of one rank."""

from __future__ import annotations

import os
from contextlib import suppress
from io import FileIO
from pathlib import Path

from trainstack._files import atomic_write, create_file, make_directories, open_descriptor, sync_directory
from trainstack.step_log.blocks import read_blocks
from trainstack.step_log.format import HEAD, MAGIC, Kind, first_chain, next_chain


class LogFile:
    """A step log that is open for appending.

    The bytes after the intact part of a log, such as a block that a kill has truncated, are moved into another file for
    inspection. The log continues after its intact part.

    Args:
        path: the path of the log. The file and its folder are created if they are missing.

    Attributes:
        chain: the chain after the last block.
        segments: the number of segments.
        cut: the reason why bytes were moved; None if none were.

    Raises:
        OSError: the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.chain, self.segments = path, first_chain(), 0
        self._heads = set[bytes]()
        self.cut: str | None = None
        make_directories(path.parent)
        end = self._read() if path.exists() else 0
        if end:
            flags = os.O_RDWR | os.O_APPEND
            self._file = FileIO(open_descriptor(path, flags), "rb+")
            if self.cut is not None:
                self._put_aside(end)
        else:
            with suppress(FileNotFoundError):
                os.replace(path, _free_name(path))
            with create_file(path) as made:
                made.write(MAGIC)
            self._file = FileIO(open_descriptor(path, os.O_WRONLY | os.O_APPEND), "ab")
        self._is_new = not end

    def _read(self) -> int:
        """The position of the end of the intact part; 0 if there is none."""
        problems = list[str]()
        end = len(MAGIC)
        for block in read_blocks(self.path, problems.append):
            end, self.chain = block.end, block.chain
            self.segments += block.kind == Kind.START
            self._heads.add(block.chain)
        self.cut = problems[0] if problems else None
        return 0 if problems and end == len(MAGIC) else end

    def _put_aside(self, end: int) -> None:
        """Move the bytes after `end` into a separate file."""
        self._file.seek(end)
        atomic_write(_free_name(self.path), self._file.read(), durable=True)
        self._file.truncate(end)

    def has_head(self, chain: str) -> bool:
        """Whether the log had this chain, in hexadecimal digits, after one of its blocks when it was opened."""
        return bytes.fromhex(chain) in self._heads

    def append(self, *blocks: tuple[Kind, bytes]) -> None:
        """Append blocks with one system call, so that a kill can truncate the log only at its end.

        Raises:
            OSError: they could not be written.
        """
        pieces, chain = list[bytes](), self.chain
        for kind, payload in blocks:
            head = HEAD.pack(kind, len(payload))
            chain = next_chain(chain, head, payload)
            pieces += (head, payload, chain)
        data = memoryview(b"".join(pieces))
        while data:  # a call may write only a part of a large block, or on a disk that is nearly full
            data = data[self._file.write(data) :]
        self.chain = chain

    def sync(self) -> None:
        """Flush the written blocks to the disk.

        Raises:
            OSError: the flush failed.
        """
        os.fsync(self._file.fileno())
        if self._is_new:  # the entry of a new file in its folder needs a flush, too
            sync_directory(self.path.parent)
            self._is_new = False

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _free_name(path: Path) -> Path:
    """An unused path for bytes that do not belong to the log."""
    number = 1
    while (aside := path.with_suffix(f".cut-{number}")).exists():
        number += 1
    return aside
