"""`RunRecord`, the file that a run writes into its folder when it begins."""

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
    """The identity of a run. The file has its own hash, so a damaged one is not used.

    Attributes:
        script: the file that Python was started with, relative to the folder where it was started, or the notebook;
            unique in a session without a name.
        module: file and name of the module's class.
        words: a hash of the words after the script, except `--resume` and `--overwrite`.
        number: how many runs of the same script and module this process had finished before.
        order: higher than in all earlier runs of the same folder; the highest is the newest, whatever the clock says.
        began: UTC, ISO 8601.
        finished: whether the training came to its end.
        earlier_records: how many records the history had before the run began; its logs leave them out.
        folder: the name of the folder of the run; a record in a folder of another name is a copy.
        run_id: of its checkpoints and exports.
        saved: whether a checkpoint was saved, so that the run does not begin again where none is found.
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
        """Equal for two starts of the same run."""
        return self.script, self.module, self.number

    def write(self, folder: Path) -> None:
        """Write the record into `folder`, durably."""
        body = {"format": _FORMAT, **asdict(self)}
        atomic_write(folder / FILE_NAME, _dump({**body, _SELF_HASH: digest(_dump(body))}), durable=True)


def read_record(folder: Path) -> RunRecord | None:
    """The record in `folder`; None without one, and for one that is damaged."""
    try:
        body: dict[str, Any] = json.loads(read_small(folder / FILE_NAME))
        signature = body.pop(_SELF_HASH)
        if signature != digest(_dump(body)) or body.pop("format") != _FORMAT:
            return None
        return build(RunRecord, body)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def describe_run(module: object, root: Path, number: int) -> RunRecord:
    """The record of a run of `module` that this process begins; paths are relative to `root` where they can be."""
    cls = type(module)
    source = getattr(sys.modules.get(cls.__module__), "__file__", None)
    where = "" if source is None else _relative(source, root)
    began = datetime.now(timezone.utc).isoformat(timespec="seconds")
    name = f"{where}:{cls.__qualname__}"
    return RunRecord(script=_script(root), module=name, words=_words(sys.argv[1:]), number=number, began=began)


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
    return "trainstack" if own else _relative(file, root)  # the command has two files


_VALUES = ("auto", "true", "false", "yes", "no", "1", "0")
"""Words behind `--resume` and `--overwrite` that belong to them. Any other word may be an argument of the script."""


def _words(words: Sequence[str]) -> str:
    kept, may_be_value = list[str](), False
    for word in words:
        is_option = word.partition("=")[0].lstrip("-").replace("_", "-") in ("resume", "overwrite")
        if not is_option and not (may_be_value and word.lower() in _VALUES):
            kept.append(word)
        may_be_value = is_option and "=" not in word
    return digest(json.dumps(kept).encode())


def _relative(path: str, root: Path) -> str:
    """`path` from `root`, so that a project that is moved as a whole finds its runs again."""
    full = os.path.realpath(path)
    with suppress(ValueError):  # another drive
        full = os.path.relpath(full, os.path.realpath(root))
    return full.replace(os.sep, "/")


def _dump(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=1) + "\n").encode()
