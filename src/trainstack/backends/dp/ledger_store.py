"""`LedgerStore` keeps the bytes of a privacy ledger: in a file, or in a store that `register_ledger_store` names."""

from __future__ import annotations

import contextlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from trainstack._files import file_mode, local_path, make_directories, open_descriptor, sync_directory
from trainstack.errors import ConfigurationError, PrivacyLedgerError

try:
    import fcntl
except ImportError:  # Windows: one process a file
    fcntl = None  # type: ignore[assignment]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


class OpenLedger(ABC):
    """The bytes of a ledger between `open` and the end of its block."""

    @abstractmethod
    def size(self) -> int:
        """The number of bytes."""

    @abstractmethod
    def read(self, begin: int, count: int) -> bytes:
        """At most `count` bytes from the byte `begin` on; none at the end."""

    @abstractmethod
    def append(self, data: bytes) -> None:
        """Add `data` durably: when this returns, a power cut does not lose it."""

    @abstractmethod
    def cut(self, size: int) -> None:
        """Drop the bytes beyond `size`."""


class LedgerStore(ABC):
    """The storage of a ledger.

    Attributes:
        address: for messages and statements; opens the same ledger elsewhere.
    """

    address: str

    @abstractmethod
    def exists(self) -> bool:
        """Whether anything was written."""

    @abstractmethod
    def open(self, *, write: bool) -> AbstractContextManager[OpenLedger]:
        """The bytes of the ledger; with `write`, no other writer may write until the block ends.

        Raises:
            PrivacyLedgerError: it cannot be used.
        """

    def place(self) -> dict[str, str | int]:
        """Facts that change when the ledger is copied; none where it cannot be copied with a folder."""
        return {}


_factories: dict[str, Callable[[str], LedgerStore]] = {}


def register_ledger_store(scheme: str, factory: Callable[[str], LedgerStore]) -> None:
    """Let `DifferentialPrivacyArguments(ledger="scheme://...")` name a store that you provide.

    Args:
        scheme: the text before `://`.
        factory: makes the store of an address, which it is given whole.

    Raises:
        ConfigurationError: the scheme is not a word, or is already registered.
    """
    if not _SCHEME.fullmatch(f"{scheme}://"):
        raise ConfigurationError(f"scheme={scheme!r}: write letters and digits, such as 'redis'.")
    if _factories.get(scheme, factory) is not factory:
        raise ConfigurationError(f"The ledger store {scheme!r} is registered already. Choose another scheme.")
    _factories[scheme] = factory


def ledger_store(address: str | os.PathLike[str]) -> LedgerStore:
    """The store of `address`: a path, or `scheme://...` of a registered store.

    Raises:
        ConfigurationError: no store of that scheme is registered.
    """
    found = _SCHEME.match(os.fspath(address))
    if found is None:
        return FileStore(address)
    if found[1] not in _factories:
        known = ", ".join(sorted(_factories)) or "none"
        raise ConfigurationError(
            f"ledger={os.fspath(address)!r}: no ledger store {found[1]!r} is registered (registered: {known}). Write "
            f"a path, or call register_ledger_store({found[1]!r}, ...) first."
        )
    return _factories[found[1]](os.fspath(address))


class FileStore(LedgerStore):
    """A ledger in a file, which is opened again each time."""

    path: Path
    address: str

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(local_path(path, "ledger")))  # which a later start in another folder reads
        self.address = str(self.path)
        self._name_is_synced = False

    def exists(self) -> bool:
        return self.path.exists()

    def place(self) -> dict[str, str | int]:
        # not the host, which changes on a cluster while the folder stays
        folder = os.path.realpath(self.path.parent)
        return {"path": os.path.join(folder, self.path.name), "inode": os.stat(folder).st_ino}

    @contextlib.contextmanager
    def open(self, *, write: bool) -> Iterator[OpenLedger]:
        """The file; failures of the file system get its path and the way to continue."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT if write else os.O_RDONLY
        try:
            if write:
                make_directories(self.path.parent)
            descriptor = open_descriptor(self.path, flags, file_mode(self.path) & 0o644)
            try:
                if write and fcntl is not None:
                    with contextlib.suppress(OSError):  # file systems without locks: there, one process at a time
                        fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield _OpenFile(descriptor, self._sync_name)
            finally:
                os.close(descriptor)  # gives the lock back
        except OSError as error:
            raise PrivacyLedgerError(
                f"The privacy ledger {self.path} cannot be used: {error.strerror or error}. No private step is taken "
                "without it: free the disk or correct the permissions, then resume."
            ) from error

    def _sync_name(self) -> None:
        if not self._name_is_synced:
            sync_directory(self.path.parent)
            self._name_is_synced = True


class _OpenFile(OpenLedger):
    def __init__(self, descriptor: int, sync_name: Callable[[], None]) -> None:
        self._descriptor, self._sync_name = descriptor, sync_name

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read(self, begin: int, count: int) -> bytes:
        os.lseek(self._descriptor, begin, os.SEEK_SET)
        return os.read(self._descriptor, count)

    def append(self, data: bytes) -> None:
        write(self._descriptor, data)
        sync(self._descriptor)
        self._sync_name()

    def cut(self, size: int) -> None:
        cut(self._descriptor, size)


# Calls that change the file system, so that tests can break any of them.
def write(descriptor: int, data: bytes) -> None:
    """Write all of `data`."""
    while data:
        data = data[os.write(descriptor, data) :]


def sync(descriptor: int) -> None:
    """Force all writes to the disk."""
    os.fsync(descriptor)


def cut(descriptor: int, size: int) -> None:
    """Drop all bytes beyond `size`."""
    os.ftruncate(descriptor, size)
