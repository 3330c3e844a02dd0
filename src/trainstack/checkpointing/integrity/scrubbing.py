"""Scrubbing reads stored checkpoints again and compares them with their hashes. It does not need torch.

Disks can lose bits of files that are not read for a long time. The results are stored in `.scrub.json` in the folder of
the checkpoints.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from trainstack._files import atomic_write, read_small
from trainstack.checkpointing import manifest
from trainstack.checkpointing.checksums import digest
from trainstack.checkpointing.directory import CheckpointInfo, scan
from trainstack.checkpointing.field_types import build
from trainstack.checkpointing.verification import read_back

RESULTS_FILE = ".scrub.json"
_FORMAT = "trainstack-scrub"

RATE = 100_000_000
"""Bytes per second that are read during a training: a fifth of the rate of a slow SSD, 8 TB in a day."""

LogFn = Callable[[int, str], None]


class ScrubStopped(Exception):
    """The reading was ended by another thread; there is no result."""


class Pace:
    """Limits the rate of reading, and can end it. Any thread may call it before it reads.

    Args:
        rate: bytes per second; None for no limit.
        stopped: ends the reading when it is set.
    """

    def __init__(self, rate: float | None = None, stopped: threading.Event | None = None) -> None:
        self._rate, self._stopped = rate, stopped or threading.Event()
        self._lock, self._free_at = threading.Lock(), 0.0

    def __call__(self, count: int) -> None:
        """Wait until `count` bytes may be read.

        Raises:
            ScrubStopped: the reading was ended.
        """
        wait_s = 0.0
        if self._rate is not None:
            with self._lock:
                now = time.monotonic()
                wait_s = max(0.0, self._free_at - now)
                self._free_at = max(self._free_at, now) + count / self._rate
        if self._stopped.wait(wait_s):
            raise ScrubStopped


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubResult:
    """The result of the last reading of a checkpoint.

    Attributes:
        verified: the time of the reading, in UTC, ISO 8601.
        manifest: a hash of its manifest. If it differs, another checkpoint was written under this name later.
        problem: the damage; None if all bytes agree.
    """

    verified: str
    manifest: str
    problem: str | None


def read_results(folder: Path) -> dict[str, ScrubResult]:
    """The results in `folder` by the names of checkpoints; none if the file is absent or damaged."""
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        body = json.loads(read_small(folder / RESULTS_FILE))
        if body.get("format") == _FORMAT:
            return {name: build(ScrubResult, one) for name, one in body["checkpoints"].items()}
    return {}


def _keep(folder: Path, name: str, result: ScrubResult, say: LogFn) -> None:
    """Store a result, and drop the results of deleted checkpoints."""
    results = {**read_results(folder), name: result}
    kept = {one: asdict(result) for one, result in sorted(results.items()) if (folder / one).is_dir()}
    try:
        atomic_write(
            folder / RESULTS_FILE, (json.dumps({"format": _FORMAT, "checkpoints": kept}, indent=1) + "\n").encode()
        )
    except OSError as error:  # a folder without write access can be scrubbed too
        say(logging.WARNING, f"{folder / RESULTS_FILE} could not be written: {error}")


def scrub_one(path: Path, pace: Pace, say: LogFn) -> ScrubResult | None:
    """Read the checkpoint or export at `path`, and store the result; None if it was deleted or replaced during the
    reading.

    Raises:
        ScrubStopped: the reading was ended.
    """
    before = _hash_of_manifest(path)
    problem = read_back(path, pace)
    if problem is not None and (not path.is_dir() or _hash_of_manifest(path) != before):
        return None
    result = ScrubResult(verified=manifest.now(), manifest=before, problem=problem)
    _keep(path.parent, path.name, result, say)
    return result


def _hash_of_manifest(path: Path) -> str:
    try:
        return digest(read_small(path / manifest.FILE_NAME))
    except OSError:
        return ""


def scrub_folder(folder: Path, pace: Pace, say: LogFn) -> Iterator[tuple[Path, str | None, bool]]:
    """Read all entries of a folder of checkpoints, beginning with those whose last reading is oldest.

    Yields:
        the path, the problem, and whether that is damage; an entry that is not a checkpoint can be unusual without
        damage.
    """
    contents = scan(folder)
    for path, error in {**contents.broken, **contents.broken_begins, **contents.newer}.items():
        yield path, str(error), True
    for path, reason in contents.odd.items():
        yield path, reason, False
    for info in by_age([*contents.begun[::-1], *contents.intact[::-1]], read_results(folder)):
        result = scrub_one(info.path, pace, say)
        if result is not None:
            yield info.path, result.problem, result.problem is not None


def by_age(infos: Iterable[CheckpointInfo], results: dict[str, ScrubResult]) -> list[CheckpointInfo]:
    """`infos`, ordered by the time at which their bytes were last compared or written, oldest first."""
    return sorted(infos, key=lambda info: read_at(info, results))


def read_at(info: CheckpointInfo, results: dict[str, ScrubResult]) -> datetime:
    """The time at which the bytes of a checkpoint were last compared, or else written."""
    known = results.get(info.path.name)
    if known is not None and known.manifest == _hash_of_manifest(info.path):
        with suppress(ValueError, TypeError):
            return datetime.fromisoformat(known.verified).astimezone(timezone.utc)
    return datetime.fromisoformat(info.created)


class BackgroundScrub:
    """Reads one checkpoint at a time in a thread, during a training.

    Args:
        every_s: a checkpoint is read again this many seconds after its bytes were compared or written.
        say: takes a level of the logging module and a line.
        note: takes the path and the problem of each checkpoint that was read.
    """

    def __init__(self, every_s: float, say: LogFn, note: Callable[[Path, str | None], None]) -> None:
        self._every, self._say, self._note = timedelta(seconds=every_s), say, note
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, folder: Path, infos: Iterable[CheckpointInfo]) -> None:
        """Begin to read the one of `infos` in `folder` that is overdue longest, if one is due. Never waits."""
        if self._thread is not None and self._thread.is_alive():
            return
        results = read_results(folder)
        oldest = next(iter(by_age(infos, results)), None)
        if oldest is None or datetime.now(timezone.utc) - read_at(oldest, results) < self._every:
            return
        self._stopped = threading.Event()
        pace = Pace(RATE, self._stopped)
        self._thread = threading.Thread(
            target=self._read, args=(oldest.path, pace), name=f"trainstack: scrubbing {oldest.name}", daemon=True
        )
        self._thread.start()

    def _read(self, path: Path, pace: Pace) -> None:
        with suppress(ScrubStopped):
            result = scrub_one(path, pace, self._say)
            if result is not None:
                self._note(path, result.problem)
                if result.problem is not None:
                    self._say(logging.WARNING, f"a stored checkpoint is damaged: {result.problem}")

    def stop(self) -> None:
        """End the current reading without a result, and wait for its thread."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None
