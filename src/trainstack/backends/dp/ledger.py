"""`SpendLedger` writes the number of private steps to disk before they are taken.

A checkpoint knows the steps before it, but not those that ran after it and were lost; their results may have been
seen, so they are spent. The ledger therefore records steps ahead, a block at a time: one synced line of the file lets
the next 16 steps run. A clean end hands the unused rest back by a line of its own. Killed at any moment, a run has
recorded at least what it did, and at most a block more.

Steps belong to a run's id, which lies in its checkpoints: whatever resumes from any of them, however often and also at
the same time, adds to the same sum.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import xxhash

from trainstack._files import file_mode, local_path, make_directories, open_descriptor, sync_directory
from trainstack.backends.dp.accounting import merge_steps
from trainstack.backends.dp.epsilon import Entry
from trainstack.errors import PrivacyLedgerError

# A line is a checksum and a JSON object. Only the last line can be torn, for a line is written and synced under a
# lock before the next one begins; a torn line is one whose `append` has not returned: nothing relies on it, and it is
# cut off.
try:
    import fcntl
except ImportError:  # Windows: one process a file
    fcntl = None  # type: ignore[assignment]


class LedgerFile:
    """Reads what was added since it last looked, and adds to it. The file is opened anew each time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = local_path(path, "ledger")
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
            if fcntl is not None:
                with contextlib.suppress(OSError):  # file systems without locks: there, one process at a time
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
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
            descriptor = open_descriptor(self.path, flags, file_mode(self.path) & 0o644)
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


BLOCK = 16
"""Steps that one synced line allows: what a crash may over-count."""


class SpendLedger:
    """The steps of runs in the file at `path`, and the block of them that this process may still take.

    Args:
        path: beside the run's logs; the file and its folder are made when the first step is charged.
        block: steps recorded ahead.
    """

    def __init__(self, path: str | os.PathLike[str], *, block: int = BLOCK) -> None:
        self._file = LedgerFile(path)
        self._block = block
        self._recorded: dict[str, Counter[tuple[float, float]]] = {}
        self._unused: Counter[tuple[str, float, float]] = Counter()
        self._process = os.getpid()

    @property
    def path(self) -> str:
        """Where the ledger lies."""
        return str(self._file.path)

    def spent(self, run: str) -> list[Entry]:
        """All steps of `run` as (sigma, q, steps), also those of others and of runs that were cut short.

        Steps that this process has recorded ahead and not taken are not among them.

        Raises:
            PrivacyLedgerError: the file is damaged or has become shorter.
        """
        self._note(self._file.read_new())
        self._discard_block_after_fork()
        recorded = self._recorded.get(run, Counter())
        return merge_steps(
            [(sigma, q, steps - self._unused[run, sigma, q]) for (sigma, q), steps in recorded.items() if steps]
        )

    def runs(self) -> dict[str, int]:
        """The steps of each run, as `spent` counts them; first the one that was recorded last.

        Raises:
            PrivacyLedgerError: the file is damaged or has become shorter.
        """
        self._note(self._file.read_new())
        return {run: sum(steps for _, _, steps in self.spent(run)) for run in list(reversed(self._recorded))}

    def reserved(self, run: str, sigma: float, q: float) -> int:
        """How many steps of `run` this process has recorded ahead and may take without looking at the file."""
        self._discard_block_after_fork()
        return self._unused[run, float(sigma), float(q)]

    def charge(self, run: str, sigma: float, q: float, *, at_most: int = BLOCK) -> None:
        """Count one step of `run`, which may begin when this returns; record `at_most` ahead, this step included.

        Raises:
            PrivacyLedgerError: it cannot be recorded; the step must not be taken.
        """
        self._discard_block_after_fork()
        key = (run, float(sigma), float(q))
        if self._unused[key] == 0:
            ahead = max(1, min(self._block, at_most))
            self._write(*key, ahead)
            self._unused[key] += ahead
        self._unused[key] -= 1

    def settle(self) -> None:
        """Hand back what was recorded ahead and not taken: at a checkpoint, and at a clean end.

        Raises:
            PrivacyLedgerError: it cannot be recorded; then those steps stay spent.
        """
        self._discard_block_after_fork()
        while self._unused:
            key, steps = self._unused.popitem()  # first: a crash in between must not leave them both free and usable
            if steps:
                self._write(*key, -steps)

    def carry(self, run: str, history: list[Entry]) -> None:
        """Record steps of `run` that another ledger or none had recorded.

        Raises:
            PrivacyLedgerError: they cannot be recorded.
        """
        for sigma, q, steps in history:
            self._write(run, sigma, q, steps)

    def _write(self, run: str, sigma: float, q: float, steps: int) -> None:
        self._note(self._file.append({"run": run, "sigma": sigma, "q": q, "steps": steps}))

    def _note(self, records: list[dict[str, object]]) -> None:
        for record in records:
            try:
                run, sigma, q, steps = (record[name] for name in ("run", "sigma", "q", "steps"))
                sums = self._recorded[str(run)] = self._recorded.pop(str(run), Counter())  # the last run stands last
                sums[float(sigma), float(q)] += int(steps)  # type: ignore[arg-type, call-overload]
            except (KeyError, TypeError, ValueError) as error:
                raise PrivacyLedgerError(f"{self.path} is not a privacy ledger: it holds {record}.") from error

    def _discard_block_after_fork(self) -> None:
        """A forked process may not take the steps that its parent recorded for itself."""
        if os.getpid() != self._process:
            self._process = os.getpid()
            self._unused.clear()
