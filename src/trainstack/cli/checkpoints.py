"""`trainstack checkpoints ls | verify | scrub | show | diff` lists, verifies and compares checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainstack.checkpointing import verify_checkpoint
from trainstack.checkpointing.decoding import StateDecoder
from trainstack.checkpointing.difference import children, describe, differences
from trainstack.checkpointing.directory import (
    CheckpointInfo,
    is_checkpoint_directory,
    name_odd_entries,
    printable,
    read_manifest,
    scan,
)
from trainstack.checkpointing.lookup import resolve_pointer
from trainstack.checkpointing.manifest import Manifest
from trainstack.checkpointing.reading import read_states
from trainstack.checkpointing.retention import read_back
from trainstack.cli.printing import FAILED, TROUBLE, print_error, print_json, print_line, print_table, readable_size
from trainstack.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError


def diff_checkpoints(args: argparse.Namespace) -> int:
    """Compare two checkpoints; 0 if all bits agree, else 1."""
    (one, states), (other, other_states) = (
        read_states(resolve_pointer(Path(args.one))),
        read_states(resolve_pointer(Path(args.other))),
    )
    model_only = args.model or one.kind == "model" or other.kind == "model"
    if model_only:  # the module's state comes first in both kinds
        found = list(differences(next(iter(states.values())), next(iter(other_states.values())), "model"))
    else:
        found = list(differences({**states, **_facts(one)}, {**other_states, **_facts(other)}))
    if args.json:
        rows = [asdict(row) for row in found]
        print_json({"same": not found, "compared": "model" if model_only else "all", "differences": rows})
    else:
        for row in found:
            print_line(str(row))
        what = "the weights" if model_only else "all states, plans and versions"
        print_line(f"{len(found)} differences in {what}" if found else f"{what} agree in every bit")
    return FAILED if found else 0


def _facts(content: Manifest) -> dict[str, Any]:
    plan, metadata = (StateDecoder({}).decode(tree) for tree in (content.plan, content.metadata))
    return {"plan": plan, "metadata": metadata, "versions": content.versions}


def show_checkpoint(args: argparse.Namespace) -> int:
    """Print the manifest and an outline of the states. Tensors are not read."""
    content, states = read_states(resolve_pointer(Path(args.path)), tensors=False)
    facts = _outline_facts(content)
    if args.json:
        print_json({**facts, "states": {name: _as_json(state) for name, state in states.items()}})
        return 0
    for name, value in facts.items():
        if isinstance(value, Mapping):
            print_line(name)
            for key, item in value.items():
                shown = f"{readable_size(item['size']):>9}  {content.hash} {item['hash']}" if name == "files" else item
                print_line(f"  {key:<22} {shown}")
        else:
            print_line(f"{name:<24} {value}")
    for name, state in states.items():
        print_line()
        print_line(f"{name}: {summary(state)}")
        for line in lines(state, 1):
            print_line(line)
    return 0


def _outline_facts(content: Manifest) -> dict[str, Any]:
    plan, metadata = (StateDecoder({}).decode(tree) or {} for tree in (content.plan, content.metadata))
    processes = {"processes": plan["world_size"]} if "world_size" in plan else {}
    return {
        "name": content.name,
        "kind": content.kind,
        "created": _date(content.created),
        "global step": content.global_step,
        **{key: value for key, value in metadata.items() if not isinstance(value, Mapping)},
        **processes,
        **{key: value for key, value in metadata.items() if isinstance(value, Mapping) and value},
        "plan": plan,
        "versions": content.versions,
        "files": {name: asdict(record) for name, record in content.files.items()},
    }


def summary(state: Any) -> str:
    """How many tensors a state holds and what they take."""
    if state is None:
        return "nothing"
    tensors = list(_tensors(state))
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return f"{len(tensors)} tensors, {sum(t.numel() for t in tensors):,} elements, {readable_size(size)}"


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    else:
        for _, value in children(state) or ():
            yield from _tensors(value)


def lines(value: Any, depth: int) -> Iterator[str]:
    """One line for each leaf of a state; lists of numbers and long lists are summed up."""
    for key, item in children(value) or ():
        name = f"{'  ' * depth}{key if isinstance(key, str) else f'[{key}]'}"
        inner = children(item) or []
        is_long = len(inner) > 8 and not isinstance(item, Mapping)
        if not inner or (is_long and not any(children(leaf) or isinstance(leaf, torch.Tensor) for _, leaf in inner)):
            yield f"{name:<40} {describe(item)}"
            continue
        yield name
        shown = [first for _, first in inner[:2]] if is_long else item
        yield from lines(shown, depth + 1)
        if len(shown) < len(inner):
            yield f"{'  ' * (depth + 1)}... and {len(inner) - len(shown)} more"


def _as_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    inner = children(value)
    if inner is None:
        return value
    if isinstance(value, Mapping):
        return {key: _as_json(item) for key, item in inner}
    return [_as_json(item) for _, item in inner]


_COLUMNS = ("name", "kind", "step", "epoch", "created", "size", "backend", "metrics", "intact")
_SPARE = ("metrics", "backend", "created", "size", "epoch", "kind")
"""What a narrow terminal does not show; the first of them first."""


def add(subparsers: Any) -> None:
    """Add the command and its five actions."""
    about = "list, verify, show and compare checkpoints and model exports"
    actions = subparsers.add_parser("checkpoints", help=about, description=about).add_subparsers(
        title="actions", metavar="ACTION", required=True
    )
    ls = _action(actions, "ls", _ls, "list the checkpoints and exports in a folder, oldest first")
    ls.add_argument("directory", metavar="DIR", help="of checkpoints, or the output_dir of a run")
    ls.add_argument("--wide", action="store_true", help="print all columns, whatever the width of the terminal")
    ls.add_argument("--verify", action="store_true", help="read all bytes instead of comparing sizes")
    verify = _action(actions, "verify", _verify, "compare every byte with the manifest; exit code 1 if damaged")
    verify.add_argument(
        "paths", metavar="PATH", nargs="+", help="a checkpoint, an export, a folder of them, or a run's"
    )
    scrub = _action(
        actions, "scrub", _scrub, "read every byte of all that lies in folders, from the disk; exit code 1 if damaged"
    )
    scrub.add_argument("paths", metavar="DIR", nargs="+", help="a folder of checkpoints, or a run's")
    show = _action(actions, "show", show_checkpoint, "show what one checkpoint or export holds")
    show.add_argument("path", metavar="PATH", help="a checkpoint, an export, or a file `last` or `best`")
    diff = _action(
        actions, "diff", diff_checkpoints, "compare two; exit code 0 if all bits agree, 1 if not, 2 on trouble"
    )
    diff.add_argument("one", metavar="A", help="a checkpoint, an export, or a file `last` or `best`")
    diff.add_argument("other", metavar="B", help="likewise")
    diff.add_argument("--model", action="store_true", help="compare the weights alone")


def _action(actions: Any, name: str, run: Any, about: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=about, description=about)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    return parser


def _ls(args: argparse.Namespace) -> int:
    root = Path(args.directory)
    if is_checkpoint_directory(root):
        raise CheckpointNotFoundError(f"{root} is one checkpoint. Give the folder it lies in, or write show {root}.")
    within = root / "checkpoints"  # where those of a run's output_dir lie
    entries = _entries(root, args.verify) or (_entries(within, args.verify) if within.is_dir() else [])
    if args.json:
        print_json({"checkpoints": entries})
    elif entries:
        print_table(_COLUMNS, [_row(entry) for entry in entries], spare=() if args.wide else _SPARE)
    else:
        print_line(f"no checkpoints in {root}")
    return 0


def _entries(root: Path, verify: bool) -> list[dict[str, Any]]:
    if not root.is_dir():
        raise CheckpointNotFoundError(f"{root} is not a directory. Give the directory that holds checkpoints.")
    contents = scan(root)
    entries = [_entry(info, verify) for info in reversed(contents.intact)]
    problems: dict[Path, CheckpointError | str] = {**contents.broken, **contents.broken_begins, **contents.newer}
    problems |= contents.odd
    return entries + [{"name": printable(path).rpartition("/")[2], "problem": str(p)} for path, p in problems.items()]


def _entry(info: CheckpointInfo, verify: bool) -> dict[str, Any]:
    content = read_manifest(info.path)
    metadata = StateDecoder({}).decode(content.metadata) or {}
    return {
        "name": info.path.name,
        "kind": info.kind,
        "step": info.global_step,
        "epoch": metadata.get("epoch"),
        "created": _date(info.created),
        "size": info.size,
        "backend": metadata.get("backend"),
        "metrics": metadata.get("metrics") or {},
        "problem": _problem(info, verify),
        "verified": verify,
    }


def _problem(info: CheckpointInfo, verify: bool) -> str | None:
    """What is wrong with the files, by their bytes or only by their sizes; None if nothing is."""
    try:
        if verify:
            verify_checkpoint(info.path)
            return None
        for file, record in read_manifest(info.path).files.items():
            if not (info.path / file).is_file() or (info.path / file).stat().st_size != record.size:
                return f"{file} is missing or has another size"
    except CheckpointError as error:
        return str(error)
    return None


def _row(entry: dict[str, Any]) -> list[str]:
    problem = entry["problem"]
    intact = ("yes" if entry.get("verified") else "sizes agree") if problem is None else f"NO: {problem}"
    if "kind" not in entry:
        return [entry["name"], *["-"] * (len(_COLUMNS) - 2), intact]
    ordered = sorted(entry["metrics"].items(), key=lambda item: not item[0].startswith("val"))
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in ordered[:3])
    numbers = ["-" if number is None else str(number) for number in (entry["step"], entry["epoch"])]
    size, backend = readable_size(entry["size"]), entry["backend"] or "-"
    created = entry["created"] or "no date"
    return [entry["name"], entry["kind"], *numbers, created, size, backend, metrics or "-", intact]


def _date(text: str) -> str | None:
    """A time of a manifest in UTC to the second; None if it is none."""
    try:
        return datetime.fromisoformat(text).astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, TypeError, OverflowError):
        return None


def _verify(args: argparse.Namespace) -> int:
    code, results = 0, []
    for path in [inner for given in args.paths for inner in _checkpoints_at(Path(given))]:
        problem = None
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            problem = str(error)
            if isinstance(error, CheckpointDamagedError):
                code = max(code, FAILED)
            else:
                code = TROUBLE
                print_error(problem, error, args.json)
        results.append({"path": str(path), "problem": problem})
    if args.json:
        print_json({"checkpoints": results})
    else:
        for result in results:
            print_line(f"{result['path']}: {'intact' if result['problem'] is None else result['problem']}")
    return code


def _checkpoints_at(path: Path) -> list[Path]:
    """`path` itself, or all that lie in it, those included whose manifest cannot be read."""
    if not path.is_dir() or is_checkpoint_directory(path):
        return [path]
    found: list[Path] = []
    for folder in (path, path / "checkpoints"):  # where those of a run's output_dir lie
        contents = scan(folder)
        found += [*(info.path for info in contents.intact[::-1]), *contents.broken, *contents.newer]
        name_odd_entries(contents, lambda _, message: print_error(message))
    return found or [path]


def _scrub(args: argparse.Namespace) -> int:
    code, results = 0, []
    for folder in [inner for given in args.paths for inner in _folders_at(Path(given))]:
        contents = scan(folder)
        unread = {**contents.broken, **contents.broken_begins, **contents.newer, **contents.odd}
        found: dict[Path, str | None] = {path: str(problem) for path, problem in unread.items()}
        for info in (*contents.begun[::-1], *contents.intact[::-1]):
            found[info.path] = read_back(info.path)
        code |= any(problem is not None and path not in contents.odd for path, problem in found.items())
        results += [{"path": printable(path), "problem": problem} for path, problem in sorted(found.items())]
    if args.json:
        print_json({"entries": results})
        return code
    for result in results:
        print_line(f"{result['path']}: {result['problem'] or 'intact'}")
    damaged = sum(result["problem"] is not None for result in results)
    print_line(f"{len(results)} entries, {damaged} with a problem")
    return code


def _folders_at(path: Path) -> list[Path]:
    if not path.is_dir() or is_checkpoint_directory(path):
        raise CheckpointNotFoundError(f"{path} is not a folder of checkpoints. Give that folder, or one of a run.")
    return [folder for folder in (path, path / "checkpoints") if folder.is_dir()]
