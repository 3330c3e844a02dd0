"""`trainstack checkpoints ls | verify | show | diff`: what lies in a folder of checkpoints, and is it as written?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trainstack.checkpointing import verify_checkpoint
from trainstack.checkpointing.decoding import StateDecoder
from trainstack.checkpointing.directory import CheckpointInfo, is_checkpoint_directory, read_manifest, scan
from trainstack.cli import difference, outline
from trainstack.cli.main import TROUBLE, complain
from trainstack.cli.printing import print_json, print_line, print_table, readable_size
from trainstack.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError

_COLUMNS = ("name", "kind", "step", "epoch", "created", "size", "backend", "metrics", "intact")
_MOST_METRICS = 3


def add(subparsers: Any) -> None:
    """Add the command and its four actions."""
    about = "list, verify, show and compare checkpoints and model exports"
    actions = subparsers.add_parser("checkpoints", help=about, description=about).add_subparsers(
        title="actions", metavar="ACTION", required=True
    )
    ls = _action(actions, "ls", _ls, "list the checkpoints and exports in a folder, oldest first")
    ls.add_argument("directory", metavar="DIR")
    ls.add_argument("--verify", action="store_true", help="read all bytes instead of comparing sizes")
    verify = _action(actions, "verify", _verify, "compare every byte with the manifest; exit code 1 if damaged")
    verify.add_argument(
        "paths", metavar="PATH", nargs="+", help="a checkpoint, an export, a folder of them, or a run's"
    )
    show = _action(actions, "show", outline.show, "show what one checkpoint or export holds")
    show.add_argument("path", metavar="PATH")
    diff = _action(
        actions, "diff", difference.diff, "compare two; exit code 0 if all bits agree, 1 if not, 2 on trouble"
    )
    diff.add_argument("one", metavar="A")
    diff.add_argument("other", metavar="B")
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
        print_json(entries)
    elif entries:
        print_table(_COLUMNS, [_row(entry) for entry in entries])
    else:
        print_line(f"no checkpoints in {root}")
    return 0


def _entries(root: Path, verify: bool) -> list[dict[str, Any]]:
    if not root.is_dir():
        raise CheckpointNotFoundError(f"{root} is not a directory. Give the directory that holds checkpoints.")
    contents = scan(root)
    entries = [_entry(info, verify) for info in reversed(contents.intact)]
    problems: dict[Path, CheckpointError] = {**contents.broken, **contents.newer}
    return entries + [{"name": path.name, "problem": str(error)} for path, error in problems.items()]


def _entry(info: CheckpointInfo, verify: bool) -> dict[str, Any]:
    content = read_manifest(info.path)
    metadata = StateDecoder({}).decode(content.metadata) or {}
    return {
        "name": info.path.name,
        "kind": info.kind,
        "step": info.global_step,
        "epoch": metadata.get("epoch"),
        "created": info.created,
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
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in ordered[:_MOST_METRICS])
    known = [entry[name] for name in ("step", "epoch")]
    numbers = ["-" if number is None else str(number) for number in known]
    size, backend = readable_size(entry["size"]), entry["backend"] or "-"
    return [entry["name"], entry["kind"], *numbers, entry["created"], size, backend, metrics or "-", intact]


def _verify(args: argparse.Namespace) -> int:
    code, results = 0, []
    for path in [inner for given in args.paths for inner in _checkpoints_at(Path(given))]:
        try:
            verify_checkpoint(path)
            results.append({"path": str(path), "problem": None})
        except CheckpointDamagedError as error:
            code = max(code, 1)
            results.append({"path": str(path), "problem": str(error)})
        except CheckpointError as error:
            code = TROUBLE
            complain(str(error))
            results.append({"path": str(path), "problem": str(error)})
    if args.json:
        print_json(results)
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
    return found or [path]
