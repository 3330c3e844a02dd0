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

    What stands behind the intact part of a log, such as a block that was cut off by a kill, is put aside into another
    file, so that it can be looked at, and the log is continued from its intact part.

    Args:
        path: of the log; made if it is not there, with its folder.

    Attributes:
        chain: after the last block.
        segments: how many segments the log has.
        cut: why bytes were put aside; None if none were.

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
        """Where the intact part ends; 0 if there is none."""
        problems = list[str]()
        end = len(MAGIC)
        for block in read_blocks(self.path, problems.append):
            end, self.chain = block.end, block.chain
            self.segments += block.kind == Kind.START
            self._heads.add(block.chain)
        self.cut = problems[0] if problems else None
        return 0 if problems and end == len(MAGIC) else end

    def _put_aside(self, end: int) -> None:
        """Move what is behind `end` into a file of its own."""
        self._file.seek(end)
        atomic_write(_free_name(self.path), self._file.read(), durable=True)
        self._file.truncate(end)

    def has_head(self, chain: str) -> bool:
        """Whether the log had this chain, in hexadecimal digits, after one of its blocks when it was opened."""
        return bytes.fromhex(chain) in self._heads

    def append(self, *blocks: tuple[Kind, bytes]) -> None:
        """Append blocks by one call of the system, so that a kill leaves them whole, or the first of them and a part.

        Raises:
            OSError: they could not be written.
        """
        pieces, chain = list[bytes](), self.chain
        for kind, payload in blocks:
            head = HEAD.pack(kind, len(payload))
            chain = next_chain(chain, head, payload)
            pieces += (head, payload, chain)
        data = memoryview(b"".join(pieces))
        while data:  # a call may write a part of it alone, of a large block or on a disk that is nearly full
            data = data[self._file.write(data) :]
        self.chain = chain

    def sync(self) -> None:
        """Force what was written to the disk.

        Raises:
            OSError: the system refused.
        """
        os.fsync(self._file.fileno())
        if self._is_new:
            sync_directory(self.path.parent)
            self._is_new = False

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def _free_name(path: Path) -> Path:
    """Where to put aside what does not belong to the log."""
    number = 1
    while (aside := path.with_suffix(f".cut-{number}")).exists():
        number += 1
    return aside
