"""Marker files that separate a new run from the checkpoints of an earlier run in the same directory."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from trainstack.checkpointing.filesystem import atomic_write


def mark(directory: Path, prefix: str, sequence: int) -> None:
    """Remember that what has a sequence number up to `sequence` belongs to an earlier run."""
    atomic_write(directory / _name(prefix), json.dumps({"after_sequence": sequence}).encode())


def read(directory: Path, prefix: str, unreadable: int = -1) -> int:
    """The last sequence number of an earlier run: -1 if none was marked, `unreadable` if the mark cannot be read."""
    try:
        return _sequence_in(directory / _name(prefix))
    except FileNotFoundError:
        return -1
    except (OSError, ValueError, KeyError, TypeError):
        return unreadable


def highest(directory: Path) -> int:
    """The highest sequence number that a mark in `directory` names, whatever its prefix: -1 if none can be read."""
    found = [-1]
    for file in directory.glob(_name("*")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            found.append(_sequence_in(file))
    return max(found)


def _sequence_in(file: Path) -> int:
    return int(json.loads(file.read_bytes())["after_sequence"])


def _name(prefix: str) -> str:
    return f".began-{prefix}.json"
