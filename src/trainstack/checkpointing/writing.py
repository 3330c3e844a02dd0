"""Atomic writing of one checkpoint directory."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainstack._files import local_path
from trainstack.checkpointing import directory as listing
from trainstack.checkpointing import filesystem, manifest, temp_dirs
from trainstack.checkpointing.abstract import Checkpoint
from trainstack.checkpointing.async_writer import HostBuffers
from trainstack.checkpointing.checksums import FileRecord, HashingWriter
from trainstack.checkpointing.encoding import StateEncoder, tensor_identity
from trainstack.checkpointing.format import NATIVE, Json
from trainstack.checkpointing.manifest import Kind, Manifest, library_versions
from trainstack.checkpointing.tensorfile import write_tensors
from trainstack.errors import CheckpointError, UnsupportedStateError


def render_readme(
    model_state: Mapping[str, Any],
    name: str,
    *,
    versions: Mapping[str, str],
    plan: Mapping[str, Any] | None,
    global_step: int | None,
    metadata: Mapping[str, Any] | None,
) -> bytes:
    """Return the text of README.md for an export of `model_state`."""
    facts = {"global steps": global_step, **(metadata or {})}
    tables = {
        "Training": {k: value for k, value in facts.items() if not isinstance(value, Mapping) and value is not None},
        **{key.capitalize(): value for key, value in facts.items() if isinstance(value, Mapping)},
        "Plan": {key: value for key, value in (plan or {}).items() if value is not None},
        "Versions": versions,
    }
    parts = [f"# {name}", "Weights of a PyTorch model, exported by trainstack.", *_how_to_load(model_state)]
    for title, table in tables.items():
        if table:
            rows = [f"| {_cell(key)} | {_cell(value)} |" for key, value in table.items()]
            parts += [f"## {title}", "\n".join(["| | |", "| --- | --- |", *rows])]
    parts.append(
        "`MANIFEST.json` holds the size and hash of each file but this one, which is yours to edit; "
        "`trainstack checkpoints verify` compares them. No file here is a pickle."
    )
    return ("\n\n".join(parts) + "\n").encode("utf-8", "replace")


def _how_to_load(model_state: Mapping[str, Any]) -> Iterable[str]:
    yield "## Loading"
    dense = (isinstance(value, torch.Tensor) and value.layout is torch.strided for value in model_state.values())
    if all(dense) and all(value.dtype in NATIVE for value in model_state.values()):
        lines = ["from safetensors.torch import load_file", "", 'weights = load_file("model.safetensors")']
        lines += [f"weights[{tied!r}] = weights[{first!r}]  # one tensor" for tied, first in _tied(model_state)]
        yield "In plain PyTorch (`pip install safetensors`); names are those of the module that was trained:"
        yield _code([*lines, "model.load_state_dict(weights)"])
    else:
        yield (
            "The tensors lie in `model.safetensors`. The state also holds what is no tensor of a safetensors file, so "
            "it is read with trainstack:"
        )
    yield "With trainstack, which compares the hashes:"
    yield _code(["from trainstack import read_model", "", 'state = read_model(".")  # the folder of this file'])


def _tied(model_state: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Names of tensors that are stored once, under the name that came first."""
    first: dict[Any, str] = {}
    for name, tensor in model_state.items():
        before = first.setdefault(tensor_identity(tensor), name)
        if before != name:
            yield name, before


def _code(lines: Iterable[str]) -> str:
    return "\n".join(["```python", *lines, "```"])


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("|", "\\|")


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
        headers = sum(len(name) + 128 for name in (*self.model, *self.rest))  # dtype, shape and offsets beside a name
        tensors = sum(t.numel() * t.element_size() for t in (*self.model.values(), *self.rest.values()))
        return tensors + len(self.tree) + headers + (1 << 20)  # and 1 MiB for manifest, README and directories

    def copy_into(self, buffers: HostBuffers) -> Payload:
        """The same with tensors that the training does not touch."""
        copies = buffers.copy(self.model | self.rest)
        model, rest = ({name: copies[name] for name in part} for part in (self.model, self.rest))
        return replace(self, model=model, rest=rest)


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
        free, needed = filesystem.free_bytes(directory), payload.size
        if free is not None and free < needed:
            raise CheckpointError(
                f"a checkpoint of about {needed:,} bytes does not fit into {directory}: {free:,} bytes are free. "
                "Free space, or set save_dir to another disk."
            )
        temporary = temp_dirs.claim_temp_dir(directory, temp_dirs.TEMPORARY, name)
        try:
            _fill(temporary, payload, name, abandoned)
            _swap(temporary, final)
        except BaseException:
            with suppress(OSError):
                filesystem.remove_tree(temporary)
            raise
        finally:
            temp_dirs.release_temp_dir(temporary)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {final} could not be written: {error}. Earlier checkpoints are intact. "
            "Free space or mend the directory, or set save_dir to another one."
        ) from error
    return final


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
        put(temporary / "README.md", lambda writer: writer.write(payload.readme or b""))
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
        replaced = temp_dirs.claim_temp_dir(final.parent, temp_dirs.REPLACED, final.name)
    try:
        if replaced:
            filesystem.rename(final, replaced)
        filesystem.rename(temporary, final)
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


STATES = (
    "module_interface_state",
    "trainer_state",
    "trainer_backend_state",
    "rng_state",
    "history_state",
    "callback_states",
)
"""The fields of `Checkpoint` that may hold tensors."""

MODEL_STATE = "model_state"


def write_checkpoint(checkpoint: Checkpoint, directory: str | os.PathLike[str], name: str) -> Path:
    """Write `checkpoint` as the directory `directory/name`, replacing one of that name.

    It returns once everything is on the disk. Whatever happens on the way, what was there before can
    still be loaded. The states are read, never changed.

    Returns:
        The absolute path of the checkpoint.

    Raises:
        UnsupportedStateError: a state holds a value that the format does not.
        CheckpointError: the file system refused; nothing new is left behind.
    """
    return commit(pack(checkpoint), local_path(directory, "directory").absolute(), name)


def pack(checkpoint: Checkpoint) -> Payload:
    """Return what is to be written: plain values are encoded, tensors are still those of their owners.

    Raises:
        UnsupportedStateError: a state holds a value that the format does not.
    """
    encoder = StateEncoder()
    first, *others = STATES
    trees = {first: encoder.encode(getattr(checkpoint, first), first)}
    model = encoder.pop_tensors()
    trees |= {state: encoder.encode(getattr(checkpoint, state), state, state) for state in others}
    return Payload(
        kind="checkpoint",
        model=model,
        rest=encoder.pop_tensors(),
        tree=_dump(trees),
        global_step=checkpoint.global_step,
        plan=_plain(checkpoint.plan, "plan"),
        metadata=_plain(checkpoint.metadata, "metadata"),
    )


def write_model(
    model_state: Mapping[str, Any],
    directory: str | os.PathLike[str],
    name: str,
    metadata: dict[str, Any] | None = None,
    *,
    plan: dict[str, Any] | None = None,
    global_step: int | None = None,
) -> Path:
    """Write an export of `model_state`, which is never taken for a point to resume from.

    Its `model.safetensors` can be read by any reader of that format, its README.md says how. Otherwise as
    `write_checkpoint`.
    """
    encoder = StateEncoder()
    tree = _dump({MODEL_STATE: encoder.encode(model_state, MODEL_STATE)})
    readme = render_readme(
        model_state, name, versions=library_versions(), plan=plan, global_step=global_step, metadata=metadata
    )
    payload = Payload(
        kind="model",
        model=encoder.pop_tensors(),
        rest={},
        tree=tree,
        global_step=global_step,
        plan=_plain(plan, "plan"),
        metadata=_plain(metadata, "metadata"),
        readme=readme,
    )
    return commit(payload, Path(directory).absolute(), name)


def _dump(tree: Json) -> bytes:
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode("ascii")


def _plain(value: Any, root: str) -> Json:
    encoder = StateEncoder()
    tree = encoder.encode(value, root)
    names = list(encoder.pop_tensors())
    if names:
        raise UnsupportedStateError(
            f"{root} holds a tensor or array at {names[0]!r}; it may hold plain values only. "
            "Put tensors into one of the states instead."
        )
    return tree
