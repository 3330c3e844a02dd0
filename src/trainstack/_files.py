"""User paths, durable directories, and files: only regular files are opened, and writes are atomic.

A folder may contain any kind of file: opening a FIFO blocks, a link to `/dev/zero` never ends, and a sparse file of
4 TiB takes no space on the disk.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedRandom, BufferedReader, FileIO
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from trainstack.errors import CheckpointError, ConfigurationError

_logger = logging.getLogger("trainstack")

AnyPath = TypeVar("AnyPath", str, os.PathLike[str], str | os.PathLike[str])

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""Matches also `Path("s3://bucket")`, which has one slash. `C:/` is a drive and does not match."""

REMOTE_SCHEMES = {
    "s3": ("s3fs", "remote"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
    "memory": ("fsspec", "remote"),
}
"""Stores that create an object by one conditional request, each with the required package and its extra."""


def is_address(path: object) -> bool:
    """Whether `path` is an address such as `s3://bucket/run`, or that of `Path`, `s3:/bucket/run`."""
    return isinstance(path, str | os.PathLike) and _SCHEME.match(os.fspath(path)) is not None


def remote_address(name: str, path: str | os.PathLike[str]) -> str:
    """The address `path` with two slashes after its scheme and none at its end.

    Args:
        name: of the argument, for the error.

    Raises:
        ConfigurationError: the store is not supported, or the address lacks the bucket.
    """
    text = os.fspath(path)
    scheme, _, place = text.partition(":")
    place = place.strip("/")
    if scheme not in REMOTE_SCHEMES:
        known = ", ".join(f"{one}://" for one in REMOTE_SCHEMES)
        raise ConfigurationError(
            f"{name}={text!r}: addresses that begin with {scheme}:// cannot be used. Write a local path, such as that "
            f"of a mounted bucket, or one of {known} (pip install 'trainstack[remote]', or [gcs] for Google)."
        )
    if not place or "//" in place or {".", ".."} & set(place.split("/")):
        raise ConfigurationError(
            f"{name}={text!r}: write the bucket and the folder of one run, such as '{scheme}://bucket/runs/1'."
        )
    return f"{scheme}://{place}"


def expand_path(name: str, path: AnyPath) -> AnyPath:
    """`path` with the home folder for `~`; a string remains a string.

    Args:
        name: of the argument, for the error.

    Raises:
        ConfigurationError: the path is an address, such as `s3://bucket/run`, or empty, or `~name` of no user.
    """
    text = os.fspath(path)
    if not text:
        raise ConfigurationError(f"{name}={path!r} is empty. Write a path; '.' is the current folder.")
    if is_address(text):
        raise ConfigurationError(
            f"{name}={text!r} is an address, and only local paths are read and written here. A folder of this name "
            "would be made. Write a local path. Addresses are accepted by output_dir, resume and init_weights_from, by "
            "export and by trainstack checkpoints: docs/remote.md."
        )
    if "\0" in text:
        raise ConfigurationError(f"{name}={text!r} has a NUL character, which no path has. Write the path without it.")
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise ConfigurationError(
            f"{name}={text!r}: there is no such home folder. Write './{text}' for a file with this name."
        )
    if expanded == text:
        return path
    return expanded if isinstance(path, str) else type(path)(expanded)  # type: ignore[call-arg, return-value]


def real_path(path: str | os.PathLike[str]) -> Path:
    """`Path.resolve` that does not raise if links form a loop."""
    return Path(os.path.realpath(path))


def local_path(path: str | os.PathLike[str], name: str = "path") -> Path:
    """`expand_path` as a `Path`."""
    return Path(expand_path(name, os.fspath(path)))


@contextmanager
def library_error(path: Path) -> Iterator[None]:
    """A block in which an error of the file system becomes a CheckpointError that names `path`, of a run."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path} cannot be used: {error}. Free space, repair the folder, or write another output_dir."
        ) from error


_private: set[str] = set()
"""Folders whose files only the owner may read: one for each run with private files."""


def keep_private(folder: Path) -> None:
    """From now on, create files in `folder` so that only the owner may read them; change `folder` too."""
    _private.add(os.path.realpath(folder))
    if folder.is_dir():
        os.chmod(folder, 0o700)


def is_private(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a folder of `keep_private`, or inside one."""
    full = os.path.realpath(path) if _private else ""
    return any(full == folder or full.startswith(folder + os.sep) for folder in _private)


def file_mode(path: str | os.PathLike[str]) -> int:
    """The mode for creating the file `path`, before the umask."""
    return 0o600 if is_private(path) else 0o666


def folder_mode(path: str | os.PathLike[str]) -> int:
    """The mode for creating the folder `path`, before the umask."""
    return 0o700 if is_private(path) else 0o777


MAX_SMALL_BYTES = 16 << 20
"""The largest manifest or other small file to read. A manifest has some kilobytes."""

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}
_OPEN_FLAGS = sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))


def open_descriptor(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """`os.open` for regular files and links to them only. Never waits for another process.

    Raises:
        OSError: it is not a regular file, or the system refused.
    """
    with suppress(FileNotFoundError):  # `flags` may create it
        _check_regular(path, os.stat(path))  # before the open, because opening a device may have an effect
    descriptor = os.open(path, flags | _OPEN_FLAGS, mode)
    try:
        _check_regular(path, os.fstat(descriptor))  # again, because the path may have been replaced in between
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))


def open_regular(path: str | os.PathLike[str]) -> FileIO:
    """Open a file for reading, without a buffer. See `open_descriptor`."""
    return FileIO(open_descriptor(path), "rb")


def open_for_reading(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a file for reading, with a buffer. See `open_descriptor`."""
    return BufferedReader(open_regular(path))


def open_for_update(path: str | os.PathLike[str]) -> BufferedRandom:
    """Open an existing file for reading and writing. See `open_descriptor`."""
    return BufferedRandom(FileIO(open_descriptor(path, os.O_RDWR), "rb+"))


def read_small(path: str | os.PathLike[str], limit: int = MAX_SMALL_BYTES) -> bytes:
    """Return the content of a small regular file.

    Raises:
        OSError: see `open_descriptor`, or the file has more than `limit` bytes.
    """
    with open_for_reading(path) as handle:
        content = handle.read(min(limit, os.fstat(handle.fileno()).st_size) + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit:,} bytes", os.fspath(path))
    return content


def create_file(path: Path) -> BinaryIO:
    """Create a new binary file, which only the owner can read in a folder of `keep_private`."""

    def create(name: str, flags: int) -> int:
        return os.open(name, flags, file_mode(name))

    return cast(BinaryIO, open(path, "xb", opener=create))


def temporary_path(path: Path) -> Path:
    """A free name next to `path`, to write a file that then replaces it. Deletes a file that a crash has left."""
    made = path.with_name(f".{path.name}.tmp")
    if made.is_dir() and not made.is_symlink():  # not made by this function
        made = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    made.unlink(missing_ok=True)
    return made


def atomic_write(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write the file `path` so that a reader sees the old content or the new one.

    A loss of power may lose both, unless `durable`.
    """
    # not for checkpoints: checkpointing/filesystem.py has a function whose every call tests can make fail
    made = temporary_path(path)
    with create_file(made) as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(made, path)
    if durable:
        sync_directory(path.parent)


_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_said: set[str] = set()


def sync_directory(path: Path) -> None:
    """Flush the names in `path` to the disk. Windows has no such call and does not need it.

    Some network file systems (SMB, FUSE) have none either; a warning is logged once.
    """
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        lost = "cannot force the names of files to the disk, so a power cut may lose new files"
        warn_once("names", f"the file system of {path} {lost}")
    finally:
        os.close(descriptor)


def is_unsupported(error: OSError) -> bool:
    """Whether `error` means that the file system does not support the call."""
    return error.errno in _UNSUPPORTED


def warn_once(about: str, message: str) -> None:
    """Log a warning, once in this process for each value of `about`."""
    if about not in _said:
        _said.add(about)
        _logger.warning(message)


def make_directories(path: Path) -> None:
    """Create `path` and its missing parents, each durable in its parent."""
    if path.is_dir():
        return
    if path.parent != path:
        make_directories(path.parent)
    path.mkdir(folder_mode(path), exist_ok=True)
    sync_directory(path.parent)


def is_inside(path: Path, folder: Path) -> bool:
    """Whether `path` is `folder` or inside it, after resolving all links."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))  # `resolve` fails on a circle of links
