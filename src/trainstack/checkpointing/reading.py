"""Verified reading of one checkpoint directory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainstack._files import local_path
from trainstack.checkpointing import manifest
from trainstack.checkpointing.abstract import Checkpoint
from trainstack.checkpointing.checksums import FileRecord, check_file, read_file
from trainstack.checkpointing.decoding import StateDecoder
from trainstack.checkpointing.directory import CheckpointInfo, info_of, is_checkpoint_directory, read_manifest, scan
from trainstack.checkpointing.format import Json
from trainstack.checkpointing.manifest import Manifest
from trainstack.checkpointing.tensorfile import map_tensors, read_placeholders, read_tensors
from trainstack.checkpointing.writing import MODEL_STATE, STATES
from trainstack.errors import CheckpointDamagedError, CheckpointMismatchError, CheckpointNotFoundError


def verify_checkpoint(path: str | os.PathLike[str]) -> CheckpointInfo:
    """Compare every file of a checkpoint or model export with its manifest.

    Reads all bytes, decodes no tensors and keeps nothing in memory.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at `path`.
        CheckpointDamagedError: naming the file and what is wrong with it.
        CheckpointMismatchError: `path` is a single file, or was written by a newer trainstack.
    """
    root, content = _open(path)
    for file, record in content.files.items():
        if file != manifest.TREE_FILE:
            check_file(root / file, record)
    _read_tree(root, content)
    return info_of(root, content)


def read_checkpoint(path: str | os.PathLike[str], *, mapped: bool = False) -> Checkpoint:
    """Return the checkpoint in the directory `path`, verified.

    Its tensors own their memory and lie on the CPU; nothing stays mapped or open. No pickle is read.

    Args:
        path: of the checkpoint.
        mapped: leave the tensors in the mapped files, which is several times faster where they are only read or
            copied, to a GPU or into a model. They may be changed; the files do not. The files are hashed as always,
            but must not be altered in place while the tensors live; deleting them does no harm, except on Windows,
            where it fails.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at `path`.
        CheckpointDamagedError: naming the file and what is wrong with it.
        CheckpointMismatchError: a model export, a single file, or of a newer trainstack.
    """
    root, content = _open(path)
    if content.kind != "checkpoint":
        raise CheckpointMismatchError(
            f"{root} is a model export; it holds no optimizer, trainer or backend state to resume from. "
            "Name a checkpoint, or load the weights with read_model() and load_state_dict()."
        )
    tree, decoder = _load(root, content, map_tensors if mapped else read_tensors)
    plain = StateDecoder({})
    return Checkpoint(
        **{state: _state(decoder, tree, state, root) for state in STATES},
        plan=plain.decode(content.plan),
        metadata=plain.decode(content.metadata),
        global_step=content.global_step,
    )


def read_model(path: str | os.PathLike[str], *, mapped: bool = False) -> dict[str, Any]:
    """Return the model state in an export, or the module state in a checkpoint; as `read_checkpoint`."""
    root, content = _open(path)
    tree, decoder = _load(root, content, map_tensors if mapped else read_tensors)
    state = _state(decoder, tree, MODEL_STATE if content.kind == "model" else STATES[0], root)
    if not isinstance(state, dict):
        raise CheckpointMismatchError(f"{root} holds no model state. Name another checkpoint.")
    return state


def read_states(path: str | os.PathLike[str], *, tensors: bool = True) -> tuple[Manifest, dict[str, Any]]:
    """Return the manifest of a checkpoint or export and its states by name; as `read_checkpoint`.

    With `tensors=False` no tensor is read: placeholders of the same shapes and dtypes stand for them.
    """
    root, content = _open(path)
    tree, decoder = _load(root, content, read_tensors if tensors else read_placeholders)
    names = (MODEL_STATE,) if content.kind == "model" else STATES
    return content, {name: _state(decoder, tree, name, root) for name in names}


def _open(path: str | os.PathLike[str]) -> tuple[Path, Manifest]:
    root = local_path(path).absolute()
    if not root.exists():
        raise CheckpointNotFoundError(f"{root} does not exist. Give the directory of a checkpoint.")
    if not root.is_dir():
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
        raise CheckpointNotFoundError(f"{what} Give the directory of a checkpoint.")
    return root, read_manifest(root)


def _load(
    root: Path, content: Manifest, read: Callable[[Path, FileRecord], dict[str, torch.Tensor]]
) -> tuple[dict[str, Json], StateDecoder]:
    tree = _read_tree(root, content)
    tensors: dict[str, torch.Tensor] = {}
    for file in (manifest.MODEL_FILE, manifest.STATE_FILE):
        if file in content.files:
            tensors |= read(root / file, content.files[file])
    return tree, StateDecoder(tensors, outline=read is read_placeholders)


def _read_tree(root: Path, content: Manifest) -> dict[str, Json]:
    path = root / manifest.TREE_FILE
    data = read_file(path, content.files[manifest.TREE_FILE])
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamagedError(f"{path} is damaged: it is no JSON ({error}).") from error
    if not isinstance(tree, dict):
        raise CheckpointDamagedError(f"{path} is damaged: it is no JSON object.")
    return tree


def _state(decoder: StateDecoder, tree: dict[str, Json], name: str, root: Path) -> Any:
    try:
        return decoder.decode(tree.get(name))
    except CheckpointDamagedError as error:
        raise CheckpointDamagedError(f"{root}: {name}: {error}") from error
