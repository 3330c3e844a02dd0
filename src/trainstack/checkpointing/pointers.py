"""The files `last` and `best` beside the checkpoints: for people to read, and to name in `resume`.

A pointer is never believed. What it gives is the rule (which prefix, which metric); the checkpoint is found anew from
the manifests, so that a pointer that is stale, torn or missing misleads nobody.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainstack.checkpointing import filesystem, smallfile
from trainstack.checkpointing.arguments import DefaultCheckpointerArguments
from trainstack.checkpointing.directory import CheckpointInfo
from trainstack.checkpointing.monitoring import Monitor

LAST = "last"
BEST = "best"
_FORMAT = "trainstack-pointer"
_LIMIT_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Which checkpoint is meant: the newest with this prefix, or the best if there is a monitor."""

    file_prefix: str
    monitor: Monitor | None


def refresh(
    directory: Path,
    args: DefaultCheckpointerArguments,
    last: CheckpointInfo | None,
    best: CheckpointInfo | None,
    say: Callable[[int, str], None],
) -> None:
    """Make both pointers name these checkpoints; one that would name none is removed. A failure is said."""
    for kind, info in ((LAST, last), (BEST, best)):
        path = directory / _name(kind, args.file_prefix)
        try:
            _set(path, None if info is None else _render(kind, info, args), say)
        except OSError as error:
            say(logging.WARNING, f"the pointer {path} could not be written: {error}")


def rule_at(path: Path, args: DefaultCheckpointerArguments) -> Rule | None:
    """The rule of the pointer at `path`; None if `path` is none. A torn or missing one has the rule of `args`."""
    if path.is_dir():
        return None
    rule = rule_in(path)
    kinds = {_name(LAST, args.file_prefix): None, _name(BEST, args.file_prefix): args.monitored}
    if rule is None and path.name in kinds and path.parent.is_dir():
        return Rule(file_prefix=args.file_prefix, monitor=kinds[path.name])
    return rule


def rule_in(path: Path) -> Rule | None:
    """The rule that is written in the file `path`; None if it is no pointer, or cannot be read."""
    try:
        return _parse(_beginning(path))
    except OSError:
        return None


def _name(kind: str, prefix: str) -> str:
    """Plain for the usual prefix; other prefixes in the same directory have pointers of their own."""
    return kind if prefix == DefaultCheckpointerArguments().file_prefix else f"{prefix}-{kind}"


def _set(path: Path, data: bytes | None, say: Callable[[int, str], None]) -> None:
    now = _beginning(path) if path.is_file() else None
    if (now is None and os.path.lexists(path)) or (now and now.strip(b"\0") and _FORMAT.encode() not in now):
        say(logging.DEBUG, f"{path} is not a pointer of trainstack, so it is left alone.")
    elif data is not None and now != data:
        smallfile.replace(path, data)
    elif data is None and now is not None:
        filesystem.remove_file(path)


def _beginning(path: Path) -> bytes:
    """The content of a pointer; of a file that is none, and may be large, only so much."""
    with path.open("rb") as file:
        return file.read(_LIMIT_BYTES)


def _render(kind: str, info: CheckpointInfo, args: DefaultCheckpointerArguments) -> bytes:
    body: dict[str, Any] = {
        "format": _FORMAT,
        "file_prefix": args.file_prefix,
        "checkpoint": info.path.name,
        "global_step": info.global_step,
    }
    if kind == BEST:
        monitor = args.monitored
        body |= {"monitor": monitor.name, "mode": monitor.mode, "value": monitor.value_of(info)}
    return (json.dumps(body, indent=1) + "\n").encode()


def _parse(data: bytes) -> Rule | None:
    try:
        body = json.loads(data)
        if body["format"] != _FORMAT or not isinstance(body["file_prefix"], str):
            return None
        wanted = body.get("monitor")
        if wanted is None:
            return Rule(file_prefix=body["file_prefix"], monitor=None)
        if not isinstance(wanted, str) or body["mode"] not in ("min", "max"):
            return None
        return Rule(file_prefix=body["file_prefix"], monitor=Monitor(name=wanted, mode=body["mode"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
