"""Where a run began afresh beside the checkpoints of an earlier one, which are not its own to resume from."""

from __future__ import annotations

import json
import os
from pathlib import Path

from trainstack.checkpointing import filesystem


def mark(directory: Path, prefix: str, sequence: int) -> None:
    """Remember that what has a sequence number up to `sequence` belongs to an earlier run."""
    aside = directory / f".tmp-{_name(prefix)}-{os.getpid()}"
    aside.unlink(missing_ok=True)
    with filesystem.open_new(aside) as handle:
        filesystem.write(handle, json.dumps({"after_sequence": sequence}).encode())
        filesystem.sync_file(handle)
    os.replace(aside, directory / _name(prefix))
    filesystem.sync_directory(directory)


def read(directory: Path, prefix: str) -> int:
    """The last sequence number of an earlier run; -1 if none was remembered or the mark cannot be read."""
    try:
        return int(json.loads((directory / _name(prefix)).read_bytes())["after_sequence"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1


def _name(prefix: str) -> str:
    return f".began-{prefix}.json"
