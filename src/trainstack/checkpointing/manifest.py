"""`Manifest` lists the files of a checkpoint with sizes and hashes.

The manifest is written last, so a directory without one was never finished. It holds its own hash,
and only the very bytes that were written count: one flipped bit anywhere in it is detected.
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from trainstack.checkpointing.checksums import FileRecord, digest
from trainstack.checkpointing.format import Json
from trainstack.errors import CheckpointDamagedError, CheckpointMismatchError

FILE_NAME = "MANIFEST.json"
MODEL_FILE = "model.safetensors"
STATE_FILE = "state.safetensors"
TREE_FILE = "state.json"
FORMAT = "trainstack-checkpoint"
FORMAT_VERSION = 1

Kind = Literal["checkpoint", "model"]

_SELF_HASH = "manifest_xxh3_128"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a manifest; `plan` and `metadata` are trees as `StateEncoder` makes them."""

    kind: Kind
    name: str
    sequence: int
    global_step: int | None
    created: str
    versions: dict[str, str]
    plan: Json
    metadata: Json
    files: dict[str, FileRecord]

    @property
    def size(self) -> int:
        """Bytes in all files but the manifest."""
        return sum(record.size for record in self.files.values())


def now() -> str:
    """Return the time in UTC as ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


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


def render(manifest: Manifest) -> bytes:
    """Return the bytes of MANIFEST.json."""
    return _render({"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(manifest)})


def is_manifest(data: bytes) -> bool:
    """Say whether `data` once was, or still is, a manifest of this library."""
    return FORMAT.encode() in data or _SELF_HASH.encode() in data


def parse(data: bytes, path: Path) -> Manifest:
    """Return the manifest in `data`, the content of the file `path`.

    Raises:
        CheckpointDamagedError: not one that this library wrote, or altered since.
        CheckpointMismatchError: written by a newer trainstack.
    """
    try:
        body = json.loads(data)
        intact = body.pop(_SELF_HASH, None) is not None and _render(body) == data
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointDamagedError(
            f"{path} is damaged: it is no JSON object ({error}). Load another checkpoint."
        ) from error
    if not intact:
        raise CheckpointDamagedError(
            f"{path} is damaged: it is not as it was written: its own hash differs. Load another checkpoint."
        )
    if body.get("format") != FORMAT:
        raise CheckpointDamagedError(f"{path} is no manifest of a trainstack checkpoint.")
    version = body.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise CheckpointMismatchError(
            f"{path} has format version {version}; this trainstack reads versions up to {FORMAT_VERSION}. "
            "Upgrade trainstack to load it."
        )
    try:
        records = {name: FileRecord(**record) for name, record in body["files"].items()}
        unknown = [name for name in records if name not in (MODEL_FILE, STATE_FILE, TREE_FILE)]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no file of a checkpoint")
        known = {field.name: body[field.name] for field in fields(Manifest)} | {"files": records}
        if body["kind"] not in get_args(Kind) or TREE_FILE not in records:
            raise ValueError("kind or files are wrong")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointDamagedError(f"{path} is no manifest of a checkpoint: {error!r}.") from error
    return Manifest(**known)


def _render(body: dict[str, Any]) -> bytes:
    return _dump({**body, _SELF_HASH: digest(_dump(body))})


def _dump(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=1, allow_nan=False) + "\n").encode("ascii")
