"""Paths that users give, durable directories and atomic writes of files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TypeVar

from trainstack.errors import ConfigurationError

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


def atomic_write(path: Path, content: bytes) -> None:
    """Write the file `path` so that a reader sees the old content or the new one; a loss of power may lose both."""
    # checkpointing/filesystem.py has the durable one, which costs a sync and whose every call tests make fail
    made = path.with_name(f".{path.name}.tmp")
    made.write_bytes(content)
    os.replace(made, path)


def sync_directory(path: Path) -> None:
    """Force the names in `path` to the disk. Windows has no such call and does not need it."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(path: Path) -> None:
    """Create `path` and its missing parents, each made durable in its parent."""
    if path.is_dir():
        return
    if path.parent != path:
        make_directories(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)
