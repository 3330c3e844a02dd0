"""`ShardedDirectory`, a temporary directory to which all ranks write and that the main process commits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from trainstack.checkpointing import filesystem, index, manifest, temp_dirs
from trainstack.checkpointing.lease import Lease
from trainstack.checkpointing.sharded.parts import Layout, PartReport, join_parts, part_file, write_part
from trainstack.checkpointing.tensorfile import TensorPart
from trainstack.checkpointing.writing import (
    Payload,
    check_free,
    check_name,
    explaining,
    finish,
    give_name,
    manifest_of,
    put_texts,
)
from trainstack.errors import CheckpointError

Result = TypeVar("Result")


class Ranks(Protocol):
    """The communication between the ranks of a run. The trainer implements it. Any thread may call `put` and
    `get_if_all`.

    Attributes:
        rank, size: the rank of this process and the number of ranks.
        longest_s: the longest time for the files of the other ranks.
    """

    rank: int
    size: int
    longest_s: float

    def on_main(self, function: Callable[[], Result], what: str) -> Result:
        """The result of `function` on rank 0, on all ranks. A failure there is raised on all."""

    def raise_if_any(self, error: BaseException | None, what: str) -> None:
        """Raise on all ranks if one of them has failed."""

    def put(self, name: str, text: str) -> None:
        """Store `text` for the other ranks."""

    def get_if_all(self, names: Sequence[str]) -> list[str] | None:
        """The texts under `names` if all of them exist, otherwise None."""

    def is_broken(self) -> bool:
        """Whether a rank has failed, so that its files may never be written."""


_PAUSE_S = (0.002, 0.25)
"""The first and the longest pause between two reads of the store."""

_SILENCE_S = 15.0
"""A rank that writes sends a heartbeat every second. After this time without one, it has ended."""

_GRACE_S = 10.0
"""The time for the remaining files after a rank has failed: the other ranks finish their files."""


class ShardedDirectory:
    """Made on the main process. Until `commit` returns, the directory never counts as a checkpoint.

    Args:
        directory: of the checkpoints.
        name: of this one.
        needed: the approximate number of bytes that all ranks write.

    Attributes:
        path: the temporary directory, which exists.
    """

    path: Path

    def __init__(self, directory: Path, name: str, needed: int) -> None:
        check_name(directory, name)
        self._final = directory / name
        with explaining(self._final, None):
            filesystem.make_directories(directory)
            check_free(directory, needed)
            self.path = temp_dirs.claim_temp_dir(directory, temp_dirs.TEMPORARY, name)
            try:
                filesystem.make_directory(self.path)
            except BaseException:
                temp_dirs.release_temp_dir(self.path)
                raise

    def discard(self) -> None:
        """Delete the directory. If that fails, later runs may delete it."""
        with suppress(OSError):
            filesystem.remove_tree(self.path)
        temp_dirs.release_temp_dir(self.path)

    def commit(
        self, payload: Payload, reports: Sequence[PartReport], layout: Layout, sequence: int, lease: Lease | None
    ) -> Path:
        """Write index and manifest, the manifest last, and rename the directory to its name. Returns its path.

        Args:
            payload: of the main process; its tensors are already written.
            reports: of all ranks.
            layout: all tensors.
            sequence: of the checkpoint.
            lease: the right to write here.

        Raises:
            CheckpointError: a rank has failed, the parts do not form whole tensors, or the file system refused.
        """
        failed = [f"rank {rank}: {report.failure}" for rank, report in enumerate(reports) if report.failure]
        if failed:
            raise CheckpointError(
                f"checkpoint {self._final} was not written, because not all ranks could write their part. "
                f"{'; '.join(failed[:3])}. Earlier checkpoints are intact."
            )
        with explaining(self._final, lease):
            indices, files, joined = join_parts(self.path, reports, layout)
            for rank in range(len(reports)):
                filesystem.remove_file(self.path / part_file(rank))
            texts = {**payload.texts, manifest.INDEX_FILE: index.render(indices, joined)}
            files |= put_texts(self.path, texts)
            root, counter = index.root_of(indices.values(), joined), 0 if lease is None else lease.counter
            content = manifest_of(payload, self._final.name, sequence, counter, files, root)
            content = replace(content, format_version=manifest.SHARDED_VERSION)
            put_texts(self.path, {manifest.FILE_NAME: manifest.render(content)})
            finish(self.path, payload.sign)
            give_name(self.path, self._final, payload, sequence, lease)
        return self._final


def together(ranks: Ranks, function: Callable[[], Result]) -> Result:
    """The result of `function` on this rank. If it fails on one rank, all ranks raise."""
    failure: Exception | None = None
    try:
        made = function()
    except Exception as error:
        failure = error
    ranks.raise_if_any(failure, "saving a checkpoint")
    return made


def wait_for_parts(ranks: Ranks, temporary: Path, abandoned: threading.Event) -> list[PartReport]:
    """Wait in the store until every rank has written its part. It uses no collective, so any thread may wait.

    Raises:
        CheckpointError: a rank did not report in time, or has failed; or `abandoned` was set.
    """
    names = [_key(temporary, rank) for rank in range(ranks.size)]
    pulse, began, broken_at, pause = _Pulse(ranks, names), time.monotonic(), None, _PAUSE_S[0]
    while (texts := ranks.get_if_all(names)) is None:
        now, why = time.monotonic(), ""
        if broken_at is None and ranks.is_broken():
            broken_at = now
        if now - began > ranks.longest_s:
            why = f"within {ranks.longest_s:g} s, which TrainerArguments(rank_zero_timeout_s=...) allows"
        elif broken_at is not None and now - broken_at > _GRACE_S:
            why = "when another rank failed"
        elif pulse.has_stopped(now):
            why = f"and one of them has been silent for {_SILENCE_S:g} s, so it has ended"
        if why:
            raise CheckpointError(
                f"the ranks {pulse.missing()} had not written their part of the checkpoint {why}. Earlier checkpoints "
                "are intact."
            )
        if abandoned.wait(pause):
            raise CheckpointError("the checkpoint being written was abandoned. Earlier checkpoints are intact.")
        pause = min(2 * pause, _PAUSE_S[1])
    return [PartReport.from_text(text) for text in texts]


class _Pulse:
    """Checks at intervals whether the ranks that have not reported yet are alive."""

    def __init__(self, ranks: Ranks, names: list[str]) -> None:
        self._ranks, self._names = ranks, names
        self._looked = time.monotonic()
        self._heard = dict.fromkeys(names, (self._looked, ""))

    def missing(self) -> list[int]:
        """The ranks that have not reported."""
        return [rank for rank, name in enumerate(self._names) if self._ranks.get_if_all([name]) is None]

    def has_stopped(self, now: float) -> bool:
        """Whether one of them has sent no heartbeat for too long."""
        if now - self._looked < _SILENCE_S / 4:
            return False
        self._looked = now
        for name in (self._names[rank] for rank in self.missing()):
            at, last = self._heard[name]
            beat = (self._ranks.get_if_all([f"{name}/beat"]) or [""])[0]
            self._heard[name] = (now, beat) if beat != last else (at, last)
            if now - self._heard[name][0] > _SILENCE_S:
                return True
        return False


@contextmanager
def sending_heartbeats(put: Callable[[str, str], None], name: str) -> Iterator[None]:
    """A block in which this rank calls `put` every second with a name in the store and a number that grows."""
    done = threading.Event()

    def beat() -> None:
        count = 0
        with suppress(RuntimeError):  # the store is gone
            while not done.wait(1.0):
                count += 1
                put(f"{name}/beat", str(count))

    threading.Thread(target=beat, name="trainstack-heartbeat", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _key(temporary: Path, rank: int) -> str:
    return f"sharded/{temporary.name}/{rank}"


def report_part(
    ranks: Ranks, temporary: Path, parts: Mapping[str, TensorPart], abandoned: threading.Event
) -> Exception | None:
    """Write the part of this rank, and report the result to the main process. Returns the failure, or None."""
    failure: Exception | None = None
    try:
        if not temporary.is_dir():
            raise CheckpointError(
                f"rank {ranks.rank} does not see {temporary}, which the main process has made. A sharded checkpoint "
                "needs one file system that all ranks share: use one as save_dir, or write sharded=False."
            )
        with sending_heartbeats(ranks.put, _key(temporary, ranks.rank)):
            report = write_part(temporary, parts, ranks.rank, abandoned)
    except Exception as error:
        failure, report = error, PartReport(failure=f"{type(error).__name__}: {error}")
    with suppress(RuntimeError):  # the store is gone, and so is the main process
        ranks.put(_key(temporary, ranks.rank), report.to_text())
    return failure
