"""Atomic writing of one checkpoint directory."""

from __future__ import annotations

import functools
import json
import os
import platform
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from trainstack._files import local_path
from trainstack.checkpointing import directory as listing
from trainstack.checkpointing import filesystem, index, manifest, temp_dirs
from trainstack.checkpointing.abstract import Checkpoint
from trainstack.checkpointing.async_writer import HostBuffers
from trainstack.checkpointing.checksums import FileRecord, FileWriter, digest
from trainstack.checkpointing.encoding import StateEncoder
from trainstack.checkpointing.format import MODEL_STATE, RANK_STATES, STATES, Json
from trainstack.checkpointing.index import FileIndex
from trainstack.checkpointing.lease import Lease
from trainstack.checkpointing.manifest import Kind, Manifest
from trainstack.checkpointing.pretrained.companions import companions_of
from trainstack.checkpointing.pretrained.readme import render_readme
from trainstack.checkpointing.sharded.export_files import bytes_of_size, divide
from trainstack.checkpointing.tensorfile import TensorPart, write_tensors
from trainstack.errors import CheckpointError, LeaseError, UnsupportedStateError

Made = TypeVar("Made")

Signer = Callable[[Path], bytes]
"""Makes the content of `SIGNATURE.json` for a folder in which only this file is missing."""


@functools.cache  # finding the metadata of a package takes a millisecond, and each save needs it
def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that a checkpoint depends on, for readers of the manifest."""
    try:
        own = metadata.version("trainstack")
    except metadata.PackageNotFoundError:
        own = "unknown"
    return {
        "trainstack": own,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """The content of a directory to write.

    Attributes:
        kind: of the manifest.
        parts: the tensors of each tensor file. A part whose tensors are an iterator can be written only once.
        texts: the content of each JSON file.
        global_step, plan, metadata, run_id, lineage, format_version: fields of the manifest.
        readme: of an export; the manifest does not list it.
        companions: writes further files of an export to the folder, before the others. The manifest does not list them.
        sign: returns the content of `SIGNATURE.json` for the folder with all other files; None for no signature.
    """

    kind: Kind
    parts: Mapping[str, TensorPart]
    texts: Mapping[str, bytes]
    global_step: int | None
    plan: Json
    metadata: Json
    run_id: str | None = None
    lineage: Json = None
    format_version: int = manifest.FORMAT_VERSION
    readme: bytes | None = None
    companions: Callable[[Path], None] | None = None
    sign: Signer | None = None

    @property
    def size(self) -> int:
        """Bytes that have to be free: those of the files, and 1 MiB for manifest, index, README and directories."""
        texts = sum(map(len, self.texts.values()))
        return sum(part.size for part in self.parts.values()) + texts + (1 << 20)

    def copy_into(self, buffers: HostBuffers) -> Payload:
        """A copy whose tensors the training does not change. Names have to differ between all parts."""
        tensors = {file: dict(part.tensors) for file, part in self.parts.items()}
        copies = buffers.copy({name: tensor for part in tensors.values() for name, tensor in part.items()})
        parts = {
            file: TensorPart(self.parts[file].layout, [(name, copies[name]) for name in part], self.parts[file].rows)
            for file, part in tensors.items()
        }
        return replace(self, parts=parts)


def commit(
    payload: Payload,
    directory: Path,
    name: str,
    abandoned: threading.Event | None = None,
    lease: Lease | None = None,
    sequence: int | None = None,
) -> Path:
    """Write `payload` as `directory/name` and return that path. Raises CheckpointError.

    The order is: files, manifest, temporary directory, each flushed to the disk; then an old directory with this name
    is renamed, the new one is renamed to the name, and the parent is flushed. If `abandoned` is set, the write ends
    soon with a CheckpointError, and leaves nothing. With a `lease`, nothing is renamed after another process has
    acquired the directory. `sequence` has to be above those of all entries in `directory`; None scans the directory for
    it.
    """
    check_name(directory, name)
    final = directory / name
    with explaining(final, lease):
        filesystem.make_directories(directory)
        check_free(directory, payload.size)
        temporary = temp_dirs.claim_temp_dir(directory, temp_dirs.TEMPORARY, name)
        with discarded_on_failure(temporary):
            if sequence is None:
                sequence = listing.scan(directory).highest + 1
            filesystem.make_directory(temporary)
            _fill(temporary, payload, name, abandoned, sequence, 0 if lease is None else lease.counter)
            give_name(temporary, final, payload, sequence, lease)
    return final


@contextmanager
def discarded_on_failure(temporary: Path) -> Iterator[None]:
    """A block that fills a claimed temporary directory; if it fails, the directory is deleted."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            filesystem.remove_tree(temporary)
        raise
    finally:
        temp_dirs.release_temp_dir(temporary)


@contextmanager
def explaining(final: Path, lease: Lease | None) -> Iterator[None]:
    """A block that writes the checkpoint `final`. An error of the file system becomes a CheckpointError."""
    try:
        yield
    except OSError as error:
        if lease is not None:
            lease.verify()  # if another process owns the directory, its files may be the reason
        raise CheckpointError(
            f"checkpoint {final} could not be written: {error}. Earlier checkpoints are intact. "
            "Free space or repair the directory, or set save_dir to another one."
        ) from error


def give_name(temporary: Path, final: Path, payload: Payload, sequence: int, lease: Lease | None) -> None:
    """Rename a complete temporary directory to `final`, unless another start of the run has a later checkpoint."""
    if lease is None and payload.kind == "checkpoint" and payload.global_step is not None:
        _refuse_given_up(final, sequence, payload.global_step)
    _swap(temporary, final, lease)
    _written_here.add(final)


def check_name(directory: Path, name: str) -> None:
    """Refuse an invalid name, or one of another file in `directory`. Raises CheckpointError."""
    if not manifest.is_plain_name(name):
        raise CheckpointError(f"{name!r} cannot name a checkpoint: write a plain name such as 'checkpoint-7'.")
    final = directory / name
    if os.path.lexists(final) and not listing.is_checkpoint_directory(final):
        raise CheckpointError(
            f"{final} exists and is not a checkpoint, so it is not replaced. "
            "Move it away, or use another path; that of a run's checkpoints follows from save_dir and file_prefix."
        )


def check_free(directory: Path, needed: int) -> None:
    """Refuse a checkpoint of so many bytes if there is not enough space. Raises CheckpointError."""
    free = filesystem.free_bytes(directory)
    if free is not None and free < needed:
        raise CheckpointError(
            f"a checkpoint of about {needed:,} bytes does not fit into {directory}: {free:,} bytes are free. "
            "Free space, or set save_dir to another disk."
        )


_written_here: set[Path] = set()
"""Checkpoints that this process has written. It may write two at the same time, one of them in the background."""


def _refuse_given_up(final: Path, sequence: int, step: int) -> None:
    """Refuse to write if a later start of the run has written further checkpoints during this save.

    A process that was cut off from the others may finish its save long after the run was restarted elsewhere.
    """
    prefix = final.name.rpartition("-")[0]
    for info in listing.scan(final.parent).intact:
        same_run = info.kind == "checkpoint" and prefix and info.name.rpartition("-")[0] == prefix
        later = info.sequence >= sequence and info.global_step is not None and info.global_step >= step
        if same_run and later and info.path not in _written_here:
            raise CheckpointError(
                f"{final} was not written: another start of this run has written {info.path.name} in between, which "
                "is at a later step. The run has replaced this process; end it."
            )


def _fill(
    temporary: Path, payload: Payload, name: str, abandoned: threading.Event | None, sequence: int, lease: int
) -> None:
    """Write the files of the checkpoint in `temporary`."""
    if payload.companions is not None:
        payload.companions(temporary)
    put = functools.partial(put_file, temporary, abandoned=abandoned)
    files: dict[str, FileRecord] = {}
    indices: dict[str, FileIndex] = {}
    for file, part in payload.parts.items():
        size, indices[file] = put(file, functools.partial(write_tensors, part=part))
        files[file] = FileRecord(size=size, hash=indices[file].combined)
    texts = dict(payload.texts)
    joined: index.Joined | None = {} if payload.format_version == manifest.SHARDED_VERSION else None
    if payload.kind != "begin":
        texts[manifest.INDEX_FILE] = index.render(indices, joined)
    files |= put_texts(temporary, texts, abandoned)
    if payload.readme is not None:
        put_texts(temporary, {"README.md": payload.readme}, abandoned)
    root = None if payload.kind == "begin" else index.root_of(indices.values(), joined)
    content = manifest_of(payload, name, sequence, lease, files, root)
    put_texts(temporary, {manifest.FILE_NAME: manifest.render(content)}, abandoned)
    finish(temporary, payload.sign)


def finish(temporary: Path, sign: Signer | None) -> None:
    """Sign a folder with all its files, if requested, and flush its names to the disk."""
    if sign is not None:
        put_texts(temporary, {manifest.SIGNATURE_FILE: sign(temporary)})
    filesystem.sync_directory(temporary)


def manifest_of(
    payload: Payload, name: str, sequence: int, lease: int, files: dict[str, FileRecord], root: str | None
) -> Manifest:
    """The manifest of the directory `name` with these files, made now."""
    return Manifest(
        kind=payload.kind,
        name=name,
        sequence=sequence,
        run_id=payload.run_id,
        lease=lease,
        global_step=payload.global_step,
        created=manifest.now(),
        versions=library_versions(),
        plan=payload.plan,
        metadata=payload.metadata,
        files=files,
        root=root,
        lineage=payload.lineage,
        format_version=payload.format_version,
    )


def put_texts(
    directory: Path, texts: Mapping[str, bytes], abandoned: threading.Event | None = None
) -> dict[str, FileRecord]:
    """Write small files and flush them to the disk. Returns their records for a manifest."""
    for file, text in texts.items():
        put_file(directory, file, functools.partial(FileWriter.write, data=text), abandoned=abandoned)
    return {file: FileRecord(size=len(text), hash=digest(text)) for file, text in texts.items()}


def put_file(
    directory: Path, file: str, fill: Callable[[FileWriter], Made], *, abandoned: threading.Event | None
) -> tuple[int, Made]:
    """Write a file and flush it to the disk. Returns its size and the result of `fill`."""
    with filesystem.open_new(directory / file) as handle:
        writer = FileWriter(handle, abandoned)
        made = fill(writer)
        filesystem.sync_file(handle)
    return writer.size, made


def _swap(temporary: Path, final: Path, lease: Lease | None = None) -> None:
    """Rename `temporary` to its name. If the lease is lost in between, the previous directory is restored."""
    replaced = None
    if final.exists():
        replaced = temp_dirs.claim_temp_dir(final.parent, temp_dirs.REPLACED, final.name)
    try:
        if lease is not None:
            lease.verify()
        if replaced:
            filesystem.rename(final, replaced)
        filesystem.rename(temporary, final)
        if lease is not None:
            _verify_after(lease, final, temporary)
        filesystem.sync_directory(final.parent)
        if replaced:
            with suppress(OSError):  # the new one is safe; the next run deletes the old one
                temp_dirs.discard_dir(replaced)
    except BaseException:
        if replaced and not final.exists():
            with suppress(OSError):
                filesystem.rename(replaced, final)
        raise
    finally:
        if replaced:
            temp_dirs.release_temp_dir(replaced)


def _verify_after(lease: Lease, final: Path, temporary: Path) -> None:
    """Undo the rename if this process was stopped just before it, and another one owns the directory now."""
    try:
        lease.verify()
    except LeaseError:
        filesystem.rename(final, temporary)
        raise


def write_checkpoint(
    checkpoint: Checkpoint, directory: str | os.PathLike[str], name: str, *, sign: Signer | None = None
) -> Path:
    """Write `checkpoint` as the directory `directory/name`, replacing one with that name.

    It returns when everything is on the disk. At any interruption, the previous checkpoint can still be loaded. The
    states are read, never changed.

    Args:
        checkpoint: the states to write.
        directory: the parent; it is created if it does not exist.
        name: of the folder.
        sign: a result of `checkpoint_signer(key)`, to add a signature.

    Returns:
        The absolute path of the checkpoint.

    Raises:
        UnsupportedStateError: a state contains a value that the format cannot store.
        CheckpointError: the file system refused; no new files remain.
    """
    return commit(replace(pack(checkpoint), sign=sign), local_path(directory, "directory").absolute(), name)


def pack(checkpoint: Checkpoint) -> Payload:
    """Return the encoded checkpoint. Plain values are encoded; tensors still belong to their owners.

    Raises:
        UnsupportedStateError: a state contains a value that the format cannot store.
    """
    tensors, texts = encode(checkpoint)
    return payload_of(checkpoint, {file: TensorPart.of(found) for file, found in tensors.items() if found}, texts)


def encode(
    checkpoint: Checkpoint, *, sharded: bool = False
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, bytes]]:
    """Return the tensors of each tensor file by name, and the content of each JSON file; see `pack`.

    With `sharded`, sharded tensors are returned unchanged.
    """
    for field in STATES:
        _check_dict(getattr(checkpoint, field), field)
    names: set[str] = set()
    encoder = StateEncoder(names, sharded=sharded)
    first, *others = STATES
    trees = {first: encoder.encode(getattr(checkpoint, first), first)}
    parts = {manifest.MODEL_FILE: encoder.pop_tensors()}
    trees |= {state: encoder.encode(getattr(checkpoint, state), state, state) for state in others}
    parts[manifest.STATE_FILE] = encoder.pop_tensors()
    ranks = checkpoint.rank_states
    texts = {manifest.TREE_FILE: _dump({**trees, RANK_STATES: None if ranks is None else len(ranks)})}
    for rank, state in enumerate(ranks or ()):  # a rank's tensors are in its file, even if another file has them too
        _check_dict({} if state is None else state, f"{RANK_STATES}[{rank}]")
        of_rank = StateEncoder(names)
        tree = of_rank.encode(state, f"{RANK_STATES}[{rank}]", f"{RANK_STATES}.{rank}")
        texts[manifest.rank_file(rank, "json")] = _dump(tree)
        parts[manifest.rank_file(rank, "safetensors")] = of_rank.pop_tensors()
    return parts, texts


def payload_of(checkpoint: Checkpoint, parts: Mapping[str, TensorPart], texts: Mapping[str, bytes]) -> Payload:
    """Return the payload of `checkpoint`, whose states are in `parts` and `texts`."""
    return Payload(
        kind="checkpoint",
        parts=parts,
        texts=texts,
        global_step=checkpoint.global_step,
        plan=_plain(checkpoint.plan, "plan"),
        metadata=_plain(checkpoint.metadata, "metadata"),
        run_id=checkpoint.run_id,
        lineage=checkpoint.lineage,
    )


def write_begin(directory: Path, prefix: str, run_id: str, lease: Lease | None, sequence: int) -> Path:
    """Write the entry for the beginning of the run `run_id`; see `commit`."""
    name = listing.begin_name(prefix, sequence)
    payload = Payload(kind="begin", parts={}, texts={}, global_step=0, plan=None, metadata={}, run_id=run_id)
    return commit(payload, directory, name, lease=lease, sequence=sequence)


def write_model(
    model_state: Mapping[str, Any],
    directory: str | os.PathLike[str],
    name: str,
    metadata: dict[str, Any] | None = None,
    *,
    plan: dict[str, Any] | None = None,
    global_step: int | None = None,
    run_id: str | None = None,
    lineage: Json = None,
    lease: Lease | None = None,
    owner: nn.Module | None = None,
    card: Mapping[str, Any] | None = None,
    max_shard_size: int | str | None = None,
    sign: Signer | None = None,
) -> Path:
    """Write an export of `model_state`, from which a run never resumes by default.

    Any reader of safetensors can read its `model.safetensors`, as its README.md explains. Files for `from_pretrained`
    of the module `owner` are added. `card` has fields for the README's front matter. A state of more than
    `max_shard_size` bytes is divided into several files. Otherwise like `write_checkpoint`.

    Args:
        model_state: tensors and plain values by name.
        directory: the parent; it is created if it does not exist.
        name: of the folder.
        metadata: further plain values for the manifest.
        plan: of the training, for the manifest and the README.
        global_step: global steps of the training.
        run_id: of the run that trained the weights.
        lineage: the sources of the weights, for the manifest.
        lease: the lease of the run directory, which is checked before the folder gets its name.
        owner: the module, whose files for `from_pretrained` are added.
        card: fields of the README's front matter.
        max_shard_size: bytes a file; a larger state is divided into several files.
        sign: a result of `checkpoint_signer(key)`, to add a signature.
    """
    encoder = StateEncoder()
    tree = _dump({MODEL_STATE: encoder.encode(model_state, MODEL_STATE)})
    divided = divide(tensors := encoder.pop_tensors(), bytes_of_size("max_shard_size", max_shard_size))
    render = functools.partial(render_readme, model_state, name, versions=library_versions(), owner=owner, card=card)
    readme = render(plan=plan, global_step=global_step, metadata=metadata, several=divided is not None, lineage=lineage)
    parts, texts = divided or ({manifest.MODEL_FILE: TensorPart.of(tensors)} if tensors else {}, {})
    payload = Payload(
        kind="model",
        parts=parts,
        texts={manifest.TREE_FILE: tree, **texts},
        format_version=manifest.FORMAT_VERSION if divided is None else manifest.SHARDED_VERSION,
        global_step=global_step,
        plan=_plain(plan, "plan"),
        metadata=_plain(metadata, "metadata"),
        readme=readme,
        companions=companions_of(owner),
        run_id=run_id,
        lineage=lineage,
        sign=sign,
    )
    return commit(payload, Path(directory).absolute(), name, lease=lease)


def _check_dict(value: Any, root: str) -> None:
    """Refuse, before writing, a value that is not a dict if a dict will be read."""
    if value is not None and not isinstance(value, dict):
        raise UnsupportedStateError(f"{root} is a {type(value).__name__}. Return a dict from get_state().")


def _dump(tree: Json) -> bytes:
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode("ascii")


def _plain(value: Any, root: str) -> Json:
    _check_dict(value, root)
    encoder = StateEncoder()
    tree = encoder.encode(value, root)
    names = list(encoder.pop_tensors())
    if names:
        raise UnsupportedStateError(
            f"{root} contains a tensor or array at {names[0]!r}; it may contain plain values only. "
            "Put tensors into one of the states instead."
        )
    return tree
