"""Opens checkpoints, also by the files `last` and `best`, and compares their files with the manifest, without torch."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainstack._files import local_path, open_for_reading
from trainstack.checkpointing import index, manifest
from trainstack.checkpointing.arguments import DefaultCheckpointerArguments, Monitor
from trainstack.checkpointing.checksums import PaceFn, read_file
from trainstack.checkpointing.directory import (
    CheckpointInfo,
    Contents,
    begin_number,
    has_its_files,
    has_prefix,
    info_of,
    is_checkpoint_directory,
    read_manifest,
    scan,
)
from trainstack.checkpointing.field_types import short
from trainstack.checkpointing.format import RANK_STATES, Json
from trainstack.checkpointing.index import FileIndex, check_tensors
from trainstack.checkpointing.manifest import Manifest
from trainstack.checkpointing.regular_files import check_json_memory, drop_pages
from trainstack.errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError, CheckpointNotFoundError


def verify_checkpoint(path: str | os.PathLike[str]) -> CheckpointInfo:
    """Compare every file of a checkpoint or model export with its manifest.

    It reads all bytes, decodes no tensors and keeps nothing in memory. For a damaged tensor the message has the name
    and the range of elements.

    Args:
        path: of the checkpoint or export.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at `path`.
        CheckpointDamagedError: a file is damaged; the message names it and the fault.
        CheckpointMismatchError: `path` is a single file, or was written by a newer trainstack.
    """
    root, content = open_checkpoint(path)
    verify_files(root, content)
    return info_of(root, content)


def read_back(path: Path, pace: PaceFn | None = None) -> str | None:
    """The damage of the checkpoint or export at `path`; None if there is none.

    Unlike `verify_checkpoint`, it compares the bytes on the disk, not those in the page cache, if the system can drop
    its pages. `pace` is called before tensors are read.
    """
    try:
        for file in path.iterdir():
            drop_pages(file)
        verify_files(*open_checkpoint(path), pace)
    except (OSError, CheckpointError) as error:
        return str(error)
    return None


def verify_files(root: Path, content: Manifest, pace: PaceFn | None = None) -> None:
    """Compare all files in `root` with its manifest `content`. Raises as `verify_checkpoint` does.

    For a file `last` or `best`, they are those of the checkpoint to which it points.
    """
    if content.kind == "begin":
        return
    hashes = read_index(root, content)
    for file, record in content.files.items():
        if file.endswith(TENSORS):
            check_tensors(root / file, record, hashes.get(file), pace)
        elif file != manifest.INDEX_FILE:
            read_json(root, content, file)
    if content.kind == "checkpoint":
        rank_count(root, content, read_json(root, content, manifest.TREE_FILE))


TENSORS = ".safetensors"
"""The end of the names of tensor files."""


def open_checkpoint(path: str | os.PathLike[str]) -> tuple[Path, Manifest]:
    """Return the absolute path and the manifest of a checkpoint or export. Raises as `verify_checkpoint` does."""
    root = local_path(path).absolute()
    try:
        status = os.stat(root)
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise CheckpointNotFoundError(f"{root} does not exist. Name the directory of a checkpoint.") from error
    except OSError as error:
        raise CheckpointDamagedError(f"{root} cannot be read: {error}. Load another checkpoint.") from error
    if stat.S_ISREG(status.st_mode) and rule_in(root) is not None:
        root = resolve_pointer(root)
    elif not stat.S_ISDIR(status.st_mode):
        raise CheckpointMismatchError(
            f"{root} is a single file; a checkpoint is a directory with a {manifest.FILE_NAME}. Pickle files "
            "(.pt, .pth, .ckpt) are never read implicitly: load_torch_weights(path) reads their weights."
        )
    if not is_checkpoint_directory(root):
        what = f"{root} is not a checkpoint: it has no {manifest.FILE_NAME} of trainstack."
        inside = [*scan(root).intact, *scan(root / "checkpoints").intact]
        if inside:
            newest = min(inside, key=lambda info: info.kind)  # a checkpoint rather than a model export
            pointers = [path for path in sorted(newest.path.parent.glob("*best")) if rule_in(path) is not None]
            best = f", or {pointers[0]} for the best" if pointers else ""
            raise CheckpointNotFoundError(f"{what} Name one of those in it, such as {newest.path}{best}.")
        raise CheckpointNotFoundError(f"{what} Name the directory of a checkpoint.{hint_of_pickles(root)}")
    return root, read_manifest(root)


PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")


def hint_of_pickles(folder: Path) -> str:
    """A sentence if a folder without a checkpoint contains files that torch.save may have written; otherwise ""."""
    try:
        entries = sorted(entry.name for entry in os.scandir(folder))
    except OSError:
        return ""
    if ".metadata" in entries and any(name.endswith(".distcp") for name in entries):
        return (
            " It is a distributed checkpoint of torch, whose metadata is a pickle, and pickles are never read "
            f"implicitly. Convert it with 'python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} "
            "weights.pt', and read the result with load_torch_weights('weights.pt')."
        )
    names = [name for name in entries if name.lower().endswith(PICKLE_SUFFIXES)]
    if not names:
        return ""
    return (
        f" It contains {names[0]!r}, which may be a pickle, and pickles are never read implicitly: "
        f"load_torch_weights({str(folder / names[0])!r}) reads its weights."
    )


def read_json(root: Path, content: Manifest, file: str) -> dict[str, Json]:
    """The object in a JSON file of the checkpoint, after comparing its hash."""
    path = root / file
    data = read_file(path, content.files[file])
    check_json_memory(path, data)
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointDamagedError(f"{path} is damaged: it is not JSON ({error}).") from error
    if not isinstance(tree, dict):
        raise CheckpointDamagedError(f"{path} is damaged: it is not a JSON object.")
    return tree


def read_index(root: Path, content: Manifest) -> dict[str, FileIndex]:
    """The hashes of the tensor files; none for format version 1. In version 3 a tensor is in several files."""
    if content.format_version == 1:
        return {}
    path, joined = root / manifest.INDEX_FILE, None
    data = read_file(path, content.files[manifest.INDEX_FILE])
    if content.is_sharded:
        found, joined = index.parse_sharded(data, path)
        names = []  # a tensor is in several files, and `parse_sharded` has checked its rows
    else:
        found = index.parse(data, path)
        names = [name for file in found.values() for name in file.tensors]
    recorded = {file: record.hash for file, record in content.files.items() if file.endswith(TENSORS)}
    if recorded != {file: entry.combined for file, entry in found.items()} or len(names) != len(set(names)):
        raise CheckpointDamagedError(f"{path} does not agree with {manifest.FILE_NAME}. Load another checkpoint.")
    if index.root_of(found.values(), joined) != content.root:
        raise CheckpointDamagedError(f"{path} has another root than {manifest.FILE_NAME}. Load another checkpoint.")
    return found


def rank_count(root: Path, content: Manifest, tree: Mapping[str, Json]) -> int | None:
    """The number of ranks with a separate state, or None. The manifest has to list their files, and no others."""
    count = tree.get(RANK_STATES)
    texts = {file for file in content.files if file.startswith("rank-") and file.endswith(".json")}
    tensors = {file for file in content.files if file.startswith("rank-") and file.endswith(TENSORS)}
    whole = (
        type(count) is int and count == len(texts) and texts == {manifest.rank_file(r, "json") for r in range(count)}
    )
    stray = tensors - {file.removesuffix(".json") + TENSORS for file in texts}
    if (count is None and not texts and not tensors) or (whole and not stray):
        return count
    raise CheckpointDamagedError(
        f"{root / manifest.TREE_FILE} is damaged: it has {short(count)} ranks, but the manifest lists the states "
        f"of {len(texts)}. Load another checkpoint."
    )


def with_prefix(contents: Contents, prefix: str) -> list[CheckpointInfo]:
    """Return the checkpoints with this prefix whose manifest is intact, newest first."""
    return [info for info in contents.intact if info.kind == "checkpoint" and has_prefix(info.name, prefix)]


def newest_entry(contents: Contents, prefix: str) -> CheckpointInfo | None:
    """The newest checkpoint or beginning of a run with this prefix: The directory belongs to its run."""
    begun = [info for info in contents.begun if begin_number(info.path, prefix) is not None]
    newest = [*begun[:1], *with_prefix(contents, prefix)[:1]]
    return max(newest, key=lambda info: info.sequence, default=None)


def damaged_begin(contents: Contents, prefix: str) -> CheckpointDamagedError | None:
    """The error of a damaged beginning of a run that is newer than all other entries with this prefix, or None."""
    newest = newest_entry(contents, prefix)
    for path, error in contents.broken_begins.items():
        number = begin_number(path, prefix)
        if number is not None and (newest is None or number > newest.sequence):
            return error
    return None


def of_run(contents: Contents, prefix: str, run_id: str | None = None) -> list[CheckpointInfo]:
    """Return the checkpoints of the run `run_id`, or of the run to which the directory belongs, newest first.

    Checkpoints without a run id belong to it if no run began after them.
    """
    if run_id is not None:
        return [info for info in with_prefix(contents, prefix) if info.run_id == run_id]
    newest = newest_entry(contents, prefix)
    if newest is None or damaged_begin(contents, prefix) is not None:
        return []
    own = [info for info in with_prefix(contents, prefix) if info.run_id == newest.run_id]
    if newest.run_id is not None:
        return own
    after = max((info.sequence for info in contents.begun if begin_number(info.path, prefix) is not None), default=-1)
    return [info for info in own if info.sequence > after]


def checkpoints_of_run(directory: Path, prefix: str, run_id: str | None = None) -> list[CheckpointInfo]:
    """`of_run` of the current content of `directory`."""
    return of_run(scan(directory), prefix, run_id)


# Only the rule of a pointer (prefix and metric) is used. The checkpoint is searched by the manifests, so that a stale,
# incomplete or missing pointer has no effect.
POINTER_FORMAT = "trainstack-pointer"


@dataclass(frozen=True, slots=True, kw_only=True)
class PointerRule:
    """The rule of a pointer: the newest checkpoint with this prefix, or the best one if there is a monitor."""

    file_prefix: str
    monitor: Monitor | None


def pointer_of(kind: str, directory: Path, prefix: str) -> Path:
    """The file `kind`, "last" or "best", in `directory`. Checkpoints with another prefix have separate pointers."""
    return directory / (kind if prefix == DefaultCheckpointerArguments().file_prefix else f"{prefix}-{kind}")


def rule_in(path: Path) -> PointerRule | None:
    """The rule in the file `path`; None if it is not a pointer, or cannot be read."""
    try:
        body = json.loads(read_beginning(path))
        prefix, metric = body["file_prefix"], body.get("monitor")
        if body["format"] != POINTER_FORMAT or not isinstance(prefix, str):
            return None
        if metric is None:
            return PointerRule(file_prefix=prefix, monitor=None)
        if not isinstance(metric, str) or body["mode"] not in ("min", "max"):
            return None
        return PointerRule(file_prefix=prefix, monitor=Monitor(name=metric, mode=body["mode"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def read_beginning(path: Path) -> bytes:
    """The content of a pointer, limited to 64 KiB, because the file may be another, large one."""
    with open_for_reading(path) as file:
        return file.read(1 << 16)


def resolve_pointer(path: Path) -> Path:
    """`path`, or the checkpoint to which it points if it is a file `last` or `best`.

    Raises:
        CheckpointNotFoundError: it is such a file, and the checkpoint no longer exists.
    """
    rule = rule_in(path)
    if rule is None:
        return path
    run = checkpoints_of_run(path.parent, rule.file_prefix)
    found = next(filter(has_its_files, run if rule.monitor is None else rule.monitor.rank(run)), None)
    if found is None:
        which = "newest" if rule.monitor is None else f"best by {rule.monitor.name!r}"
        raise CheckpointNotFoundError(
            f"{path} points to the {which} of the checkpoints in its folder, and there is none. Name another one."
        )
    return found.path
