"""Names and cleanup of unfinished checkpoint directories.

`.tmp-<name>-<host>-<pid>-<uuid>` is being written or deleted, and is never read. `.old-<name>-...` is complete, and was
renamed to make room for a new directory of the same name.
"""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path

from trainstack.checkpointing import filesystem
from trainstack.checkpointing.lease_file import is_dead

TEMPORARY = ".tmp-"
REPLACED = ".old-"
_PATTERN = re.compile(r"\.(tmp|old)-(?P<name>.+)-(?P<host>[^-]+)-(?P<pid>\d+)-(?P<token>[0-9a-f]{32})", re.DOTALL)

_claimed: set[str] = set()
"""Tokens that this process uses now. Without them, its leftovers could not be distinguished from current writes."""


def claim_temp_dir(directory: Path, mark: str, name: str) -> Path:
    """Return a new path in `directory`. Call `release_temp_dir` at the end."""
    token = uuid.uuid4().hex
    _claimed.add(token)
    return directory / f"{mark}{name}-{_host()}-{os.getpid()}-{token}"


def release_temp_dir(path: Path) -> None:
    """Declare that this process no longer uses a claimed path."""
    _claimed.discard(path.name.rpartition("-")[2])


def original_name(path: Path) -> str | None:
    """Return the original name of a temporary or replaced directory, or None for other names."""
    match = _PATTERN.fullmatch(path.name)
    return match["name"] if match else None


def discard_dir(path: Path) -> None:
    """Delete a directory so that a partial one never counts as a checkpoint."""
    if path.name.startswith(TEMPORARY):
        filesystem.remove_tree(path)
        return
    doomed = claim_temp_dir(path.parent, TEMPORARY, original_name(path) or path.name)
    try:
        filesystem.rename(path, doomed)
        filesystem.sync_directory(path.parent)  # or a power cut may restore the name with only some of the files
        filesystem.remove_tree(doomed)
    finally:
        release_temp_dir(doomed)


def clear_temp_dirs(directory: Path) -> None:
    """Delete the files of ended writers from `directory`. A replaced directory without successor is restored."""
    for path in sorted(directory.glob(".*")):
        name = original_name(path)
        if name is None or not path.is_dir() or not _is_dead(path):
            continue
        with suppress(OSError):  # the next call tries again
            if path.name.startswith(REPLACED) and not (directory / name).exists():
                filesystem.rename(path, directory / name)
            else:
                discard_dir(path)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9_.]", "_", socket.gethostname()) or "host"


def _is_dead(path: Path) -> bool:
    match = _PATTERN.fullmatch(path.name)
    if match is None or match["token"] in _claimed:
        return False
    pid = int(match["pid"])
    if match["host"] == _host() and (pid == os.getpid() or is_dead(pid)):  # also after a failed save of this process
        return True
    try:
        return time.time() - path.stat().st_mtime > 24 * 3600  # of another host: no save takes a day
    except OSError:
        return False
