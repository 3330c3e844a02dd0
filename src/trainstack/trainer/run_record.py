"""`RunRecord`: the file that a run writes into its folder when it starts."""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from trainstack._files import atomic_write, read_small
from trainstack.checkpointing.checksums import digest
from trainstack.checkpointing.field_types import build

FILE_NAME = "run-record.json"
_FORMAT = "trainstack-run-record"
_SELF_HASH = "record_xxh3_128"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The identity of a run. The file contains its own hash, so a damaged file is not used.

    Attributes:
        script: file that Python was started with, relative to the current folder at the start, or the notebook; in a
            session without a file name, a unique name.
        module: file and name of the module's class.
        words: hash of the words after the script, except `--resume` and `--overwrite`.
        number: number of runs of the same script and module that this process had finished before.
        order: larger than in all earlier runs of the same folder; the largest is the newest, independent of the clock.
        began: time of the start, UTC, ISO 8601.
        finished: whether the run is complete.
        earlier_records: number of records in the history before the run began; its logs omit them.
        folder: name of the folder of the run; a record in a folder with another name is a copy.
        run_id: id of the run in its checkpoints and exports.
        saved: whether a checkpoint was saved, so that the run does not restart if none is found.
    """

    script: str
    module: str
    words: str = ""
    number: int = 0
    order: int = 0
    began: str = ""
    finished: bool = False
    earlier_records: int = 0
    folder: str = ""
    run_id: str = ""
    saved: bool = False

    @property
    def made_by(self) -> tuple[str, str, str]:
        """The script, the module and the words of the command."""
        return self.script, self.module, self.words

    @property
    def identity(self) -> tuple[str, str, int]:
        """Values that are equal for two starts of the same run."""
        return self.script, self.module, self.number

    def write(self, folder: Path) -> None:
        """Write the record into `folder`, and flush it to the disk."""
        body = {"format": _FORMAT, **asdict(self)}
        atomic_write(folder / FILE_NAME, _dump({**body, _SELF_HASH: digest(_dump(body))}), durable=True)


def read_record(folder: Path) -> RunRecord | None:
    """Read the record in `folder`; None if there is none or it is damaged."""
    try:
        body: dict[str, Any] = json.loads(read_small(folder / FILE_NAME))
        signature = body.pop(_SELF_HASH)
        if signature != digest(_dump(body)) or body.pop("format") != _FORMAT:
            return None
        return build(RunRecord, body)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def describe_run(module: object, root: Path) -> RunRecord:
    """Return the record of a run of `module` that this process starts; paths are relative to `root` if possible."""
    cls = type(module)
    source = getattr(sys.modules.get(cls.__module__), "__file__", None)
    where = "" if source is None else _relative(source, root)
    began = datetime.now(timezone.utc).isoformat(timespec="seconds")
    name = f"{where}:{cls.__qualname__}"
    return RunRecord(script=_script(root), module=name, words=_words(sys.argv[1:]), began=began)


_SESSION = os.environ.setdefault("_TRAINSTACK_SESSION", uuid.uuid4().hex)
"""Identifies a session without a script or a notebook, and the processes that it starts."""


def _script(root: Path) -> str:
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if file is None:
        notebook = getattr(main, "__vsc_ipynb_file__", None) or os.environ.get("JPY_SESSION_NAME")
        return f"session {_SESSION}" if notebook is None else _relative(notebook, root)
    path = Path(file)
    own = path.stem == "trainstack" or (path.name == "__main__.py" and path.parent.name == "trainstack")
    return "trainstack" if own else _relative(file, root)  # the command is started by one of two files


_VALUES = ("auto", "true", "false", "yes", "no", "1", "0")
"""Values that may follow `--resume` and `--overwrite`. Any other word may be an argument of the script."""


def _words(words: Sequence[str]) -> str:
    kept, may_be_value = list[str](), False
    for word in words:
        is_option = word.partition("=")[0].lstrip("-").replace("_", "-") in ("resume", "overwrite")
        if not is_option and not (may_be_value and word.lower() in _VALUES):
            kept.append(word)
        may_be_value = is_option and "=" not in word
    return digest(json.dumps(kept).encode())


def _relative(path: str, root: Path) -> str:
    """Return `path` relative to `root`, so that runs are found after the whole project was moved."""
    full = os.path.realpath(path)
    with suppress(ValueError):  # on another drive
        full = os.path.relpath(full, os.path.realpath(root))
    return full.replace(os.sep, "/")


def _dump(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=1) + "\n").encode()
