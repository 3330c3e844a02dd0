"""Paths that users give, durable directories and atomic writes of files."""

from __future__ import annotations

import errno
import logging
import os
import re
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from trainstack.errors import ConfigurationError

_logger = logging.getLogger("trainstack")

AnyPath = TypeVar("AnyPath", str, os.PathLike[str], str | os.PathLike[str])

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""Also that of `Path("s3://bucket")`, which has one slash. `C:/` is a drive."""


def expand_path(name: str, path: AnyPath) -> AnyPath:
    """`path` with the home folder for `~`; a string stays a string.

    Args:
        name: of the argument, for the error.

    Raises:
        ConfigurationError: the path is an address, such as `s3://bucket/run`, or empty, or `~name` of no user.
    """
    text = os.fspath(path)
    if not text:
        raise ConfigurationError(f"{name}={path!r} is empty. Write a path; '.' is the current folder.")
    if _SCHEME.match(text):
        raise ConfigurationError(
            f"{name}={text!r} is an address, and only local paths are read and written here. A folder of this name "
            "would be made. Write a local path, such as that of a mounted bucket, or keep checkpoints elsewhere by a "
            "checkpointer of your own, Trainer(..., checkpointer=...): docs/guides/checkpointer.md."
        )
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise ConfigurationError(
            f"{name}={text!r}: there is no such home folder. Write './{text}' for a file called so."
        )
    if expanded == text:
        return path
    return expanded if isinstance(path, str) else type(path)(expanded)  # type: ignore[call-arg, return-value]


def local_path(path: str | os.PathLike[str], name: str = "path") -> Path:
    """`expand_path` as a `Path`."""
    return Path(expand_path(name, os.fspath(path)))


_private: set[str] = set()
"""Folders whose files only the owner may read. A process has few of them: one for each run that keeps its files so."""


def keep_private(folder: Path) -> None:
    """From now on, let only the owner read what this process creates in `folder`, and `folder` itself."""
    _private.add(os.path.realpath(folder))
    if folder.is_dir():
        os.chmod(folder, 0o700)


def is_private(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is, or lies in, a folder that `keep_private` was given."""
    full = os.path.realpath(path) if _private else ""
    return any(full == folder or full.startswith(folder + os.sep) for folder in _private)


def file_mode(path: str | os.PathLike[str]) -> int:
    """With which mode to create the file `path`, before the umask."""
    return 0o600 if is_private(path) else 0o666


def folder_mode(path: str | os.PathLike[str]) -> int:
    """With which mode to create the folder `path`, before the umask."""
    return 0o700 if is_private(path) else 0o777


def open_file(path: Path, mode: str) -> BinaryIO:
    """`path.open(mode)` for binary files, which a folder of `keep_private` keeps from others."""

    def create(name: str, flags: int) -> int:
        return os.open(name, flags, file_mode(name))

    return cast(BinaryIO, open(path, mode, opener=create))


def atomic_write(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write the file `path` so that a reader sees the old content or the new one.

    A loss of power may lose both, unless it is `durable`.
    """
    # checkpointing/filesystem.py has one for checkpoints, whose every call tests make fail
    made = path.with_name(f".{path.name}.tmp")
    with open_file(made, "wb") as file:
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
    """Force the names in `path` to the disk. Windows has no such call and does not need it.

    Some network file systems (SMB, FUSE) have none either; that is said once.
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
    """Whether `error` says that the file system does not have the call at all."""
    return error.errno in _UNSUPPORTED


def warn_once(about: str, message: str) -> None:
    """Log a warning, the first time in this process that there is one about this."""
    if about not in _said:
        _said.add(about)
        _logger.warning(message)


def make_directories(path: Path) -> None:
    """Create `path` and its missing parents, each made durable in its parent."""
    if path.is_dir():
        return
    if path.parent != path:
        make_directories(path.parent)
    path.mkdir(folder_mode(path), exist_ok=True)
    sync_directory(path.parent)


def is_inside(path: Path, folder: Path) -> bool:
    """Whether `path` is `folder` or in it, behind all links."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))  # `resolve` fails on a circle of links
