"""Copies of the checkout: a snapshot of the source, and one tree in which changes are made for each job."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.mutants.changes import Change

_NOT_COPIED = shutil.ignore_patterns(".*", "build", "dist", "runs", "site", "__pycache__", "*.egg-info")


def take_snapshot(root: Path, snapshot: Path) -> bool:
    """Copy the checkout; a snapshot that exists keeps its `src`, so that earlier results remain valid.

    Returns:
        Whether `src` of the checkout differs from the snapshot.
    """
    kept = snapshot / "src"
    for entry in sorted(root.iterdir()):
        if entry.name in _NOT_COPIED(str(root), [entry.name]) or (entry.name == "src" and kept.is_dir()):
            continue
        target = snapshot / entry.name
        if entry.is_dir():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(entry, target, ignore=_NOT_COPIED)
        else:
            snapshot.mkdir(parents=True, exist_ok=True)
            shutil.copy2(entry, target)
    return files_in(root, "src") != files_in(snapshot, "src")


def files_in(root: Path, folder: str) -> dict[str, bytes]:
    """The Python files of a folder, by their paths relative to `root`."""
    paths = sorted((root / folder).rglob("*.py"))
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def make_tree(snapshot: Path, tree: Path) -> None:
    """Copy the snapshot to a tree for one job."""
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(snapshot, tree, ignore=_NOT_COPIED)


@contextmanager
def changed(tree: Path, change: Change, number: int) -> Iterator[None]:
    """Make a change in the tree, and restore the file at the end.

    Args:
        number: positive, another one for each change of the tree. Python compares size and time of a source with its
            cached bytecode; times in whole seconds of two changes could be equal.
    """
    path = tree / change.path
    before, times = path.read_bytes(), path.stat()
    path.write_bytes(change.apply(before))
    os.utime(path, (times.st_atime, times.st_mtime + number))
    try:
        yield
    finally:
        path.write_bytes(before)
        os.utime(path, (times.st_atime, times.st_mtime))
