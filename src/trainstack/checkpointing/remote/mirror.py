"""`Mirror` copies the folder of a run to an object store: uploads in the background, and downloads to resume."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from trainstack._files import MAX_SMALL_BYTES, atomic_write, make_directories, read_small
from trainstack.checkpointing import filesystem, manifest, temp_dirs
from trainstack.checkpointing.arguments import DefaultCheckpointerArguments
from trainstack.checkpointing.directory import CheckpointInfo, read_entry
from trainstack.checkpointing.lease import Lease
from trainstack.checkpointing.remote.entries import (
    Entry,
    Listing,
    delete_entry,
    download,
    is_copied,
    key_of,
    list_entries,
    upload_folder,
)
from trainstack.checkpointing.remote.leases import BEAT_S, RemoteLeases
from trainstack.checkpointing.remote.store import ObjectStore
from trainstack.checkpointing.verification import of_run
from trainstack.errors import CheckpointDamagedError, CheckpointError, LeaseError

Say = Callable[[int, str], None]

CHECKPOINTS = "checkpoints"
_MARK = ".mirror.json"
_PAUSES_S = (1.0, 60.0)
PATIENCE_S = 600.0
"""At the end of a run, an upload that makes no progress for this time is abandoned."""
MOST_FAILURES = 6
"""At the end of a run, the upload is abandoned after this number of failed attempts, about half a minute."""
_TELL_S = 10.0
_FRESH_S = 5.0
"""Exports younger than this are not uploaded yet: one that equals an existing export is deleted at once."""


class Mirror:
    """The copy of one run in a store. Only the main process has it, and the lease at the address excludes other
    processes.

    A process without that lease uploads nothing.

    Args:
        address: of the run.
        folder: the local copy, in which the run works.
        args: of the checkpointer: the number and the names of checkpoints.
        last: the name of the file that is uploaded after all checkpoints.
        say: takes a level of the logging module and a line.

    Attributes:
        problem: the reason why the last upload failed; None if it did not.
    """

    store: ObjectStore
    folder: Path

    def __init__(self, address: str, folder: Path, args: DefaultCheckpointerArguments, last: str, say: Say) -> None:
        self.store, self.folder = ObjectStore(address, self._count), folder
        self.problem: str | None = None
        self._args, self._last, self._say = args, last, say
        self._lease: Lease | None = None
        self._known: dict[str, Entry] = {}
        self._deleted: set[str] = set()
        self._was_taken = self._is_tidy = self._has_given_up = self._is_finishing = False
        self._failures = 0
        self._uploaded: dict[Path, tuple[int, int, int]] = {}
        self._change = threading.Condition()
        self._wanted = self._done = self._moved = 0
        self._is_ended = False
        self._thread: threading.Thread | None = None

    # --- owning --------------------------------------------------------------------------------------------

    def take(self, timeout_s: float, is_interrupted: Callable[[], bool]) -> None:
        """Acquire the address. If another machine has continued the run, the local copy is renamed or deleted.

        Raises:
            LeaseError: another process owns it.
            CheckpointError: the store or the local folder cannot be used; or another process has written to it since
                this one owned it last.
        """
        if self._lease is not None:
            return
        say = lambda line: self._say(logging.WARNING, line)  # noqa: E731
        self._lease = Lease.acquire(
            [RemoteLeases(self.store)], timeout_s=timeout_s, beat_s=BEAT_S, say=say, is_interrupted=is_interrupted
        )
        try:
            self._check_copy()
            self._mark()
        except OSError as error:
            self.release()
            raise CheckpointError(f"the run at {self.store.address} cannot be used: {error}") from error
        except BaseException:
            self.release()
            raise
        self._was_taken = True

    def release(self) -> None:
        """Stop uploading, and release the address. Call `finish` first to upload everything."""
        with self._change:
            self._is_ended = True
            self._change.notify_all()
        lease, self._lease, self._thread = self._lease, None, None
        if lease is not None:
            lease.release()

    @property
    def is_lost(self) -> bool:
        """Whether another process has acquired the address."""
        return self._lease is not None and self._lease.is_lost

    def close(self) -> None:
        """Call `finish` and `release`, and log files that could not be uploaded."""
        try:
            problem = None if self.is_lost else self.finish()
            if problem is not None:
                self._say(logging.WARNING, self.describe(problem))
        finally:
            self.release()

    def describe(self, problem: str) -> str:
        """The message about an upload that could not be finished."""
        return (
            f"not everything was uploaded to {self.store.address}: {problem} The local copy {self.folder} has it. "
            "Start again on this machine with resume='auto' to upload it."
        )

    def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from another thread, when another process has acquired the address."""
        if self._lease is not None:
            self._lease.watch(wake)

    def check(self) -> None:
        """Raise LeaseError if another process has acquired the address. An unreachable store does not raise."""
        if self._lease is not None and self.is_lost:
            self._lease.verify()

    def _mark(self, *more: str) -> None:
        """Record the entries of this copy, and `more`, which is recorded before it is committed."""
        make_directories(self.folder)
        body = {"address": self.store.address, "entries": sorted({*self._known, *more})}
        atomic_write(self.folder / _MARK, json.dumps(body).encode(), durable=True)

    def _check_copy(self) -> None:
        """Keep the local copy only if no other process has written to the store since."""
        if not self.folder.is_dir():
            return
        mark = {}
        with suppress(OSError, ValueError):
            mark = json.loads(read_small(self.folder / _MARK))
        if mark.get("address", "") != self.store.address and any(self.folder.iterdir()):
            raise CheckpointError(
                f"{self.folder} is not empty, and is not the local copy of {self.store.address}. Write another "
                "local_dir, or delete that folder."
            )
        known, self._known = set(mark.get("entries", ())), list_entries(self.store, self._known).entries
        if known >= set(self._known) and (self._known or not known):
            return
        if self._was_taken:
            raise CheckpointError(
                f"another process has written to {self.store.address} since this one trained. Start again with "
                "resume='auto', which continues from the newest checkpoint."
            )
        if all(key in self._known for key, _, _ in self._local_entries()):
            shutil.rmtree(self.folder)
            return
        aside = self.folder.with_name(f"{self.folder.name}.aside-{time.time_ns():d}")
        os.rename(self.folder, aside)
        self._say(
            logging.WARNING,
            f"the local copy of {self.store.address} has checkpoints that were not uploaded, and is not continued: "
            f"another machine has written to the store since, or it was emptied. The copy is kept as {aside}.",
        )

    # --- downloading ---------------------------------------------------------------------------------------

    def pull(self, resume: object) -> None:
        """Download the files that a start with this `resume` needs: logs, the record, and one checkpoint.

        Existing files are not replaced. A damaged checkpoint is skipped with a warning, and an older one is used.

        Raises:
            CheckpointError: the store cannot be read; or all its checkpoints are damaged.
        """
        try:
            listing = list_entries(self.store, self._known)
            self._known = listing.entries
            for key in listing.files:
                target = self.folder / key
                if not target.exists():
                    self.store.replace_file(key, target)
            self._pull_checkpoint(listing, best=resume == "best")
        except OSError as error:
            raise CheckpointError(
                f"the run at {self.store.address} cannot be read: {error}. Check the connection and the credentials."
            ) from error

    def _pull_checkpoint(self, listing: Listing, *, best: bool) -> None:
        contents, entries = listing.within(CHECKPOINTS)
        for info in contents.begun:
            self._pull_entry(entries[info])
        problems = [error for key, error in listing.broken.items() if key.startswith(f"{CHECKPOINTS}/")]
        for problem in problems:
            self._say(logging.WARNING, f"skipping a damaged checkpoint: {problem}")
        candidates = of_run(contents, self._args.file_prefix)
        for info in self._args.monitored.rank(candidates) if best else candidates:
            try:
                self._pull_entry(entries[info])
            except CheckpointDamagedError as error:
                self._say(logging.WARNING, f"skipping a damaged checkpoint: {error}")
                problems.append(error)
            else:
                return
        if candidates and not best:
            details = "\n".join(f"  - {problem}" for problem in problems)
            raise CheckpointDamagedError(f"every checkpoint at {self.store.address} is damaged:\n{details}")

    def _pull_entry(self, entry: Entry) -> Path:
        target = self.folder / entry.place
        if not is_copied(entry, target):
            mine = read_entry(target)
            if isinstance(mine, CheckpointInfo) and mine.sequence > entry.info.sequence:
                return target
            self._say(logging.INFO, f"downloading {self.store.address}/{entry.key}")
            download(self.store, entry, target)
        return target

    # --- uploading -----------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Delete the run in the store, its record last, so that after a kill it can be deleted again."""
        listing = list_entries(self.store, self._known)
        for entry in listing.entries.values():
            delete_entry(self.store, entry)
        files = sorted(listing.files, key=lambda key: key == self._last)
        self.store.delete([*listing.unfinished, *files])
        self._known, self._uploaded = {}, {}
        self._mark()

    def start(self) -> None:
        """Start uploading in the background, each time `wake` is called."""
        if self._thread is None and self._lease is not None:
            self._is_ended = self._has_given_up = self._is_finishing = False
            self._thread = threading.Thread(target=self._work, name="trainstack: upload", daemon=True)
            self._thread.start()
        self.wake()

    def wake(self) -> None:
        """Request an upload after something was written. Any thread may call it."""
        with self._change:
            self._wanted += 1
            self._change.notify_all()

    def finish(self, within_s: float | None = None) -> str | None:
        """Wait until all current files are uploaded. Returns None, or the reason why they are not.

        Args:
            within_s: the longest wait; None to wait as long as bytes are sent and few attempts fail.
        """
        if self._thread is None or self._has_given_up:
            return None
        began = moved_at = told = time.monotonic()
        self._is_finishing = True
        self.wake()
        with self._change:
            aim, moved, failures = self._wanted, self._moved, self._failures
            while self._done < aim:
                self._change.wait(0.5)
                now = time.monotonic()
                if self._moved != moved:
                    moved, moved_at = self._moved, now
                if now - told > _TELL_S:
                    told = now
                    self._say(logging.INFO, f"uploading to {self.store.address}: {moved / 1e6:,.0f} MB so far")
                is_over = now - moved_at > PATIENCE_S or self._failures - failures >= MOST_FAILURES
                if self.is_lost or is_over or (within_s is not None and now - began > within_s):
                    self._has_given_up = True
                    return self.problem or f"it has not ended within {now - began:.0f} s."
        return None

    def _count(self, count: int) -> None:
        self._moved += count

    def _work(self) -> None:
        thread, pause = threading.current_thread(), _PAUSES_S[0]
        while True:
            with self._change:
                while self._done >= self._wanted and not self._is_ended:
                    self._change.wait()
                if self._is_ended or self._thread is not thread or self.is_lost:
                    return
                aim = self._wanted
            try:
                self._upload()
            except Exception as error:
                if self.problem is None and not self._is_ended:
                    self._say(
                        logging.WARNING,
                        f"the upload to {self.store.address} failed and is tried again: {error}. The local copy "
                        f"{self.folder} has everything.",
                    )
                self.problem, self._failures = str(error), self._failures + 1
                with self._change:
                    self._change.wait_for(lambda: self._is_ended, pause)
                pause = min(2 * pause, _PAUSES_S[1])
                continue
            if self.problem is not None:
                self._say(logging.WARNING, f"the upload to {self.store.address} works again.")
            self.problem, pause = None, _PAUSES_S[0]
            with self._change:
                self._done = aim
                self._change.notify_all()

    def _upload(self) -> None:
        """Upload logs first, because a checkpoint must not be newer than them; then checkpoints, and the record
        last."""
        self._check_owner()
        if not self._is_tidy:
            self.store.delete(list_entries(self.store, self._known).unfinished)  # left by a process that was killed
            self._is_tidy = True
        files, record = self._plain_files(), self.folder / self._last
        for path in files:
            if path != record:
                self._upload_file(path)
        self._deleted.intersection_update(key for key, _, _ in self._local_entries())
        tried = set(self._deleted)
        while missing := [one for one in self._local_entries() if one[0] not in self._known and one[0] not in tried]:
            tried.add(missing[0][0])
            self._upload_entry(*missing[0])
        self._delete_old()
        if record in files:
            self._upload_file(record)

    def _check_owner(self, *, renew: bool = False) -> None:
        """Raise if this process may no longer write. `renew` renews the lease first, for commits."""
        lease = self._lease
        if lease is None or self._is_ended:
            raise LeaseError(f"{self.store.address} is no longer owned.")
        lease.verify() if renew else lease.check()

    def _walk(self) -> Iterator[tuple[Path, bool]]:
        """All files, and the folders of checkpoints. Hidden ones are temporary and omitted."""
        for place, folders, files in os.walk(self.folder):
            for name in list(folders):
                path = Path(place, name)
                if name.startswith(".") or path.is_symlink():
                    folders.remove(name)
                elif isinstance(read_entry(path), CheckpointInfo):
                    folders.remove(name)
                    yield path, True
            yield from ((Path(place, name), False) for name in files if not name.startswith("."))

    def _plain_files(self) -> list[Path]:
        return [path for path, is_entry in self._walk() if not is_entry and path.is_file() and not path.is_symlink()]

    def _local_entries(self) -> list[tuple[str, CheckpointInfo, bytes]]:
        """The keys of the local checkpoints and exports, beginnings first, then the newest first."""
        found = []
        for path in [path for path, is_entry in self._walk() if is_entry]:
            with suppress(OSError):  # retention has deleted it
                data, info = read_small(path / manifest.FILE_NAME), read_entry(path)
                fresh = not self._is_finishing and time.time() - path.stat().st_mtime < _FRESH_S
                if isinstance(info, CheckpointInfo) and not (info.kind == "model" and fresh):
                    found.append((key_of(path.relative_to(self.folder).as_posix(), data), info, data))
        return sorted(found, key=lambda one: (one[1].kind != "begin", -one[1].sequence))

    def _upload_file(self, path: Path) -> None:
        self._check_owner()
        try:
            status = path.stat()
            mark = (status.st_ino, status.st_size, status.st_mtime_ns)
            if self._uploaded.get(path) != mark:
                key = path.relative_to(self.folder).as_posix()
                if status.st_size > MAX_SMALL_BYTES:
                    self.store.upload(path, key)
                else:  # a file that grows during the upload is read once, so its bytes are consistent
                    self.store.put(key, path.read_bytes())
                self._uploaded[path] = mark
        except FileNotFoundError:
            return

    def _upload_entry(self, key: str, info: CheckpointInfo, data: bytes) -> None:
        """Upload a checkpoint from links to its files, because retention may delete it during the upload."""
        pinned = temp_dirs.claim_temp_dir(info.path.parent, temp_dirs.TEMPORARY, info.path.name)
        source = pinned
        try:
            filesystem.make_directory(pinned)
            try:
                for path in info.path.iterdir():
                    if path.name != manifest.FILE_NAME:  # a link would change its times, the key of `_verified`
                        os.link(path, pinned / path.name)
            except FileNotFoundError:
                return  # deleted
            except OSError:  # the file system has no links
                source = info.path
            content = manifest.parse(data, info.path)
            self._mark(key)
            upload_folder(self.store, source, key, data, partial(self._check_owner, renew=True))
            files = {path.name: path.stat().st_size for path in source.iterdir() if path.is_file()}
            files |= {name: record.size for name, record in content.files.items()}
            self._known[key] = Entry(
                key=key, content=content, data=data, files={**files, manifest.FILE_NAME: len(data)}
            )
            self._say(logging.INFO, f"uploaded {self.store.address}/{key}")
        finally:
            shutil.rmtree(pinned, ignore_errors=True)
            temp_dirs.release_temp_dir(pinned)

    def _delete_old(self) -> None:
        """Delete entries that another entry of the same name has replaced, and checkpoints that need not be kept."""
        newest: dict[object, Entry] = {}
        for entry in sorted(self._known.values(), key=lambda one: (one.info.sequence, one.info.created)):
            newest[entry.place] = entry
        self._delete([entry for entry in self._known.values() if newest[entry.place] is not entry])
        contents, entries = Listing(entries=self._known).within(CHECKPOINTS)
        self._delete([entries[info] for info in self._beyond(of_run(contents, self._args.file_prefix))])

    def _delete(self, doomed: list[Entry]) -> None:
        for entry in doomed:
            self._check_owner()
            self._deleted.add(entry.key)
            del self._known[entry.key]
            delete_entry(self.store, entry)
            self._say(logging.INFO, f"deleted {self.store.address}/{entry.key}")

    def _beyond(self, run: list[CheckpointInfo]) -> list[CheckpointInfo]:
        if self._args.keep_last is None:
            return []
        ours = [info for info in run if not info.pinned]
        kept = {*ours[: self._args.keep_last], *self._args.monitored.rank(ours)[: self._args.keep_best]}
        return [info for info in ours if info not in kept]
