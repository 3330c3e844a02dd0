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
"""Makes the content of `SIGNATURE.json` for a folder that is complete but for it."""


@functools.cache  # to find the metadata of a package takes a millisecond, and each save asks
def library_versions() -> dict[str, str]:
    """Return the versions of what a checkpoint depends on, to be read by a person."""
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
    """What a directory will hold.

    Attributes:
        kind: of the manifest.
        parts: the tensors of each tensor file. A part whose tensors come from an iterator can be written once.
        texts: the content of each JSON file.
        global_step, plan, metadata, run_id, lineage, format_version: fields of the manifest.
        readme: of an export; the manifest does not speak of it.
        companions: writes further files of an export into the folder that it is given, before the others. The manifest
            does not speak of these either.
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
        """The same with tensors that the training does not touch; names differ between all parts."""
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
    """Write `payload` as `directory/name` and return that path; raises CheckpointError.

    The order is: files, manifest, temporary directory, each forced to the disk; then the old directory
    of that name is renamed away, the new one renamed into its place, and the parent forced to the disk.
    If `abandoned` is set on the way, the writing ends soon, with a CheckpointError and as if it had not begun.
    With a `lease`, nothing gets its name once another process owns the directory.
    `sequence` is above those of all that is in `directory`; who does not know it lets the directory be scanned.
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
    """A block that writes the checkpoint `final`; what the file system refuses becomes a CheckpointError."""
    try:
        yield
    except OSError as error:
        if lease is not None:
            lease.verify()  # the files of another owner may be in the way
        raise CheckpointError(
            f"checkpoint {final} could not be written: {error}. Earlier checkpoints are intact. "
            "Free space or mend the directory, or set save_dir to another one."
        ) from error


def give_name(temporary: Path, final: Path, payload: Payload, sequence: int, lease: Lease | None) -> None:
    """Make a complete temporary directory the checkpoint `final`, unless another start of the run is further."""
    if lease is None and payload.kind == "checkpoint" and payload.global_step is not None:
        _refuse_given_up(final, sequence, payload.global_step)
    _swap(temporary, final, lease)
    _written_here.add(final)


def check_name(directory: Path, name: str) -> None:
    """Refuse a name that is none, or that something else in `directory` has; raises CheckpointError."""
    if not manifest.is_plain_name(name):
        raise CheckpointError(f"{name!r} cannot name a checkpoint: write a plain name such as 'checkpoint-7'.")
    final = directory / name
    if os.path.lexists(final) and not listing.is_checkpoint_directory(final):
        raise CheckpointError(
            f"{final} exists and is not a checkpoint, so it is not replaced. "
            "Move it away, or give another path; that of a run's checkpoints follows from save_dir and file_prefix."
        )


def check_free(directory: Path, needed: int) -> None:
    """Refuse to begin a checkpoint of so many bytes where they do not fit; raises CheckpointError."""
    free = filesystem.free_bytes(directory)
    if free is not None and free < needed:
        raise CheckpointError(
            f"a checkpoint of about {needed:,} bytes does not fit into {directory}: {free:,} bytes are free. "
            "Free space, or set save_dir to another disk."
        )


_written_here: set[Path] = set()
"""Checkpoints that this process has written. It may write two at the same time, one of them in the background."""


def _refuse_given_up(final: Path, sequence: int, step: int) -> None:
    """Refuse to replace or join the checkpoints of a successor that went further while this process was writing.

    A process that was cut off from the others finishes its save long after they have been started again elsewhere.
    """
    prefix = final.name.rpartition("-")[0]
    for info in listing.scan(final.parent).intact:
        same_run = info.kind == "checkpoint" and prefix and info.name.rpartition("-")[0] == prefix
        later = info.sequence >= sequence and info.global_step is not None and info.global_step >= step
        if same_run and later and info.path not in _written_here:
            raise CheckpointError(
                f"{final} was not written: {info.path.name} was written meanwhile by another start of this run, which "
                "is at a later step. This process was given up; end it."
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
    """Sign a folder that has all its files, if that is asked for, and force its names to the disk."""
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
    """Write small files and force them to the disk; what a manifest says of them."""
    for file, text in texts.items():
        put_file(directory, file, functools.partial(_write_text, text=text), abandoned=abandoned)
    return {file: FileRecord(size=len(text), hash=digest(text)) for file, text in texts.items()}


def _write_text(writer: FileWriter, text: bytes) -> None:
    writer.write(text)


def put_file(
    directory: Path, file: str, fill: Callable[[FileWriter], Made], *, abandoned: threading.Event | None
) -> tuple[int, Made]:
    """Write a file and force it to the disk; returns its size and what `fill` returned."""
    with filesystem.open_new(directory / file) as handle:
        writer = FileWriter(handle, abandoned)
        made = fill(writer)
        filesystem.sync_file(handle)
    return writer.size, made


def _swap(temporary: Path, final: Path, lease: Lease | None = None) -> None:
    """Give `temporary` its name. With a lease: if it was lost in between, what was there before comes back."""
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
            with suppress(OSError):  # the new one is safe; the next run clears the old one away
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
    """Take the name back if this process was stopped just before it gave it, and another one owns the directory."""
    try:
        lease.verify()
    except LeaseError:
        filesystem.rename(final, temporary)
        raise


def write_checkpoint(
    checkpoint: Checkpoint, directory: str | os.PathLike[str], name: str, *, sign: Signer | None = None
) -> Path:
    """Write `checkpoint` as the directory `directory/name`, replacing one of that name.

    It returns once everything is on the disk. Whatever happens on the way, what was there before can
    still be loaded. The states are read, never changed.

    Args:
        checkpoint: what is written.
        directory: the parent; it is made if it does not exist.
        name: of the folder.
        sign: what `checkpoint_signer(key)` returns, for a signature in it.

    Returns:
        The absolute path of the checkpoint.

    Raises:
        UnsupportedStateError: a state holds a value that the format does not.
        CheckpointError: the file system refused; nothing new is left behind.
    """
    return commit(replace(pack(checkpoint), sign=sign), local_path(directory, "directory").absolute(), name)


def pack(checkpoint: Checkpoint) -> Payload:
    """Return what is to be written: plain values are encoded, tensors are still those of their owners.

    Raises:
        UnsupportedStateError: a state holds a value that the format does not.
    """
    tensors, texts = encode(checkpoint)
    return payload_of(checkpoint, {file: TensorPart.of(found) for file, found in tensors.items() if found}, texts)


def encode(
    checkpoint: Checkpoint, *, sharded: bool = False
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, bytes]]:
    """Return the tensors of each tensor file by name, and the content of each JSON file; as `pack`.

    With `sharded`, sharded tensors are taken as they are.
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
    for rank, state in enumerate(ranks or ()):  # tensors of a rank lie in its own file, also those that others have
        _check_dict({} if state is None else state, f"{RANK_STATES}[{rank}]")
        of_rank = StateEncoder(names)
        tree = of_rank.encode(state, f"{RANK_STATES}[{rank}]", f"{RANK_STATES}.{rank}")
        texts[manifest.rank_file(rank, "json")] = _dump(tree)
        parts[manifest.rank_file(rank, "safetensors")] = of_rank.pop_tensors()
    return parts, texts


def payload_of(checkpoint: Checkpoint, parts: Mapping[str, TensorPart], texts: Mapping[str, bytes]) -> Payload:
    """Return what is to be written of `checkpoint`, whose states are in `parts` and `texts`."""
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
    """Write the entry that says that the run `run_id` begins here; as `commit`."""
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
    """Write an export of `model_state`, which is never taken for a point to resume from.

    Its `model.safetensors` can be read by any reader of that format, its README.md says how. Otherwise as
    `write_checkpoint`. Of the module `owner`, the files are added that its `from_pretrained` reads. `card` has fields
    for the README's front matter. What is larger than `max_shard_size` bytes lies in several files.
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
    """Refuse what is read as a dict and is none, before it is written."""
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
            f"{root} holds a tensor or array at {names[0]!r}; it may hold plain values only. "
            "Put tensors into one of the states instead."
        )
    return tree
