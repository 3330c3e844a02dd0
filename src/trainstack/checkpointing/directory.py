"""The contents of a directory of checkpoints, read from manifests only."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from trainstack._files import local_path, read_small
from trainstack.checkpointing import manifest, temp_dirs
from trainstack.checkpointing.manifest import Kind, Manifest
from trainstack.errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError, CheckpointNotFoundError

_logger = logging.getLogger("trainstack")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """The content of the manifest of one directory.

    Attributes:
        path: the directory.
        name: the name under which it was written.
        kind: "checkpoint" to resume from, "model" for an export, or "begin" for the beginning of a run.
        sequence: increases with every entry of the parent directory; the highest is the newest.
        global_step: finished global steps, including skipped ones; None if unknown.
        created: UTC, ISO 8601.
        size: bytes in all files.
        metrics: the values measured with these weights, by name. May contain inf and nan.
        pinned: whether it is kept regardless of the number of other checkpoints.
        run_id: identifies the run that wrote it; None if unknown.
        lease: the counter of the lease under which it was written; 0 without one.
    """

    path: Path
    name: str
    kind: Kind
    sequence: int
    global_step: int | None
    created: str
    size: int
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)
    pinned: bool = False
    run_id: str | None = None
    lease: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The entries of a directory.

    Attributes:
        intact: checkpoints and exports with an intact manifest, newest first.
        begun: the entries for beginnings of runs, newest first.
        broken: damaged checkpoints and exports.
        broken_begins: damaged entries for beginnings of runs.
        newer: entries of a newer trainstack.
        odd: entries that are neither a file, nor a checkpoint, nor a readable folder, each with the reason.
    """

    intact: list[CheckpointInfo] = field(default_factory=list)
    begun: list[CheckpointInfo] = field(default_factory=list)
    broken: dict[Path, CheckpointDamagedError] = field(default_factory=dict)
    broken_begins: dict[Path, CheckpointDamagedError] = field(default_factory=dict)
    newer: dict[Path, CheckpointMismatchError] = field(default_factory=dict)
    odd: dict[Path, str] = field(default_factory=dict)

    @property
    def highest(self) -> int:
        """The highest sequence number of all readable entries and in the names of damaged beginnings."""
        told = [number for path in self.broken_begins if (number := begin_number(path)) is not None]
        return max([0, *told, *(info.sequence for info in (*self.intact, *self.begun))])

    def including(self, path: Path) -> Contents:
        """The contents after this process has written the entry `path`, perhaps in place of one with the same name."""
        infos = [[info for info in found if info.path != path] for found in (self.intact, self.begun)]
        broken = {other: error for other, error in self.broken.items() if other != path}
        contents = replace(self, intact=infos[0], begun=infos[1], broken=broken)
        _sort_in(contents, path, read_entry(path))
        _put_newest_first(contents)
        return contents


def list_checkpoints(directory: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """Return the checkpoints and model exports in `directory`, oldest first.

    Only manifests are read; `verify_checkpoint` compares the files with them. Directories without a readable manifest
    are omitted, and the reason is logged once in a process.

    Raises:
        CheckpointNotFoundError: `directory` does not exist.

    Examples:
        >>> trainer = ts.Trainer(module, args)
        >>> trainer.train()
        >>> newest = ts.list_checkpoints(f"{trainer.output_dir}/checkpoints")[-1]
        >>> ts.verify_checkpoint(newest.path).global_step
        8
    """
    root = local_path(directory, "directory")
    if not root.is_dir():
        raise CheckpointNotFoundError(f"{root} is not a directory. Write the directory that contains checkpoints.")
    contents = scan(root)
    name_odd_entries(contents, _logger.log)
    return contents.intact[::-1]


def scan(directory: Path) -> Contents:
    """Read every manifest in `directory`. A missing directory counts as empty.

    A wrong entry does not raise. A manifest is not read again if its inode, size and times are unchanged.

    Raises:
        CheckpointError: the system refused to list the directory.
    """
    contents = Contents()
    try:
        found = [entry for entry in os.scandir(directory) if not entry.name.startswith(temp_dirs.TEMPORARY)]
    except (FileNotFoundError, NotADirectoryError):
        return contents
    except OSError as error:  # if it counted as empty, a run would begin newly next to its checkpoints
        raise CheckpointError(
            f"the checkpoints in {directory} cannot be listed: {error.strerror or error}. Repair the folder, or name "
            "another one."
        ) from error
    for place in sorted(entry.path for entry in found if not _is_plain(entry)):
        _sort_in(contents, *_look_at(place))
    _put_newest_first(contents)
    return contents


def _put_newest_first(contents: Contents) -> None:
    for found in (contents.intact, contents.begun):
        found.sort(key=lambda info: (info.sequence, info.created), reverse=True)


def _is_plain(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()  # also a link to one
    except OSError:
        return False


def _sort_in(contents: Contents, path: Path, found: Entry) -> None:
    if isinstance(found, CheckpointInfo):
        (contents.begun if found.kind == "begin" else contents.intact).append(found)
    elif isinstance(found, CheckpointMismatchError):
        contents.newer[path] = found
    elif begin_number(path) is not None:
        reason = found or f"it has no {manifest.FILE_NAME}"
        contents.broken_begins[path] = (
            reason if isinstance(reason, CheckpointDamagedError) else CheckpointDamagedError(f"{path}: {reason}.")
        )
    elif isinstance(found, CheckpointDamagedError):
        contents.broken[path] = found
    elif found is not None:
        contents.odd[path] = found


Entry = CheckpointInfo | CheckpointDamagedError | CheckpointMismatchError | str | None
"""The kind of an entry of a directory. A text describes an unusual entry; None is a folder with other content."""

_COARSE_S = 0.1
"""A file that changed more recently may change again with the same time: systems count in ticks of some ms."""


def read_entry(path: Path) -> Entry:
    """Return the kind of `path`, an entry of a directory. Never raises."""
    return _look_at(os.fspath(path))[1]


def _look_at(place: str) -> tuple[Path, Entry]:
    """`read_entry` of a text. It returns the `Path` of an earlier call, because making one takes most of the time."""
    try:
        status = os.stat(f"{place}/{manifest.FILE_NAME}")
    except OSError as error:
        path = Path(place)
        return path, _without_manifest(path, error)
    read = _read_version if time.time() - status.st_ctime > _COARSE_S else _read_version.__wrapped__
    return read(place, version_of(status))


@lru_cache(maxsize=16_384)  # more than a directory has; a long process writes and deletes more
def _read_version(place: str, version: tuple[int, ...]) -> tuple[Path, Entry]:
    """The entry at `place`, whose manifest has this inode, size and times."""
    path = Path(place)
    return path, _read_entry(path)


def version_of(status: os.stat_result) -> tuple[int, ...]:
    """Inode, size and times of a file. They are equal if the file was not written in between."""
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _without_manifest(path: Path, error: OSError) -> Entry:
    if isinstance(error, NotADirectoryError):
        return "it is neither a file nor a folder"
    if not isinstance(error, FileNotFoundError):
        return _unreadable(path, error)
    if os.path.islink(path) and not os.path.exists(path):
        return "it is a link to nothing"
    if not os.path.isfile(path / manifest.TREE_FILE):
        return None
    return CheckpointDamagedError(
        f"{path / manifest.FILE_NAME} is missing: the checkpoint was not finished. Load another checkpoint."
    )


def _read_entry(path: Path) -> Entry:
    try:
        data = read_small(path / manifest.FILE_NAME)
    except OSError as error:
        return _unreadable(path, error)
    if not manifest.is_manifest(data) and not _has_tree(path):
        return f"its {manifest.FILE_NAME} is not one of trainstack"
    try:
        return info_of(path, manifest.parse(data, path / manifest.FILE_NAME))
    except (CheckpointDamagedError, CheckpointMismatchError) as error:
        return error


def _unreadable(path: Path, error: OSError) -> Entry:
    reason = f"cannot be read: {error.strerror or error}"
    if not _has_tree(path):
        return f"it {reason}"
    return CheckpointDamagedError(f"{path / manifest.FILE_NAME} {reason}. Load another checkpoint.")


def _has_tree(path: Path) -> bool:
    return os.path.isfile(path / manifest.TREE_FILE)


_named: set[tuple[Path, str]] = set()


def name_odd_entries(contents: Contents, say: Callable[[int, str], None]) -> None:
    """Log each unusual entry, once in this process."""
    for path, reason in contents.odd.items():
        if (path, reason) not in _named:
            _named.add((path, reason))
            say(logging.WARNING, f"skipping {printable(path)}: {reason}.")


def printable(path: Path) -> str:
    """`path` as text that can be written to every stream."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def is_checkpoint_directory(path: Path) -> bool:
    """Return whether `path` is a checkpoint, an export or a beginning of a run of trainstack, even a damaged one."""
    entry = read_entry(path)
    return entry is not None and not isinstance(entry, str)


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the directory `path`. Raises as `manifest.parse` does."""
    return manifest.read(path / manifest.FILE_NAME)


def info_of(path: Path, content: Manifest) -> CheckpointInfo:
    """Return the public view of a manifest."""
    return CheckpointInfo(
        path=path,
        name=content.name,
        kind=content.kind,
        sequence=content.sequence,
        global_step=content.global_step,
        created=content.created,
        size=content.size,
        metrics=content.metrics,
        pinned=isinstance(content.metadata, dict) and content.metadata.get("pinned") is True,
        run_id=content.run_id,
        lease=content.lease,
    )


def has_its_files(info: CheckpointInfo) -> bool:
    """Return whether the files of a checkpoint exist with the sizes in its manifest. It does not read them."""
    try:
        records = read_manifest(info.path).files
        return all((info.path / name).stat().st_size == record.size for name, record in records.items())
    except (OSError, CheckpointDamagedError, CheckpointMismatchError):
        return False


_BEGIN = re.compile(r"(?P<prefix>.+)-begin-(?P<number>\d{9,})")


def begin_name(prefix: str, sequence: int) -> str:
    """The name of the entry for the beginning of a run."""
    return f"{prefix}-begin-{sequence:09d}"


def beginnings(contents: Contents, prefix: str) -> dict[Path, str | None]:
    """The entries for beginnings of runs with this prefix, including damaged ones, and the ids of these runs."""
    found = {**{info.path: info.run_id for info in contents.begun}, **dict.fromkeys(contents.broken_begins)}
    return {path: run_id for path, run_id in found.items() if begin_number(path, prefix) is not None}


def begin_number(path: Path, prefix: str | None = None) -> int | None:
    """The number in the name of the beginning of a run, with this prefix if one is given; None for other names."""
    match = _BEGIN.fullmatch(name_of(path))
    return int(match["number"]) if match and prefix in (None, match["prefix"]) else None


_NUMBER = re.compile(r"-\d+(\..+)?")


def has_prefix(name: str, prefix: str) -> bool:
    """Return whether `name` has the form of a checkpoint of a checkpointer with `prefix`."""
    return name.startswith(prefix) and _NUMBER.fullmatch(name, len(prefix)) is not None


def name_of(path: Path) -> str:
    """Return the name under which a directory was written, from its path."""
    return temp_dirs.original_name(path) or path.name
