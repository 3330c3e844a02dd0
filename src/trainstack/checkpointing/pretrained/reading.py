"""Weights in folders of `save_pretrained`, in sharded files, and in the cache of `huggingface_hub`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainstack._files import read_small
from trainstack.checkpointing.field_types import short
from trainstack.checkpointing.manifest import is_plain_name, is_shard_file
from trainstack.checkpointing.tensorfile import read_unverified_tensors
from trainstack.checkpointing.verification import PICKLE_SUFFIXES
from trainstack.errors import CheckpointDamagedError, CheckpointMismatchError, CheckpointNotFoundError

INDEX_SUFFIX = ".safetensors.index.json"
"""The suffix of the index that maps tensors to files."""

_HUB_ID = re.compile(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*(?:@[\w./-]+)?")


def folder_of_hub_id(source: str) -> Path:
    """The folder in the cache of `huggingface_hub` with the model of the id `source`. Nothing is downloaded.

    Args:
        source: such as `"org/name"`, or `"org/name@revision"` for another revision than `main`.

    Raises:
        CheckpointNotFoundError: `source` is not an id, or the cache does not have the model.
    """
    given = f"{source} does not exist. Name a checkpoint, an export, a folder of save_pretrained or a .safetensors file"
    if not _HUB_ID.fullmatch(source):
        raise CheckpointNotFoundError(f"{given}.")
    name, _, revision = source.partition("@")
    options = f", revision={revision!r}" if revision else ""
    given += (
        f". If it is the id of a model on the Hub, download it first: huggingface_hub.snapshot_download({name!r}"
        f"{options})."
    )
    if importlib.util.find_spec("huggingface_hub") is None:
        raise CheckpointNotFoundError(f"{given} Install it by pip install 'trainstack[hub]'.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, revision=revision or None, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise CheckpointNotFoundError(f"{given} It is not in the local cache.") from error
    if not find_weights(folder):
        raise CheckpointNotFoundError(f"{given} The local cache has it without its weights.")
    return folder


def find_weights(folder: Path) -> list[Path]:
    """The file of weights in a folder without a manifest: `model.safetensors`, its index, or the only one in the
    folder.

    Several if there are several with other names; none if there is none. For a folder with only pickles it is a pickle.
    """
    names = sorted(os.listdir(folder))
    preferred = [name for name in ("model.safetensors", f"model{INDEX_SUFFIX}") if name in names]
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    files = [name for name in names if name.endswith(".safetensors")]
    pickles = [name for name in names if Path(name).suffix.lower() in PICKLE_SUFFIXES]
    pickles.sort(key=lambda name: not name.startswith("pytorch_model"))
    return [folder / name for name in preferred[:1] or indices or files or pickles[:1]]


def read_folder(folder: Path, *, mapped: bool = False) -> dict[str, torch.Tensor] | None:
    """The tensors of a folder without a manifest, by name, perhaps `mapped`; None if it has no file of weights.

    Raises:
        CheckpointNotFoundError: it has several.
        CheckpointMismatchError: it has only pickles.
        CheckpointDamagedError: a file is not a safetensors file, or is missing.
    """
    found = find_weights(folder)
    if len(found) > 1:
        raise CheckpointNotFoundError(
            f"{folder} has several files of weights: {', '.join(file.name for file in found)}. Name one of them."
        )
    return read_file(found[0], mapped=mapped) if found else None


def read_file(file: Path, *, mapped: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a `.safetensors` file, or of the files that an index names; `mapped` or in memory.

    Raises:
        CheckpointMismatchError: its name is that of a pickle.
        CheckpointDamagedError: it cannot be read.
    """
    if file.suffix.lower() in PICKLE_SUFFIXES:
        raise CheckpointMismatchError(_refuse_pickle(file))
    if file.name.endswith(INDEX_SUFFIX):
        return _read_shards(file, mapped=mapped)
    if is_shard_file(file.name):
        raise CheckpointMismatchError(
            f"{file} has the rows of one rank, and not the whole tensors. Name its folder, {file.parent}."
        )
    try:
        return read_unverified_tensors(file, mapped=mapped)
    except CheckpointDamagedError as error:
        raise CheckpointDamagedError(
            f"{file} cannot be read as safetensors: {error} To read a file of torch.save, call "
            "load_torch_weights(path)."
        ) from error


def _read_shards(index: Path, *, mapped: bool) -> dict[str, torch.Tensor]:
    found, unnamed = dict[str, torch.Tensor](), list[str]()
    places = _weight_map(index)
    for name in dict.fromkeys(places.values()):
        if not (index.parent / name).exists():
            raise CheckpointDamagedError(
                f"{index} names {name}, which is not in its folder. Copy or download the whole folder."
            )
        tensors = read_file(index.parent / name, mapped=mapped)
        unnamed += [key for key in tensors if key not in places]
        found |= {key: tensor for key, tensor in tensors.items() if places.get(key) == name}
    missing = [key for key in places if key not in found]
    if missing:
        raise CheckpointDamagedError(
            f"{index} says that {places[missing[0]]} has {missing[0]!r}, which is not so; {len(missing)} such tensors "
            "are missing. The files are not of one model: copy or download the whole folder."
        )
    if unnamed:
        raise CheckpointDamagedError(
            f"{index} does not name {unnamed[0]!r}, which a file in its folder has; {len(unnamed)} such tensors would "
            "be ignored. The files are not of one model: copy or download the whole folder."
        )
    return found


def _weight_map(index: Path) -> Mapping[str, str]:
    """The name of the file of each tensor."""
    try:
        content: Any = json.loads(read_small(index), object_pairs_hook=_once)
        places: Any = content["weight_map"]
        for name in set(places.values()):
            if not (isinstance(name, str) and is_plain_name(name) and name.endswith(".safetensors")):
                raise ValueError(f"{short(name)} is not the name of a .safetensors file in its folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamagedError(
            f"{index} is not an index of safetensors files: {type(error).__name__}: {error}."
        ) from error
    return {str(key): name for key, name in places.items()}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"{short(next(name for name, count in counts.items() if count > 1))} occurs twice")
    return found


def _refuse_pickle(file: Path) -> str:
    return (
        f"{file} is a pickle by its name, and pickles are never read implicitly. Read it explicitly and store its "
        f"content: export_model(load_torch_weights({str(file)!r}), 'weights'), and name that folder instead."
    )
