"""`trainstack checkpoints ls | verify | scrub | show | diff` lists, verifies and compares checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainstack._files import is_address, remote_address
from trainstack.checkpointing.directory import (
    CheckpointInfo,
    is_checkpoint_directory,
    name_odd_entries,
    printable,
    read_manifest,
    scan,
)
from trainstack.checkpointing.manifest import decode_plain
from trainstack.checkpointing.verification import read_back, verify_checkpoint
from trainstack.cli.printing import (
    FAILED,
    TROUBLE,
    print_error,
    print_json,
    print_line,
    print_table,
    readable_date,
    readable_size,
)
from trainstack.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError

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
    ls.add_argument("directory", metavar="DIR", help="of checkpoints, or the output_dir of a run, also its address")
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
    show = _action(actions, "show", _show, "show what one checkpoint or export holds")
    show.add_argument("path", metavar="PATH", help="a checkpoint, an export, or a file `last` or `best`")
    diff = _action(actions, "diff", _diff, "compare two; exit code 0 if all bits agree, 1 if not, 2 on trouble")
    diff.add_argument("one", metavar="A", help="a checkpoint, an export, or a file `last` or `best`")
    diff.add_argument("other", metavar="B", help="likewise")
    diff.add_argument("--model", action="store_true", help="compare the weights alone")


def _action(actions: Any, name: str, run: Any, about: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=about, description=about)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    return parser


def _show(args: argparse.Namespace) -> int:
    from trainstack.cli.checkpoint_contents import show_checkpoint  # it imports torch, which the others do without

    return show_checkpoint(args)


def _diff(args: argparse.Namespace) -> int:
    from trainstack.cli.checkpoint_contents import diff_checkpoints

    return diff_checkpoints(args)


def _ls(args: argparse.Namespace) -> int:
    with ExitStack() as stack:
        return _print_list(args, _outlined(args.directory, args.verify, stack))


def _outlined(given: str, verify: bool, stack: ExitStack) -> Path:
    """The folder `given`; of an address a local folder with what is there, whole or as an outline."""
    if not is_address(given):
        return Path(given)
    from trainstack.checkpointing.remote.fetching import download_all, outline

    address = remote_address("DIR", given)
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="trainstack-"))) / address.rpartition("/")[2]
    download_all(address, folder) if verify else outline(address, folder)
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"there are no checkpoints at {address}. Give the address of a run.")
    return folder


def _print_list(args: argparse.Namespace, root: Path) -> int:
    if is_checkpoint_directory(root):
        raise CheckpointNotFoundError(
            f"{args.directory} is one checkpoint. Give the folder it lies in, or write show {args.directory}."
        )
    within = root / "checkpoints"  # where those of a run's output_dir lie
    entries = _entries(root, args.verify) or (_entries(within, args.verify) if within.is_dir() else [])
    if args.json:
        print_json({"checkpoints": entries})
    elif entries:
        print_table(_COLUMNS, [_row(entry) for entry in entries], spare=() if args.wide else _SPARE)
    else:
        print_line(f"no checkpoints in {args.directory}")
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
    metadata = decode_plain(content.metadata) or {}
    return {
        "name": info.path.name,
        "kind": info.kind,
        "step": info.global_step,
        "epoch": metadata.get("epoch"),
        "created": readable_date(info.created),
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


def _verify(args: argparse.Namespace) -> int:
    code, results = 0, []
    for path in [inner for given in args.paths for inner in _checkpoints_at(given)]:
        problem = None
        try:
            _verify_one(path)
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


def _verify_one(path: Path | str) -> None:
    """Verify a local checkpoint, or download the one at an address, which verifies it."""
    if isinstance(path, Path):
        verify_checkpoint(path)
        return
    from trainstack.checkpointing.remote.fetching import fetch

    with TemporaryDirectory(prefix="trainstack-") as folder:
        fetch(path, Path(folder))


def _checkpoints_at(given: str) -> Sequence[Path | str]:
    """`given` itself, or all that lie in it, those included whose manifest cannot be read."""
    if is_address(given):
        from trainstack.checkpointing.remote.fetching import entries_at

        address = remote_address("PATH", given)
        return entries_at(address) or [address]
    path = Path(given)
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
