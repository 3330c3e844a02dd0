"""Verified reading of one checkpoint directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from trainstack.checkpointing import manifest
from trainstack.checkpointing.abstract import Checkpoint
from trainstack.checkpointing.checksums import FileRecord
from trainstack.checkpointing.decoding import StateDecoder
from trainstack.checkpointing.format import MODEL_STATE, RANK_STATES, STATES, Json
from trainstack.checkpointing.index import FileIndex
from trainstack.checkpointing.manifest import Manifest, decode_plain
from trainstack.checkpointing.sharded.stored_tensors import StoredTensors, files_of
from trainstack.checkpointing.tensorfile import defer_tensors, map_tensors, read_placeholders, read_tensors
from trainstack.checkpointing.verification import open_checkpoint, rank_count, read_index, read_json
from trainstack.errors import CheckpointDamagedError, CheckpointMismatchError

_T = TypeVar("_T")


def read_checkpoint(path: str | os.PathLike[str], *, mapped: bool = False) -> Checkpoint:
    """Return the checkpoint in the directory `path`, verified.

    Its tensors own their memory and are on the CPU; no file remains mapped or open. No pickle is read.

    Args:
        path: of the checkpoint.
        mapped: leave the tensors in the mapped files, which is several times faster if they are only read or copied, to
            a GPU or into a model. They may be changed without changing the files. The files are hashed as always, but
            must not be altered in place while the tensors exist. They may be deleted, except on Windows, where that
            fails.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at `path`.
        CheckpointDamagedError: a file is damaged; the message names it and the fault.
        CheckpointMismatchError: it is a model export, a single file, or of an older format or a newer trainstack.
    """
    return _read(*_open_states(path), _Reader(map_tensors if mapped else read_tensors))


def read_deferred(path: str | os.PathLike[str], *, verified: bool = False) -> Checkpoint:
    """`read_checkpoint` with a `DeferredTensor` for each large tensor, which is read and compared again at its use.

    All files are first compared with their hashes, unless another process has `verified` them.
    """
    return _read(*_open_states(path), _deferring(verified))


def _deferring(verified: bool) -> _Reader:
    return _Reader(partial(defer_tensors, verified=verified), partial(StoredTensors.deferred, verified=verified))


@dataclass(frozen=True, slots=True)
class _Reader:
    """The functions that read tensors.

    Attributes:
        file: reads the tensors of a file, with its record and index.
        rows: reads tensors whose rows are in several files.
    """

    file: Callable[[Path, FileRecord, FileIndex | None], dict[str, torch.Tensor]]
    rows: Callable[[StoredTensors], dict[str, torch.Tensor]] = StoredTensors.read_all


_OUTLINE = _Reader(read_placeholders, StoredTensors.placeholders)


def _read(root: Path, content: Manifest, read: _Reader) -> Checkpoint:
    if content.kind != "checkpoint":
        raise CheckpointMismatchError(
            f"{root} is a model export; it has no optimizer, trainer or backend "
            "state to resume from. Name a checkpoint, or load the weights with read_model() and load_state_dict()."
        )
    if content.format_version == 1:
        raise CheckpointMismatchError(
            f"{root} has format version {content.format_version} (trainstack {content.versions.get('trainstack')}); "
            f"this trainstack resumes from version 2, which stores states by name. Its weights "
            f"load: write TrainerArguments(init_weights_from={str(root)!r}) without resume, or read_model(path)."
        )
    states = _Files(root, content, read).states()
    return Checkpoint(
        **states,
        plan=decode_plain(content.plan),
        metadata=decode_plain(content.metadata),
        global_step=content.global_step,
        run_id=content.run_id,
        lineage=content.lineage if isinstance(content.lineage, dict) else None,
    )


def read_model(path: str | os.PathLike[str], *, mapped: bool = False, strip_prefix: str = "") -> dict[str, Any]:
    """Return the model state in an export, or the module state in a checkpoint.

    Other states of a checkpoint are not read. It may have an older format.

    Args:
        path: an export, a checkpoint, or a file `last` or `best` next to checkpoints, which names one of them.
        mapped: see `read_checkpoint`.
        strip_prefix: removed from the names that begin with it; at least one name must. `"model."` gives the weights of
            the model in a `SupervisedModule`.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at `path`.
        CheckpointDamagedError: a file is damaged; the message names it and the fault.
        CheckpointMismatchError: it is a single file, has no model state, is of a newer trainstack, or no name begins
            with `strip_prefix`.

    Examples:
        >>> path = ts.export_model(module, "line")
        >>> model = nn.Linear(1, 1)
        >>> model.load_state_dict(ts.read_model(path, strip_prefix="model."))
        <All keys matched successfully>
    """
    state = _read_model(path, _Reader(map_tensors if mapped else read_tensors))
    return without_prefix(state, strip_prefix, path)


def without_prefix(state: dict[str, _T], prefix: str, source: str | os.PathLike[str]) -> dict[str, _T]:
    """Remove `prefix` from the names of `state` that begin with it.

    Raises:
        CheckpointMismatchError: no name begins with `prefix`. The message names `source`.
    """
    if not prefix:
        return state
    if not any(name.startswith(prefix) for name in state):
        has = f"there is {next(iter(state))!r}" if state else "it is empty"
        raise CheckpointMismatchError(f"strip_prefix={prefix!r}: no name in {source} begins with it; {has}.")
    return {name.removeprefix(prefix): value for name, value in state.items()}


def read_deferred_model(path: str | os.PathLike[str], *, verified: bool = False) -> Checkpoint:
    """`read_deferred` of an export or a checkpoint, with only the state of the module."""
    return Checkpoint(module_interface_state=_read_model(path, _deferring(verified)))


def _read_model(path: str | os.PathLike[str], reader: _Reader) -> dict[str, Any]:
    root, content = _open_states(path)
    state = _Files(root, content, reader).model()
    if state is None:
        raise CheckpointMismatchError(f"{root} has no model state. Name another checkpoint.")
    return state


def read_states(path: str | os.PathLike[str], *, tensors: bool = True) -> tuple[Manifest, dict[str, Any]]:
    """Return the manifest of a checkpoint or export and its states by name. See `read_checkpoint`.

    It may have an older format. With `tensors=False` no tensor is read; placeholders have the same shapes and dtypes.
    """
    root, content = _open_states(path)
    files = _Files(root, content, _Reader(read_tensors) if tensors else _OUTLINE)
    return content, ({MODEL_STATE: files.model()} if content.kind == "model" else files.states())


def _open_states(path: str | os.PathLike[str]) -> tuple[Path, Manifest]:
    root, content = open_checkpoint(path)
    if content.kind == "begin":
        raise CheckpointMismatchError(f"{root} marks the beginning of a run and has no state. Name a checkpoint.")
    return root, content


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of one checkpoint, and the functions that read its tensors."""

    root: Path
    content: Manifest
    read: _Reader

    def model(self) -> dict[str, Any] | None:
        """The state of the module only."""
        tree = read_json(self.root, self.content, manifest.TREE_FILE)
        decoder = self._decoder(read_index(self.root, self.content), manifest.MODEL_FILE)
        return self._state(decoder, tree, MODEL_STATE if self.content.kind == "model" else STATES[0])

    def states(self) -> dict[str, Any]:
        """All states of a checkpoint by name, including those of the ranks."""
        hashes = read_index(self.root, self.content)
        tree = read_json(self.root, self.content, manifest.TREE_FILE)
        count = rank_count(self.root, self.content, tree)
        decoder = self._decoder(hashes, manifest.MODEL_FILE, manifest.STATE_FILE)
        states: dict[str, Any] = {name: self._state(decoder, tree, name) for name in STATES}
        states[RANK_STATES] = None if count is None else [self._of_rank(hashes, rank) for rank in range(count)]
        return states

    def _of_rank(self, hashes: Mapping[str, FileIndex], rank: int) -> dict[str, Any] | None:
        decoder = self._decoder(hashes, manifest.rank_file(rank, "safetensors"))
        name = manifest.rank_file(rank, "json")
        return self._state(decoder, {name: read_json(self.root, self.content, name)}, name)

    def _decoder(self, hashes: Mapping[str, FileIndex], *files: str) -> StateDecoder:
        tensors: dict[str, torch.Tensor] = {}
        for file in files:
            if self.content.is_sharded:
                tensors |= self._joined(hashes, file)
            elif file in self.content.files:
                tensors |= self.read.file(self.root / file, self.content.files[file], hashes.get(file))
        return StateDecoder(tensors, outline=self.read is _OUTLINE)

    def _joined(self, hashes: Mapping[str, FileIndex], whole_file: str) -> dict[str, torch.Tensor]:
        """The tensors whose rows are in the files of several ranks."""
        stored = StoredTensors(self.root, self.content, hashes, files_of(self.content, whole_file))
        stored.check_headers()
        return self.read.rows(stored)

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
