"""Comparison of a checkpoint's files with its manifest. Decodes no tensors, and needs no torch."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from trainstack._files import local_path
from trainstack.checkpointing import index, manifest
from trainstack.checkpointing.checksums import PaceFn, read_file
from trainstack.checkpointing.directory import (
    CheckpointInfo,
    info_of,
    is_checkpoint_directory,
    read_manifest,
    resolve_pointer,
    rule_in,
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

    Reads all bytes, decodes no tensors and keeps nothing in memory. Of a damaged tensor the message has the name and
    the range of elements.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at `path`.
        CheckpointDamagedError: naming the file and the fault.
        CheckpointMismatchError: `path` is a single file, or was written by a newer trainstack.
    """
    root, content = open_checkpoint(path)
    verify_files(root, content)
    return info_of(root, content)


def read_back(path: Path, pace: PaceFn | None = None) -> str | None:
    """What is wrong with the checkpoint or export at `path`; None if nothing is.

    As `verify_checkpoint`, but of the bytes that are on the disk rather than those that the system still has. Where the
    system cannot drop its pages, it compares those. `pace` is called before tensors are read.
    """
    try:
        for file in path.iterdir():
            drop_pages(file)
        verify_files(*open_checkpoint(path), pace)
    except (OSError, CheckpointError) as error:
        return str(error)
    return None


def verify_files(root: Path, content: Manifest, pace: PaceFn | None = None) -> None:
    """Compare all files in `root` with its manifest `content`; raises as `verify_checkpoint`."""
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
"""What the names of tensor files end with."""


def open_checkpoint(path: str | os.PathLike[str]) -> tuple[Path, Manifest]:
    """Return the absolute path and the manifest of a checkpoint or export; raises as `verify_checkpoint`.

    Of a file `last` or `best` they are those of the checkpoint that it stands for.
    """
    root = local_path(path).absolute()
    try:
        status = os.stat(root)
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise CheckpointNotFoundError(f"{root} does not exist. Give the directory of a checkpoint.") from error
    except OSError as error:
        raise CheckpointDamagedError(f"{root} cannot be read: {error}. Load another checkpoint.") from error
    if stat.S_ISREG(status.st_mode) and rule_in(root) is not None:
        root = resolve_pointer(root)
    elif not stat.S_ISDIR(status.st_mode):
        raise CheckpointMismatchError(
            f"{root} is a single file; a checkpoint is a directory with a {manifest.FILE_NAME}. Pickle files "
            "(.pt, .pth, .ckpt) are never read unasked: load_torch_weights(path) does, for their weights."
        )
    if not is_checkpoint_directory(root):
        what = f"{root} is not a checkpoint: it has no {manifest.FILE_NAME} of trainstack."
        inside = [*scan(root).intact, *scan(root / "checkpoints").intact]
        if inside:
            newest = min(inside, key=lambda info: info.kind)  # a checkpoint rather than a model export
            raise CheckpointNotFoundError(f"{what} Name one of those in it, such as {newest.path}.")
        raise CheckpointNotFoundError(f"{what} Give the directory of a checkpoint.{hint_of_pickles(root)}")
    return root, read_manifest(root)


PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")


def hint_of_pickles(folder: Path) -> str:
    """A sentence for a folder without checkpoint that holds files which torch.save may have written; else ""."""
    try:
        entries = sorted(entry.name for entry in os.scandir(folder))
    except OSError:
        return ""
    if ".metadata" in entries and any(name.endswith(".distcp") for name in entries):
        return (
            " It holds a distributed checkpoint of torch, whose metadata is a pickle, and pickles are never read "
            f"unasked. Convert it with 'python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} "
            "weights.pt', and read the result with load_torch_weights('weights.pt')."
        )
    names = [name for name in entries if name.lower().endswith(PICKLE_SUFFIXES)]
    if not names:
        return ""
    return (
        f" It holds {names[0]!r}, which may be a pickle, and pickles are never read unasked: "
        f"load_torch_weights({str(folder / names[0])!r}) reads its weights."
    )


def read_json(root: Path, content: Manifest, file: str) -> dict[str, Json]:
    """The object in a JSON file of the checkpoint, which was compared with its hash."""
    path = root / file
    data = read_file(path, content.files[file])
    check_json_memory(path, data)
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointDamagedError(f"{path} is damaged: it is no JSON ({error}).") from error
    if not isinstance(tree, dict):
        raise CheckpointDamagedError(f"{path} is damaged: it is no JSON object.")
    return tree


def read_index(root: Path, content: Manifest) -> dict[str, FileIndex]:
    """The hashes of the tensor files; none for format version 1. In version 3 a tensor lies in several files."""
    if content.format_version == 1:
        return {}
    path, joined = root / manifest.INDEX_FILE, None
    data = read_file(path, content.files[manifest.INDEX_FILE])
    if content.is_sharded:
        found, joined = index.parse_sharded(data, path)
        names = []  # a tensor lies in several files, which `parse_sharded` has compared
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
    """How many ranks have a state of their own, or None. The manifest has to list their files, and no others."""
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
        f"{root / manifest.TREE_FILE} is damaged: it speaks of {short(count)} ranks, and the manifest lists the states "
        f"of {len(texts)}. Load another checkpoint."
    )
