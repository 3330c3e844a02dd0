"""`resumes.jsonl` in the folder of a run: one line for each resume, with the table of changes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from trainstack._files import file_mode, read_small
from trainstack.trainer.core.changes import Change
from trainstack.trainer.core.effects import Effect

FILE_NAME = "resumes.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A resume and the changes before it.

    Attributes:
        global_step: of the checkpoint.
        time: UTC, ISO 8601.
        changes: since the checkpoint was written; without remedies.
    """

    global_step: int
    time: str
    changes: tuple[Change, ...]


def append_resume(folder: Path, global_step: int, changes: Iterable[Change]) -> None:
    """Add a line to the file in `folder`."""
    rows = [{"name": c.name, "saved": c.saved, "given": c.given, "effect": c.effect.value} for c in changes]
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    line = json.dumps({"global_step": global_step, "time": now, "changes": rows})
    path = folder / FILE_NAME
    with open(path, "ab", opener=lambda name, flags: os.open(name, flags, file_mode(name))) as file:
        torn = file.tell() and _last_byte(path) != b"\n"
        file.write((b"\n" if torn else b"") + line.encode() + b"\n")


def _last_byte(path: Path) -> bytes:
    with open(path, "rb") as file:
        file.seek(-1, 2)
        return file.read(1)


def read_resumes(folder: Path) -> Sequence[Resume]:
    """The resumes of the run in `folder`, oldest first; none without the file. Lines that a kill has cut are left out.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        lines = read_small(folder / FILE_NAME).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    found = list[Resume]()
    for line in lines:
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            found.append(_parse(json.loads(line)))
    return found


def _parse(entry: dict[str, Any]) -> Resume:
    changes = tuple(
        Change(name=str(row["name"]), saved=str(row["saved"]), given=str(row["given"]), effect=Effect(row["effect"]))
        for row in entry["changes"]
    )
    return Resume(global_step=int(entry["global_step"]), time=str(entry["time"]), changes=changes)
