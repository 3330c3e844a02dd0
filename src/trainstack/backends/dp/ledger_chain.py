"""`LedgerChain` reads and adds the lines of a privacy ledger, each of which holds the digest of the line before.

A line is a digest and a JSON object, whose `prev` is the digest of the line before. Removing, changing or reordering
lines changes all digests after them. Each checkpoint has the newest digest, so that a resume detects an older copy of
the ledger. Lines of ledgers from before the chain (a digest of 16 digits) may come first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from typing import Any

import xxhash

from trainstack.backends.dp.ledger_store import LedgerStore, OpenLedger
from trainstack.errors import PrivacyLedgerError

# Only the last line can be torn, for lines are written and synced under a lock before the next ones begin; a torn line
# is one whose `append` has not returned: nothing relies on it, and it is cut off.

Record = dict[str, Any]

MAX_LINE_BYTES = 1 << 16
"""A line has some hundred bytes."""
MAX_LEDGER_BYTES = 1 << 30
"""Five million lines, which allow 80 million steps."""
_PIECE = 1 << 20


class LedgerChain:
    """Reads the lines that are new, and appends to them.

    Args:
        store: of the bytes.
        note: gets each record once, of any writer.
    """

    head: str

    def __init__(self, store: LedgerStore, note: Callable[[Record], None]) -> None:
        self.store = store
        self.head = ""
        """The digest of the newest line that was read."""
        self._note = note
        self._read_to = 0

    def read_new(self) -> None:
        """Note the records that were not read yet; none if there is no ledger.

        Raises:
            PrivacyLedgerError: the ledger is damaged, or has become shorter.
        """
        if self._read_to or self.store.exists():
            with self.store.open(write=False) as opened:
                self._read(opened)

    def append(self, make: Callable[[], list[Record]]) -> None:
        """Write the records of `make` durably. It is called under the lock, when all earlier records are noted.

        Raises:
            PrivacyLedgerError: the ledger is damaged, has become shorter, or cannot be written.
        """
        with self.store.open(write=True) as opened:
            self._read(opened)
            data, head = b"", self.head
            for record in make():
                text = json.dumps({**record, "prev": head}, sort_keys=True, allow_nan=False, separators=(",", ":"))
                head = _digest(text)
                data += f"{head} {text}\n".encode()
            if not data:
                return
            if opened.size() > self._read_to:
                opened.cut(self._read_to)
            opened.append(data)
            self._read(opened)

    def holds(self, digest: str) -> bool:
        """Whether a line with this digest is in the chain.

        Raises:
            PrivacyLedgerError: the ledger is damaged.
        """
        seen: list[str] = []
        fresh = LedgerChain(self.store, lambda _: seen.append(digest) if fresh.head == digest else None)
        fresh.read_new()
        return bool(seen)

    def _read(self, opened: OpenLedger) -> None:
        size = opened.size()
        if size < self._read_to:
            raise PrivacyLedgerError(
                f"The privacy ledger {self.store.address} has become shorter while it was in use: {size} bytes, of "
                f"which {self._read_to} had been read. Put the original back."
            )
        if size > MAX_LEDGER_BYTES:
            raise PrivacyLedgerError(
                f"The privacy ledger {self.store.address} has {size:,} bytes, more than the {MAX_LEDGER_BYTES:,} that "
                "are read. Put the original back, or begin a new ledger and write down the steps of this one."
            )
        begin, rest = self._read_to, b""
        while begin < size and (piece := opened.read(begin, min(_PIECE, size - begin))):
            begin += len(piece)
            *lines, rest = (rest + piece).split(b"\n")  # the rest after the last newline is torn, or being written
            for line in [*lines, *([rest] if len(rest) > MAX_LINE_BYTES else [])]:
                self._take(line)

    def _take(self, line: bytes) -> None:
        """Note one line, which has no newline at its end."""
        with contextlib.suppress(ValueError, RecursionError):  # decoding, splitting or JSON
            if len(line) > MAX_LINE_BYTES:
                raise ValueError("no line of a ledger")
            digest, text = line.decode("utf-8").split(" ", 1)
            record = json.loads(text)
            old = len(digest) == 16 and len(self.head) in (0, 16) and digest == xxhash.xxh3_64_hexdigest(text.encode())
            if isinstance(record, dict) and (old or (digest == _digest(text) and record.get("prev") == self.head)):
                before, self.head = self.head, digest
                try:
                    self._note(record)
                except PrivacyLedgerError:
                    self.head = before
                    raise
                self._read_to += len(line) + 1
                return
        raise PrivacyLedgerError(
            f"The privacy ledger {self.store.address} is damaged in the line {line[:40]!r}..., so its steps are not "
            "known: lines were changed, removed or exchanged. Put an undamaged copy of the file in its place."
        )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
