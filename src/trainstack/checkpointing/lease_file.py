"""Files that name the process that owns a directory: their content, and how one is acquired."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import socket
import stat
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from trainstack._files import file_mode, open_descriptor
from trainstack._files import make_directories as make_folders
from trainstack.checkpointing.field_types import build
from trainstack.errors import ConfigurationError

_SIZE = 1024
"""Bytes of a file. Each heartbeat overwrites all of them, so nothing of an older one remains."""

_NAME = re.compile(r"\.lease-(\d{9}|[1-9]\d{9,17})\.json")
"""The names of `_path`, which has none for a higher counter."""

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """The content of a lease.

    Attributes:
        host: name of the machine, for messages.
        machine: identifies the machine since its start, and the processes that are visible there.
        pid: of the owner.
        started: the start time of the process according to the system; distinguishes it from a later one with this pid.
        counter: of the lease.
        token: distinguishes this owner from all others.
        run_id: of the run; None while it is unknown.
        timeout_s: seconds without a heartbeat after which others may take the lease.
        beat: increases with each heartbeat.
        held_s: seconds for which the lease was held at the last heartbeat, by the owner's clock.
        released: whether the owner has released it.
    """

    host: str
    machine: str
    pid: int
    started: str
    counter: int
    token: str
    run_id: str | None = None
    timeout_s: float
    beat: int = 0
    held_s: float = 0.0
    released: bool = False

    def __post_init__(self) -> None:
        """Refuse a timeout that other processes would not accept. Raises ConfigurationError."""
        if not 0 < self.timeout_s <= LONGEST_TIMEOUT_S:
            raise ConfigurationError(
                f"timeout_s={self.timeout_s!r}: write seconds above 0, at most {LONGEST_TIMEOUT_S:g} (a day)."
            )

    def render(self) -> bytes:
        """The bytes of the file."""
        body = {"format": "trainstack-lease", **asdict(self)}
        data = json.dumps({**body, "sha256": _hash(body)}).encode("ascii")
        return data.ljust(_SIZE - 1) + b"\n"


LONGEST_TIMEOUT_S = 86_400.0
"""The longest timeout of a lease: a day."""

_MOST_LOOKS = 100
"""The number of attempts to read a lease that is deleted between listing and reading."""


def _hash(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode("ascii")).hexdigest()


def parse(data: bytes) -> LeaseRecord | None:
    """The lease in `data`; None if it is damaged or torn."""
    try:
        body = json.loads(data)
        if body.pop("sha256") != _hash(body) or body.pop("format") != "trainstack-lease":
            return None
        record = build(LeaseRecord, body)
        texts = (record.host, record.machine, record.started, record.token, record.run_id or "")
        return record if all(text.isprintable() for text in texts) else None  # they are printed in messages
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A lease that was read: its counter, its bytes, and its record; None if the bytes are damaged."""

    counter: int
    data: bytes
    record: LeaseRecord | None

    @property
    def is_here(self) -> bool:
        """Whether its owner runs, or ran, on this machine."""
        here = this_process()
        return self.record is not None and (self.record.machine, self.record.host) == (here["machine"], here["host"])

    @property
    def is_free(self) -> bool:
        """Whether it was released, or its owner has ended on this machine."""
        record = self.record
        if record is None:
            return False
        return record.released or (self.is_here and is_dead(record.pid, record.started))

    @property
    def words(self) -> str:
        """A description of the owner, for a message."""
        if self.record is None:
            return f"an unknown process (lease {self.counter} is damaged)"
        run = f" (run {self.record.run_id})" if self.record.run_id else ""
        return f"process {self.record.pid} on {self.record.host}{run}"

    @property
    def age_words(self) -> str:
        """The time for which it was held, for a message."""
        if self.record is None:
            return ""
        seconds = self.record.held_s
        return f" for {seconds:.0f} s" if seconds < 120 else f" for {seconds / 60:.0f} minutes"


def this_process() -> dict[str, Any]:
    """Host, machine, pid and start of this process."""
    return {
        "host": re.sub(r"[^A-Za-z0-9_.-]", "_", socket.gethostname())[:128] or "host",
        "machine": _machine(),
        "pid": os.getpid(),
        "started": _start_of("self"),
    }


def _machine() -> str:
    """A text that is equal for two processes if one can see the other's pid; each container is a machine."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return f"{uuid.getnode():x}"


def _start_of(pid: int | str) -> str:
    """The start time of a process, in Linux's clock ticks; empty if it is unknown."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]  # field 22 of proc(5)
    return ""


def is_dead(pid: int, started: str = "") -> bool:
    """Whether the process that had this pid and start has ended. An ended process that was not waited for counts as
    dead.

    Without `started` any process with this pid counts.
    """
    if os.name == "nt":
        return False  # on Windows `os.kill` would end the process
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass  # it belongs to another user
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except ProcessLookupError:
        return True
    except OSError:
        return False  # hidden, or not Linux
    return fields[0] in "ZX" or bool(started and fields[19] != started)


def look(directory: Path) -> Seen | None:
    """The valid lease of `directory`; None if it has none."""
    for _ in range(_MOST_LOOKS):
        counters = []
        with suppress(FileNotFoundError), os.scandir(directory) as entries:
            named = (_NAME.fullmatch(entry.name) for entry in entries)
            counters = [int(match[1]) for match in named if match]
        if not counters:
            return None
        counter = max(counters)
        try:
            data = _read(_path(directory, counter))
        except FileNotFoundError:
            continue  # a successor has deleted it
        return Seen(counter=counter, data=data, record=parse(data))
    raise OSError(errno.EBUSY, "its leases change all the time; another process may delete them", os.fspath(directory))


def is_held_here(directory: Path) -> bool:
    """Whether a running process of this machine holds the lease of `directory`."""
    try:
        seen = look(directory)
    except OSError:
        return False
    return seen is not None and seen.is_here and not seen.is_free


def _read(path: Path) -> bytes:
    """The content of a regular file; empty for a link or another kind of file, which counts as a damaged lease."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        return b""
    descriptor = open_descriptor(path)
    try:
        return os.read(descriptor, 4 * _SIZE)
    finally:
        os.close(descriptor)


def claim(directory: Path, record: LeaseRecord) -> bool:
    """Create the file of `record`. False if another process has this counter."""
    path, aside = _path(directory, record.counter), directory / f".lease-{record.token}.tmp"
    try:
        _write_new(aside, record.render())
        os.link(aside, path)
    except FileExistsError:
        return os.stat(aside).st_nlink > 1  # NFS repeats a request after a lost answer, so our link may exist
    except FileNotFoundError:
        return False  # the winner has deleted it, or another process has deleted the directory
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        try:
            _write_new(path, record.render())
        except FileExistsError:
            return False
    finally:
        with suppress(OSError):
            os.unlink(aside)
    return True


def _write_new(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file_mode(path))
    try:
        os.write(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def overwrite(directory: Path, record: LeaseRecord) -> bool:
    """Write `record` to its file, in place. False if the file does not exist.

    In place, because NFS clients read a file again when they open it, but may cache a directory entry for a minute.
    """
    try:
        descriptor = open_descriptor(_path(directory, record.counter), os.O_WRONLY)
    except FileNotFoundError:
        return False
    try:
        os.write(descriptor, record.render())
    finally:
        os.close(descriptor)
    return True


def clear(directory: Path, record: LeaseRecord) -> None:
    """Delete the files of lower counters, and temporary files of processes that were too late."""
    with suppress(OSError):
        for name in os.listdir(directory):
            match = _NAME.fullmatch(name)
            late = name.startswith(".lease-") and name.endswith(".tmp") and record.token not in name
            if late or (match and int(match[1]) < record.counter):
                with suppress(OSError):
                    os.unlink(directory / name)


def give_up(directory: Path, record: LeaseRecord, made: list[Path]) -> None:
    """Mark `record` as released. If nothing else was written, delete the lease and the created folders `made`."""
    path = _path(directory, record.counter)
    if made and os.listdir(directory) == [path.name]:
        os.unlink(path)
        for folder in made:
            os.rmdir(folder)
        return
    overwrite(directory, LeaseRecord(**{**asdict(record), "released": True}))


def make_directories(directory: Path) -> list[Path]:
    """Create `directory` and its missing parents. Returns the created ones, the innermost first."""
    missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    make_folders(directory)
    return missing


def _path(directory: Path, counter: int) -> Path:
    """The path of a lease. Raises OSError if the counter has too many digits."""
    path = directory / f".lease-{counter:09d}.json"
    if _NAME.fullmatch(path.name) is None:
        before = f".lease-{counter - 1:09d}.json"
        raise OSError(errno.EOVERFLOW, f"no number follows that of {before}; delete it when no run uses the folder")
    return path


class LeasePlace(Protocol):
    """A place for leases. Its `str` is for messages."""

    def look(self) -> Seen | None:
        """See the function `look`."""

    def claim(self, record: LeaseRecord) -> bool:
        """See the function `claim`."""

    def overwrite(self, record: LeaseRecord) -> bool:
        """See the function `overwrite`."""

    def clear(self, record: LeaseRecord) -> None:
        """See the function `clear`."""

    def give_up(self, record: LeaseRecord, made: list[Path]) -> None:
        """See the function `give_up`."""

    def make(self) -> list[Path]:
        """See `make_directories`."""


@dataclass(frozen=True, slots=True)
class LeaseFolder(LeasePlace):
    """A folder with leases."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def look(self) -> Seen | None:
        return look(self.path)

    def claim(self, record: LeaseRecord) -> bool:
        return claim(self.path, record)

    def overwrite(self, record: LeaseRecord) -> bool:
        return overwrite(self.path, record)

    def clear(self, record: LeaseRecord) -> None:
        clear(self.path, record)

    def give_up(self, record: LeaseRecord, made: list[Path]) -> None:
        give_up(self.path, record, made)

    def make(self) -> list[Path]:
        return make_directories(self.path)
