"""Writing one directory so that it is complete or does not exist."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from trainstack.checkpointing import directory as listing
from trainstack.checkpointing import filesystem, leftovers, manifest
from trainstack.checkpointing.buffers import HostBuffers
from trainstack.checkpointing.checksums import FileRecord, HashingWriter
from trainstack.checkpointing.manifest import Kind, Manifest
from trainstack.checkpointing.readme import FILE_NAME as README
from trainstack.checkpointing.tags import Json
from trainstack.checkpointing.tensorfile import tensor_bytes, write_tensors
from trainstack.errors import CheckpointError

_SLACK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """What a directory will hold: the tensors of its two files, the JSON tree, the manifest's fields, and perhaps a
    README, which the manifest does not speak of."""

    kind: Kind
    model: dict[str, torch.Tensor]
    rest: dict[str, torch.Tensor]
    tree: bytes
    global_step: int | None
    plan: Json
    metadata: Json
    readme: bytes | None = None

    @property
    def size(self) -> int:
        names = sum(len(name) + 128 for name in (*self.model, *self.rest))
        return tensor_bytes(self.model) + tensor_bytes(self.rest) + len(self.tree) + names + _SLACK_BYTES

    def copied_into(self, buffers: HostBuffers) -> Payload:
        """The same with tensors that the training does not touch."""
        copies = buffers.copy(self.model | self.rest)
        return replace(
            self,
            model={name: copies[name] for name in self.model},
            rest={name: copies[name] for name in self.rest},
        )


def commit(payload: Payload, directory: Path, name: str, abandoned: threading.Event | None = None) -> Path:
    """Write `payload` as `directory/name` and return that path; raises CheckpointError.

    The order is: files, manifest, temporary directory, each forced to the disk; then the old directory
    of that name is renamed away, the new one renamed into its place, and the parent forced to the disk.
    If `abandoned` is set on the way, the writing ends soon, with a CheckpointError and as if it had not begun.
    """
    if not name or name.startswith(".") or any(mark in name for mark in "/\\\0"):
        raise CheckpointError(f"{name!r} cannot name a checkpoint: write a plain name such as 'checkpoint-7'.")
    final = directory / name
    if os.path.lexists(final) and not listing.is_checkpoint_directory(final):
        raise CheckpointError(
            f"{final} exists and is not a checkpoint, so it is not replaced. "
            "Move it away, or give another path; that of a run's checkpoints follows from save_dir and file_prefix."
        )
    try:
        filesystem.make_directories(directory)
        _check_space(payload.size, directory)
        temporary = leftovers.claim(directory, leftovers.TEMPORARY, name)
        try:
            _fill(temporary, payload, name, abandoned)
            _swap(temporary, final)
        except BaseException:
            with suppress(OSError):
                filesystem.remove_tree(temporary)
            raise
        finally:
            leftovers.release(temporary)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {final} could not be written: {error}. Earlier checkpoints are intact. "
            "Free space or mend the directory, or set save_dir to another one."
        ) from error
    return final


def _check_space(needed: int, directory: Path) -> None:
    free = filesystem.free_bytes(directory)
    if free is not None and free < needed:
        raise CheckpointError(
            f"a checkpoint of about {needed:,} bytes does not fit into {directory}: {free:,} bytes are free. "
            "Free space, or set save_dir to another disk."
        )


def _fill(temporary: Path, payload: Payload, name: str, abandoned: threading.Event | None) -> None:
    sequence = listing.next_sequence(temporary.parent)
    filesystem.make_directory(temporary)
    files: dict[str, FileRecord] = {}
    put = partial(_put, abandoned=abandoned)
    for file, tensors in ((manifest.MODEL_FILE, payload.model), (manifest.STATE_FILE, payload.rest)):
        if tensors:
            files[file] = put(temporary / file, partial(write_tensors, tensors=tensors))
    files[manifest.TREE_FILE] = put(temporary / manifest.TREE_FILE, lambda writer: writer.write(payload.tree))
    if payload.readme is not None:
        put(temporary / README, lambda writer: writer.write(payload.readme or b""))
    content = Manifest(
        kind=payload.kind,
        name=name,
        sequence=sequence,
        global_step=payload.global_step,
        created=manifest.now(),
        versions=manifest.library_versions(),
        plan=payload.plan,
        metadata=payload.metadata,
        files=files,
    )
    put(temporary / manifest.FILE_NAME, lambda writer: writer.write(manifest.render(content)))
    filesystem.sync_directory(temporary)


def _put(path: Path, fill: Callable[[HashingWriter], None], abandoned: threading.Event | None) -> FileRecord:
    with filesystem.open_new(path) as handle:
        writer = HashingWriter(handle, abandoned)
        fill(writer)
        filesystem.sync_file(handle)
    return writer.record()


def _swap(temporary: Path, final: Path) -> None:
    replaced = None
    if final.exists():
        replaced = leftovers.claim(final.parent, leftovers.REPLACED, final.name)
    try:
        if replaced:
            filesystem.rename(final, replaced)
        filesystem.rename(temporary, final)
        filesystem.sync_directory(final.parent)
        if replaced:
            with suppress(OSError):  # the new one is safe; the next run clears the old one away
                leftovers.discard(replaced)
    except BaseException:
        if replaced and not final.exists():
            with suppress(OSError):
                filesystem.rename(replaced, final)
        raise
    finally:
        if replaced:
            leftovers.release(replaced)
