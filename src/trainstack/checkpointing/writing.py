"""Writing a checkpoint or a model export: from states to the files of one directory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainstack.checkpointing.checkpoint import Checkpoint
from trainstack.checkpointing.committing import Payload, commit
from trainstack.checkpointing.encoding import StateEncoder
from trainstack.checkpointing.manifest import library_versions
from trainstack.checkpointing.readme import render_readme
from trainstack.checkpointing.tags import Json
from trainstack.errors import UnsupportedStateError

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
    return commit(pack(checkpoint), Path(directory).absolute(), name)


def pack(checkpoint: Checkpoint) -> Payload:
    """Return what is to be written: plain values are encoded, tensors are still those of their owners.

    Raises:
        UnsupportedStateError: a state holds a value that the format does not.
    """
    encoder = StateEncoder()
    first, *others = STATES
    trees = {first: encoder.encode(getattr(checkpoint, first), first)}
    model = encoder.take_tensors()
    trees |= {state: encoder.encode(getattr(checkpoint, state), state, state) for state in others}
    return Payload(
        kind="checkpoint",
        model=model,
        rest=encoder.take_tensors(),
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
        model=encoder.take_tensors(),
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
    names = list(encoder.take_tensors())
    if names:
        raise UnsupportedStateError(
            f"{root} holds a tensor or array at {names[0]!r}; it may hold plain values only. "
            "Put tensors into one of the states instead."
        )
    return tree
