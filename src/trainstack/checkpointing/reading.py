"""Verified reading of one checkpoint directory."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainstack._files import local_path
from trainstack.checkpointing import index, manifest
from trainstack.checkpointing.abstract import Checkpoint
from trainstack.checkpointing.checksums import FileRecord, read_file
from trainstack.checkpointing.decoding import StateDecoder
from trainstack.checkpointing.directory import CheckpointInfo, info_of, is_checkpoint_directory, scan
from trainstack.checkpointing.field_types import short
from trainstack.checkpointing.format import Json
from trainstack.checkpointing.index import FileIndex
from trainstack.checkpointing.manifest import Manifest
from trainstack.checkpointing.regular_files import check_json_memory, open_regular
from trainstack.checkpointing.tensorfile import check_tensors, map_tensors, read_placeholders, read_tensors
from trainstack.checkpointing.writing import MODEL_STATE, RANK_STATES, STATES
from trainstack.errors import CheckpointDamagedError, CheckpointMismatchError, CheckpointNotFoundError


def verify_checkpoint(path: str | os.PathLike[str]) -> CheckpointInfo:
    """Compare every file of a checkpoint or model export with its manifest.

    Reads all bytes, decodes no tensors and keeps nothing in memory. Of a damaged tensor the message has the name and
    the range of elements.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at `path`.
        CheckpointDamagedError: naming the file and the fault.
        CheckpointMismatchError: `path` is a single file, or was written by a newer trainstack.
    """
    root, content = _open(path)
    verify_files(root, content)
    return info_of(root, content)


def verify_written(path: Path) -> CheckpointInfo:
    """As `verify_checkpoint`, but reads the bytes that are on the disk rather than those that the system still has.

    For a checkpoint that was just written and synchronised. Where the system cannot drop its pages, it compares those.
    """
    files = [path / manifest.FILE_NAME, *(path / name for name in manifest.read(path / manifest.FILE_NAME).files)]
    for file in files:
        _drop_pages(file)
    return verify_checkpoint(path)


def _drop_pages(file: Path) -> None:
    """Make the system forget the pages of a file. It forgets only what is on the disk already."""
    if not hasattr(os, "posix_fadvise"):
        return
    with suppress(OSError), open_regular(file) as handle:  # what cannot be opened is named by the verification
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def verify_files(root: Path, content: Manifest) -> None:
    """Compare all files in `root` with its manifest `content`; raises as `verify_checkpoint`."""
    if content.kind == "begin":
        return
    hashes = _read_index(root, content)
    for file, record in content.files.items():
        if file.endswith(_TENSORS):
            check_tensors(root / file, record, hashes.get(file))
        elif file != manifest.INDEX_FILE:
            _read_json(root, content, file)
    if content.kind == "checkpoint":
        _rank_count(root, content, _read_json(root, content, manifest.TREE_FILE))


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
        CheckpointDamagedError: naming the file and the fault.
        CheckpointMismatchError: a model export, a single file, or of an older format or a newer trainstack.
    """
    root, content = _open_states(path)
    if content.kind != "checkpoint":
        raise CheckpointMismatchError(
            f"{root} is a model export; it holds no optimizer, trainer or backend "
            "state to resume from. Name a checkpoint, or load the weights with read_model() and load_state_dict()."
        )
    if content.format_version < manifest.FORMAT_VERSION:
        raise CheckpointMismatchError(
            f"{root} has format version {content.format_version} (trainstack {content.versions.get('trainstack')}); "
            f"this trainstack resumes from version {manifest.FORMAT_VERSION}, which stores states by name. Its weights "
            f"load: write TrainerArguments(init_weights_from={str(root)!r}) without resume, or read_model(path)."
        )
    states = _Files(root, content, map_tensors if mapped else read_tensors).states()
    plain = StateDecoder({})
    return Checkpoint(
        **states,
        plan=plain.decode(content.plan),
        metadata=plain.decode(content.metadata),
        global_step=content.global_step,
        run_id=content.run_id,
    )


def read_model(path: str | os.PathLike[str], *, mapped: bool = False) -> dict[str, Any]:
    """Return the model state in an export, or the module state in a checkpoint; as `read_checkpoint`.

    Of a checkpoint it reads no other state. It may be of an older format.
    """
    root, content = _open_states(path)
    state = _Files(root, content, map_tensors if mapped else read_tensors).model()
    if state is None:
        raise CheckpointMismatchError(f"{root} holds no model state. Name another checkpoint.")
    return state


def read_states(path: str | os.PathLike[str], *, tensors: bool = True) -> tuple[Manifest, dict[str, Any]]:
    """Return the manifest of a checkpoint or export and its states by name; as `read_checkpoint`.

    It may be of an older format. With `tensors=False` no tensor is read: placeholders of the same shapes and dtypes
    stand for them.
    """
    root, content = _open_states(path)
    files = _Files(root, content, read_tensors if tensors else read_placeholders)
    return content, ({MODEL_STATE: files.model()} if content.kind == "model" else files.states())


_TENSORS = ".safetensors"


def _open_states(path: str | os.PathLike[str]) -> tuple[Path, Manifest]:
    root, content = _open(path)
    if content.kind == "begin":
        raise CheckpointMismatchError(f"{root} marks the beginning of a run and holds no state. Name a checkpoint.")
    return root, content


def _open(path: str | os.PathLike[str]) -> tuple[Path, Manifest]:
    root = local_path(path).absolute()
    try:
        status = os.stat(root)
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise CheckpointNotFoundError(f"{root} does not exist. Give the directory of a checkpoint.") from error
    except OSError as error:
        raise CheckpointDamagedError(f"{root} cannot be read: {error}. Load another checkpoint.") from error
    if not stat.S_ISDIR(status.st_mode):
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
    return root, manifest.read(root / manifest.FILE_NAME)


PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")


def hint_of_pickles(folder: Path) -> str:
    """A sentence for a folder without checkpoint that holds files which torch.save may have written; else ""."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.name.lower().endswith(PICKLE_SUFFIXES))
    except OSError:
        return ""
    if not names:
        return ""
    return (
        f" It holds {names[0]!r}, which may be a pickle, and pickles are never read unasked: "
        f"load_torch_weights({str(folder / names[0])!r}) reads its weights."
    )


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of one checkpoint, and how its tensors are read."""

    root: Path
    content: Manifest
    read: Callable[[Path, FileRecord, FileIndex | None], dict[str, torch.Tensor]]

    def model(self) -> dict[str, Any] | None:
        """The state of the module alone."""
        tree = _read_json(self.root, self.content, manifest.TREE_FILE)
        decoder = self._decoder(_read_index(self.root, self.content), manifest.MODEL_FILE)
        return self._state(decoder, tree, MODEL_STATE if self.content.kind == "model" else STATES[0])

    def states(self) -> dict[str, Any]:
        """All states of a checkpoint by name, those of the ranks included."""
        hashes = _read_index(self.root, self.content)
        tree = _read_json(self.root, self.content, manifest.TREE_FILE)
        count = _rank_count(self.root, self.content, tree)
        decoder = self._decoder(hashes, manifest.MODEL_FILE, manifest.STATE_FILE)
        states: dict[str, Any] = {name: self._state(decoder, tree, name) for name in STATES}
        states[RANK_STATES] = None if count is None else [self._of_rank(hashes, rank) for rank in range(count)]
        return states

    def _of_rank(self, hashes: Mapping[str, FileIndex], rank: int) -> dict[str, Any] | None:
        decoder = self._decoder(hashes, manifest.rank_file(rank, "safetensors"))
        name = manifest.rank_file(rank, "json")
        return self._state(decoder, {name: _read_json(self.root, self.content, name)}, name)

    def _decoder(self, hashes: Mapping[str, FileIndex], *files: str) -> StateDecoder:
        tensors: dict[str, torch.Tensor] = {}
        for file in files:
            if file in self.content.files:
                tensors |= self.read(self.root / file, self.content.files[file], hashes.get(file))
        return StateDecoder(tensors, outline=self.read is read_placeholders)

    def _state(self, decoder: StateDecoder, tree: Mapping[str, Json], name: str) -> dict[str, Any] | None:
        try:
            state = decoder.decode(tree.get(name))
        except CheckpointDamagedError as error:
            raise CheckpointDamagedError(f"{self.root}: {name}: {error}") from error
        if state is not None and not isinstance(state, dict):
            raise CheckpointDamagedError(
                f"{self.root}: {name} is a {type(state).__name__}, not a dict. Load another checkpoint."
            )
        return state


def _read_json(root: Path, content: Manifest, file: str) -> dict[str, Json]:
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


def _read_index(root: Path, content: Manifest) -> dict[str, FileIndex]:
    """The hashes of the tensor files; none for format version 1."""
    if content.format_version == 1:
        return {}
    path = root / manifest.INDEX_FILE
    found = index.parse(read_file(path, content.files[manifest.INDEX_FILE]), path)
    recorded = {file: record.hash for file, record in content.files.items() if file.endswith(_TENSORS)}
    names = [name for file in found.values() for name in file.tensors]
    if recorded != {file: entry.combined for file, entry in found.items()} or len(names) != len(set(names)):
        raise CheckpointDamagedError(f"{path} does not agree with {manifest.FILE_NAME}. Load another checkpoint.")
    if index.root_of(found.values()) != content.root:
        raise CheckpointDamagedError(f"{path} has another root than {manifest.FILE_NAME}. Load another checkpoint.")
    return found


def _rank_count(root: Path, content: Manifest, tree: Mapping[str, Json]) -> int | None:
    """How many ranks have a state of their own, or None. The manifest has to list their files, and no others."""
    count = tree.get(RANK_STATES)
    texts = {file for file in content.files if file.startswith("rank-") and file.endswith(".json")}
    tensors = {file for file in content.files if file.startswith("rank-") and file.endswith(_TENSORS)}
    whole = (
        type(count) is int and count == len(texts) and texts == {manifest.rank_file(r, "json") for r in range(count)}
    )
    stray = tensors - {file.removesuffix(".json") + _TENSORS for file in texts}
    if (count is None and not texts and not tensors) or (whole and not stray):
        return count
    raise CheckpointDamagedError(
        f"{root / manifest.TREE_FILE} is damaged: it speaks of {short(count)} ranks, and the manifest lists the states "
        f"of {len(texts)}. Load another checkpoint."
    )
