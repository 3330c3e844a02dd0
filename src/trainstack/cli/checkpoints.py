"""`trainstack checkpoints ls | verify | show | ...` lists and verifies checkpoints; other modules have the rest."""

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
from trainstack.checkpointing.integrity.signing import Signature, claimed_signer, verify_signature
from trainstack.checkpointing.manifest import decode_plain
from trainstack.checkpointing.verification import verify_checkpoint
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
from trainstack.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError, SignatureError

_COLUMNS = ("name", "kind", "step", "epoch", "created", "size", "backend", "metrics", "intact")
_SPARE = ("metrics", "backend", "created", "size", "epoch", "kind")
"""Columns that a narrow terminal omits, in this order."""


def add(subparsers: Any) -> None:
    """Add the command and its actions."""
    about = "list, verify, show, compare, export and sign checkpoints and model exports"
    actions = subparsers.add_parser("checkpoints", help=about, description=about).add_subparsers(
        title="actions", metavar="ACTION", required=True
    )
    ls = _action(actions, "ls", _ls, "list the checkpoints and exports in a folder, oldest first")
    ls.add_argument("directory", metavar="DIR", help="of checkpoints, or the output_dir of a run, also its address")
    ls.add_argument("--wide", action="store_true", help="print all columns at any width of the terminal")
    ls.add_argument("--verify", action="store_true", help="read all bytes instead of comparing sizes")
    verify = _action(actions, "verify", _verify, "compare every byte with the manifest; exit code 1 if damaged")
    verify.add_argument(
        "paths", metavar="PATH", nargs="+", help="a checkpoint, an export, a folder of them, or a run's"
    )
    verify.add_argument("--signature", metavar="KEY.pub", help="verify the signatures by this public key as well")
    _add_proofs(actions)
    show = _action(actions, "show", _show, "show the content of one checkpoint or export")
    show.add_argument("path", metavar="PATH", help="a checkpoint, an export, or a file `last` or `best`")
    diff = _action(actions, "diff", _diff, "compare two; exit code 0 if all bits agree, 1 if not, 2 on trouble")
    diff.add_argument("one", metavar="A", help="a checkpoint, an export, or a file `last` or `best`")
    diff.add_argument("other", metavar="B", help="likewise")
    diff.add_argument("--model", action="store_true", help="compare the weights alone")
    export = _action(actions, "export", _export, "write the weights of a checkpoint or an export as a new folder")
    export.add_argument("path", metavar="PATH", help="a checkpoint, an export, or a file `last` or `best`")
    export.add_argument("target", metavar="TARGET", help="the folder to make")
    export.add_argument("--part", default="", help="of the module, such as 'model': its weights under their own names")
    export.add_argument("--max-shard-size", metavar="SIZE", help="such as 5GB: write larger weights into several files")
    export.add_argument("--overwrite", action="store_true", help="replace an export of other weights at TARGET")
    export.add_argument("--dcp", action="store_true", help="write the format of torch.distributed.checkpoint")


def _add_proofs(actions: Any) -> None:
    scrub = _action(
        actions, "scrub", _scrub, "read every byte of the entries of folders from the disk; exit code 1 if damaged"
    )
    scrub.add_argument("paths", metavar="DIR", nargs="+", help="a folder of checkpoints, or a run's")
    scrub.add_argument("--every", metavar="TIME", help="such as 6h: again and again, until SIGTERM or SIGINT")
    scrub.add_argument(
        "--rate", metavar="SIZE", help="such as 50MB: read so much a second; with --every 100MB, else without a limit"
    )
    lineage = _action(actions, "lineage", _lineage, "print where a checkpoint comes from: its parent, and so on")
    lineage.add_argument("path", metavar="PATH", help="a checkpoint, an export, or a file `last` or `best`")
    lineage.add_argument(
        "--search", metavar="DIR", action="append", default=[], help="look for ancestors in this folder of runs too"
    )
    keygen = _action(actions, "keygen", _keygen, "make an Ed25519 key that signs checkpoints, and FILE.pub")
    keygen.add_argument("file", metavar="FILE", help="of the private key; an existing one is never overwritten")
    sign = _action(actions, "sign", _sign, "sign all files of checkpoints and exports")
    sign.add_argument("paths", metavar="PATH", nargs="+", help="a checkpoint, an export, or a file `last` or `best`")
    sign.add_argument("--key", metavar="FILE", required=True, help="the private key that `keygen` has made")


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


def _export(args: argparse.Namespace) -> int:
    from trainstack.cli.checkpoint_export import export_checkpoint

    return export_checkpoint(args)


def _scrub(args: argparse.Namespace) -> int:
    from trainstack.cli import checkpoint_proofs

    return checkpoint_proofs.scrub(args)


def _lineage(args: argparse.Namespace) -> int:
    from trainstack.cli import checkpoint_proofs

    return checkpoint_proofs.print_lineage(args)


def _keygen(args: argparse.Namespace) -> int:
    from trainstack.cli import checkpoint_proofs

    return checkpoint_proofs.make_key(args)


def _sign(args: argparse.Namespace) -> int:
    from trainstack.cli import checkpoint_proofs

    return checkpoint_proofs.sign(args)


def _ls(args: argparse.Namespace) -> int:
    with ExitStack() as stack:
        return _print_list(args, _outlined(args.directory, args.verify, stack))


def _outlined(given: str, verify: bool, stack: ExitStack) -> Path:
    """The folder `given`; for an address, a local folder with the same content, whole or as an outline."""
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
            f"{args.directory} is one checkpoint. Give the folder that has it, or write show {args.directory}."
        )
    within = root / "checkpoints"  # where those of a run's output_dir lie
    entries = _entries(root, args.verify) or (_entries(within, args.verify) if within.is_dir() else [])
    if args.json:
        print_json({"checkpoints": entries})
    elif entries:
        signed = any(entry.get("signed") for entry in entries)  # a column that only some folders need
        columns, rows = [*_COLUMNS], [_row(entry) for entry in entries]
        if signed:
            columns.insert(-1, "signed")
            for row, entry in zip(rows, entries, strict=True):
                row.insert(-1, (entry.get("signed") or "-")[:16])
        print_table(columns, rows, spare=() if args.wide else (*_SPARE, "signed"))
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
        "signed": claimed_signer(info.path),
        "problem": _problem(info, verify),
        "verified": verify,
    }


def _problem(info: CheckpointInfo, verify: bool) -> str | None:
    """The damage of the files, by their bytes or only by their sizes; None if there is none."""
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
    code, results = 0, list[dict[str, Any]]()
    for path in [inner for given in args.paths for inner in _checkpoints_at(given)]:
        problem, signature = None, None
        try:
            signature = _verify_one(path, args.signature)
        except CheckpointError as error:
            problem = str(error)
            if isinstance(error, CheckpointDamagedError | SignatureError):
                code = max(code, FAILED)
            else:
                code = TROUBLE
                print_error(problem, error, args.json)
        signed = {} if signature is None else {"signed_as": signature.subject, "root": signature.root}
        results.append({"path": str(path), "problem": problem, **signed})
    if args.json:
        print_json({"checkpoints": results})
    else:
        for result in results:
            words = f"intact, signed as {result['signed_as']}" if "signed_as" in result else "intact"
            print_line(f"{result['path']}: {words if result['problem'] is None else result['problem']}")
    return code


def _verify_one(path: Path | str, key: str | None) -> Signature | None:
    """Verify a local checkpoint, or the one at an address; by its signature if there is a key, else by its manifest."""
    if isinstance(path, Path):
        found = None if key is None else verify_signature(path, key)
        verify_checkpoint(path)
        return found
    from trainstack.checkpointing.remote.fetching import fetch

    with TemporaryDirectory(prefix="trainstack-") as folder:
        copy = fetch(path, Path(folder))  # which verifies it
        return None if key is None else verify_signature(copy, key)


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
