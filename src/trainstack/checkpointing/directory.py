"""The contents of a directory of checkpoints, judged by manifests alone."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainstack._files import local_path
from trainstack.checkpointing import began, manifest, temp_dirs
from trainstack.checkpointing.decoding import StateDecoder
from trainstack.checkpointing.manifest import Kind, Manifest
from trainstack.errors import CheckpointDamagedError, CheckpointMismatchError, CheckpointNotFoundError


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """What the manifest of one directory says.

    Attributes:
        path: the directory.
        name: the name it was written under.
        kind: "checkpoint" to resume from, or "model" for an export.
        sequence: rises with every directory written beside it; the highest is the newest.
        global_step: global steps finished, skipped ones included; None if unknown.
        created: UTC, ISO 8601.
        size: bytes in all files.
        metrics: what was measured with these very weights: name and value. May hold inf and nan.
        pinned: whether it is kept, however many others come.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The checkpoints of a directory, newest first, and what cannot be told from its manifest."""

    intact: list[CheckpointInfo]
    broken: dict[Path, CheckpointDamagedError]
    newer: dict[Path, CheckpointMismatchError]


def list_checkpoints(directory: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """Return the checkpoints and model exports in `directory`, oldest first.

    Only manifests are read: `verify_checkpoint` says whether the files agree with them. Directories
    without a readable manifest are left out.

    Raises:
        CheckpointNotFoundError: `directory` does not exist.
    """
    root = local_path(directory, "directory")
    if not root.is_dir():
        raise CheckpointNotFoundError(f"{root} is not a directory. Give the directory that holds checkpoints.")
    return scan(root).intact[::-1]


def scan(directory: Path) -> Contents:
    """Read every manifest in `directory`; an absent directory is an empty one."""
    contents = Contents(intact=[], broken={}, newer={})
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if path.name.startswith(temp_dirs.TEMPORARY) or not is_checkpoint_directory(path):
            continue
        try:
            contents.intact.append(info_of(path, read_manifest(path)))
        except CheckpointDamagedError as error:
            contents.broken[path] = error
        except CheckpointMismatchError as error:
            contents.newer[path] = error
    contents.intact.sort(key=lambda info: (info.sequence, info.created), reverse=True)
    return contents


def is_checkpoint_directory(path: Path) -> bool:
    """Say whether `path` holds a checkpoint or export of ours, perhaps a damaged one."""
    if (path / manifest.TREE_FILE).is_file():
        return True
    try:
        return manifest.is_manifest((path / manifest.FILE_NAME).read_bytes())
    except OSError:
        return False


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the directory `path`; raises as `manifest.parse` does."""
    file = path / manifest.FILE_NAME
    try:
        data = file.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointDamagedError(
            f"{file} is missing: the checkpoint was not finished. Load another checkpoint."
        ) from error
    except OSError as error:
        raise CheckpointDamagedError(f"{file} cannot be read: {error}. Load another checkpoint.") from error
    return manifest.parse(data, file)


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
        metrics=_metrics_of(content),
        pinned=isinstance(content.metadata, dict) and content.metadata.get("pinned") is True,
    )


def _metrics_of(content: Manifest) -> dict[str, float]:
    """The numbers in the metadata's entry "metrics"; whoever writes a checkpoint by hand need not have one."""
    tree = content.metadata.get("metrics") if isinstance(content.metadata, dict) else None
    try:
        metrics = StateDecoder({}).decode(tree)
    except CheckpointDamagedError:
        return {}
    if not isinstance(metrics, dict):
        return {}
    return {name: float(value) for name, value in metrics.items() if type(value) in (int, float)}


def has_its_files(info: CheckpointInfo) -> bool:
    """Say whether the files of a checkpoint are there in the sizes that its manifest names; reads none of them."""
    try:
        records = read_manifest(info.path).files
        return all((info.path / name).stat().st_size == record.size for name, record in records.items())
    except (OSError, CheckpointDamagedError, CheckpointMismatchError):
        return False


def next_sequence(directory: Path) -> int:
    """Return a number above those of all that is in `directory`, and of what earlier runs had there and is gone."""
    return max(0, began.highest(directory), *(info.sequence for info in scan(directory).intact)) + 1


def has_prefix(name: str, prefix: str) -> bool:
    """Say whether a checkpointer with `prefix` gives names such as `name` to checkpoints."""
    return re.fullmatch(re.escape(prefix) + r"-\d+(\..+)?", name) is not None


def name_of(path: Path) -> str:
    """Return the name that a directory was written under, as its path tells it."""
    return temp_dirs.original_name(path) or path.name
