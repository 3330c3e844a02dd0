"""`Lease` makes one process the owner of the directories to which a run writes.

Each lease is a file `.lease-<counter>.json`, and the one with the highest counter is valid. A process acquires a lease
by making a link for the next counter: of several that try, one succeeds, on network file systems too. No file locks are
used. The owner writes a heartbeat to its file. Others compare two reads by their own clock, because clocks of hosts
differ.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trainstack.checkpointing import lease_file
from trainstack.checkpointing.lease_file import LeaseFolder, LeasePlace, LeaseRecord, Seen
from trainstack.errors import CheckpointError, LeaseError

BEAT_S = 2.0
"""The longest time between two heartbeats, and so the time in which a second run finds that the first one is alive."""

_LEAST_BEATS = 6
"""The least number of heartbeats within the timeout of a lease, so that a slow file system does not lose it."""

_TRUST = 0.5
"""The part of the timeout during which a renewal is trusted without reading the file."""

Say = Callable[[str], None]


def now_s() -> tuple[float, float]:
    """A clock that counts the time in which the machine sleeps, if the system has one, and the wall clock.

    The sleep of a frozen virtual machine appears only in the wall clock, after that was set.
    """
    clock = getattr(time, "CLOCK_BOOTTIME", None)  # Linux only; elsewhere the monotonic clock has to do
    steady = time.monotonic() if clock is None else time.clock_gettime(clock)
    return steady, time.time()


class _Hold:
    """The lease of one place, held by this process."""

    def __init__(self, place: LeasePlace, record: LeaseRecord, made: list[Path]) -> None:
        self.place, self.record, self.made = place, record, made
        self.began = time.monotonic()

    def find_successor(self) -> Seen | None:
        """The lease of another process that has acquired this directory; None if there is none."""
        seen, mine = self.place.look(), self.record
        if seen is None or seen.counter < mine.counter:
            return None
        if seen.counter == mine.counter and (seen.record is None or seen.record.token == mine.token):
            return None  # the next heartbeat repairs a damaged one
        return seen

    def beat(self) -> bool:
        """Write the next heartbeat; False if the file is gone."""
        self.record = replace(self.record, beat=self.record.beat + 1, held_s=time.monotonic() - self.began)
        return self.place.overwrite(self.record)

    def claim_again(self) -> Seen | None:
        """Acquire the next counter. Returns the lease of another owner, if there is one.

        A released one counts too: the path then leads to the folder of another run, through a changed link.
        """
        seen, mine = self.place.look(), self.record
        if seen is not None and (seen.record is None or seen.record.token != mine.token):
            return seen
        record = replace(mine, counter=max(mine.counter, 0 if seen is None else seen.counter) + 1, beat=mine.beat + 1)
        self.place.make()
        if not self.place.claim(record):
            return self.place.look()
        self.record = record
        self.place.clear(record)
        return None


class Lease:
    """The right to write to some directories. Make one with `acquire`.

    Attributes:
        timeout_s: after so many seconds without a heartbeat, other processes may take the lease.
    """

    timeout_s: float

    def __init__(self, holds: list[_Hold], timeout_s: float, beat_s: float = BEAT_S) -> None:
        self._holds, self.timeout_s, self._beat_s = holds, timeout_s, beat_s
        self._pid = os.getpid()
        self._guard = threading.RLock()  # for the owner's thread, a background save and the renewal
        self._renewed = now_s()
        self._failure: str | None = None
        self._wake: Callable[[], None] = lambda: None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="trainstack: lease", daemon=True)

    @classmethod
    def acquire(
        cls,
        directories: Iterable[str | os.PathLike[str] | LeasePlace],
        *,
        timeout_s: float = 60.0,
        beat_s: float = BEAT_S,
        say: Say = lambda _: None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> Lease:
        """Become the owner of `directories`, which are created if they do not exist.

        A lease that was released, or whose process has ended on this host, is replaced at once. Any other is replaced
        after its timeout without a heartbeat.

        Args:
            directories: checkpoints are written to the last one; its counter is that of the lease.
            timeout_s: seconds without a heartbeat after which others may replace this lease.
            beat_s: the longest time between two heartbeats; shorter if `timeout_s` is short.
            say: called once with a message that this process waits.
            is_interrupted: called during the wait.

        Raises:
            LeaseError: another process owns one of them, or `is_interrupted` ended the wait.
            CheckpointError: a directory cannot be written.
        """
        lease = cls([], timeout_s, beat_s)
        try:
            for place in dict.fromkeys(_place(directory) for directory in directories):
                lease._renewed = now_s() if not lease._holds else lease._renewed
                lease._holds.append(_acquire(place, timeout_s, say, is_interrupted))
        except BaseException:
            lease.release()
            raise
        lease._thread.start()
        return lease

    def owns(self, directory: Path) -> bool:
        """Whether `directory` belongs to this lease."""
        with self._guard:
            paths = [hold.place.path for hold in self._holds if isinstance(hold.place, LeaseFolder)]
            return any(os.path.realpath(directory) == os.path.realpath(path) for path in paths)

    @property
    def is_lost(self) -> bool:
        """Whether another process has taken the lease. Reads no file."""
        return self._failure is not None

    @property
    def counter(self) -> int:
        """Increases with each owner of the directory: the fencing token of its checkpoints."""
        return self._holds[-1].record.counter if self._holds else 0

    def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from another thread, when the lease is lost; `check` then raises."""
        self._wake = wake

    def set_run_id(self, run_id: str | None) -> None:
        """Set the id of the run for the following heartbeats. The error of a second run contains it."""
        with self._guard:
            for hold in self._holds:
                hold.record = replace(hold.record, run_id=run_id)

    def check(self) -> None:
        """Raise if the lease was lost. Reads no file if the last renewal is recent.

        Raises:
            LeaseError: another process has taken the lease, or it can no longer be renewed.
        """
        if self._failure is None and self._age_s() < _TRUST * self.timeout_s:
            return
        self.verify()

    def verify(self) -> None:
        """Renew the lease now, and raise if it was lost. Called before each commit.

        After it, no other process can take the lease for `timeout_s`.

        Raises:
            LeaseError: see `check`.
        """
        with self._guard:
            try:
                self._refresh()
            except OSError as error:
                if self._age_s() >= _TRUST * self.timeout_s:
                    raise LeaseError(
                        f"the lease of {self._holds[0].place} cannot be renewed: {error}. Another process may own "
                        "the directory by now, so nothing more is written. Repair the file system, and restart with "
                        "resume='auto'."
                    ) from error
            if self._failure is not None:
                raise LeaseError(
                    f"this process no longer owns {self._failure}. Nothing more is written there. End this process."
                )

    def release(self) -> None:
        """Release the directories. It has no effect in a process that was forked from the owner."""
        if os.getpid() != self._pid:
            return
        self._ended.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)
        with self._guard:
            for hold in reversed(self._holds):
                with suppress(OSError):
                    if self._failure is None and hold.find_successor() is None:
                        hold.place.give_up(hold.record, hold.made)
            self._holds = []
            self._failure = self._failure or "the directory of the run: its lease was released"

    def _age_s(self) -> float:
        """Seconds since the last renewal began. A wall clock that was set back does not count."""
        return max(now - before for now, before in zip(now_s(), self._renewed, strict=True))

    def _renew(self) -> None:
        interval = min(self._beat_s, self.timeout_s / _LEAST_BEATS)
        while not self._ended.wait(interval):
            with self._guard, suppress(OSError):  # a share may be away for a moment; if it stays so, `check` raises
                if self._ended.is_set() or self._failure is not None:
                    return
                self._refresh()
            if self._failure is not None:
                self._wake()
                return

    def _refresh(self) -> None:
        """Write heartbeats. If others may assume that this process has ended, acquire the next counter as they do."""
        if self._failure is not None:
            return
        began, expired = now_s(), self._age_s() >= _TRUST * self.timeout_s
        for hold in self._holds:
            successor = hold.find_successor()
            if successor is None and (expired or not hold.beat()):
                successor = hold.claim_again()
            successor = successor or hold.find_successor()
            if successor is not None:
                self._failure = _describe_loss(hold, successor, self.timeout_s)
                return
        self._renewed = began


def _place(given: str | os.PathLike[str] | LeasePlace) -> LeasePlace:
    return LeaseFolder(Path(given).absolute()) if isinstance(given, str | os.PathLike) else given


def _acquire(place: LeasePlace, timeout_s: float, say: Say, is_interrupted: Callable[[], bool]) -> _Hold:
    owner, made = lease_file.this_process(), list[Path]()
    try:
        while True:
            made += place.make()  # another process may have removed its directory
            seen = place.look()
            if seen is not None and not seen.is_free:
                _wait_for_silence(place, seen, timeout_s, say, is_interrupted)
            counter = 1 if seen is None else seen.counter + 1
            token = uuid.uuid4().hex
            record = LeaseRecord(**owner, counter=counter, token=token, timeout_s=timeout_s)
            if place.claim(record):
                place.clear(record)
                return _Hold(place, record, made)
    except OSError as error:
        if isinstance(error, FileExistsError | NotADirectoryError):
            found = Path(error.filename or str(place))
            what = "a link to a missing folder" if found.is_symlink() and not found.exists() else "a file"
            raise CheckpointError(
                f"output_dir={str(place)!r}: {found} is {what}. Write the path of a folder."
            ) from error
        raise CheckpointError(
            f"the directory {place} of the run cannot be owned: {error}. Repair it, or use another output_dir."
        ) from error


def _wait_for_silence(
    place: LeasePlace, seen: Seen, timeout_s: float, say: Say, is_interrupted: Callable[[], bool]
) -> None:
    """Return if the owner of `seen` has ended or is silent for its timeout, or if another lease has appeared.

    Raises:
        LeaseError: the owner is alive.
    """
    allowed = timeout_s if seen.record is None else seen.record.timeout_s
    pause = min(0.2, allowed / 20)  # at least 20 reads within the timeout
    waited, before, said = 0.0, time.monotonic(), False
    while waited < allowed:
        time.sleep(pause)
        waited += min(time.monotonic() - before, 4 * pause)  # while this process was stopped, it saw no heartbeat
        before = time.monotonic()
        now = place.look()
        if now is None or now.counter != seen.counter or now.is_free:
            return
        if now.data != seen.data:
            raise LeaseError(
                f"{place} is in use by another run: {now.words} holds it{now.age_words}, and renewed its lease "
                f"within the last {max(waited, 0.1):.1f} s. Give this run another output_dir (or the save_dir or "
                "tb_log_dir that leads there), or end that process first; if it dies, the directory is free at once on "
                "its host, and elsewhere after the timeout of its lease."
            )
        if is_interrupted():
            raise LeaseError(f"the wait for the lease of {place} was interrupted. {seen.words} holds it.")
        if not said and waited > min(2 * BEAT_S, allowed / 2):
            said = True
            say(
                f"{place} is held by {seen.words}, which has not released it and sends no heartbeat. This run "
                f"acquires it after {allowed:g} s without one."
            )


def _describe_loss(hold: _Hold, successor: Seen, timeout_s: float) -> str:
    mine = hold.record
    if successor.counter <= mine.counter:
        return (
            f"{hold.place}: it has the lease of {successor.words} now, because a link or a folder was changed so "
            "that the path leads to the folder of another run, or its lease was deleted"
        )
    return (
        f"{hold.place}: {successor.words} has taken it over (lease {successor.counter} after {mine.counter}), "
        f"because process {mine.pid} on {mine.host} sent no heartbeat for {timeout_s:g} s, its lease was deleted, or "
        "the path leads to another folder now"
    )
