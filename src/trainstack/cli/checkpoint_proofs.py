"""`trainstack checkpoints lineage | keygen | sign | scrub`: where checkpoints come from, signatures, stored bytes."""

from __future__ import annotations

import argparse
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from trainstack._files import is_address
from trainstack.checkpointing.directory import is_checkpoint_directory, printable
from trainstack.checkpointing.integrity import keys, signing
from trainstack.checkpointing.integrity.lineage import Ancestor, Lineage, Link, read_lineage, trace
from trainstack.checkpointing.integrity.scrubbing import RATE, Pace, ScrubStopped, scrub_folder
from trainstack.checkpointing.verification import open_checkpoint
from trainstack.cli.printing import flush, print_error, print_json, print_line
from trainstack.errors import CheckpointNotFoundError, ConfigurationError


def print_lineage(args: argparse.Namespace) -> int:
    """Print a checkpoint and its ancestors, the parent first; 0."""
    from trainstack.cli.checkpoint_contents import located  # imports torch

    path, content = open_checkpoint(located(args.path))
    lineage = read_lineage(path)
    links = trace(path, [Path(folder) for folder in args.search])
    if args.json:
        own = {"path": str(path), "name": content.name, "kind": content.kind, "run_id": content.run_id}
        facts = {**own, "global_step": content.global_step, "versions": content.versions, **lineage.to_json()}
        print_json({**facts, "ancestors": [_link_as_json(link) for link in links]})
        return 0
    print_line(f"{content.name}: {_of_run(content.run_id, content.global_step)}")
    for number, link in enumerate(links, 1):
        one = link.ancestor
        print_line(f"{'  ' * number}<- {_WORDS[one.how]} {one.name}: {_of_ancestor(one)} [{link.state}]")
    if not links:
        print_line("  no parent: the run began with new weights, or the manifest was written without a lineage")
    if lineage.omitted:
        print_line(f"  and {lineage.omitted} older ones, which are not named")
    for line in _facts(lineage):
        print_line(line)
    return 0


_WORDS = {
    "resume": "resumed from",
    "resume_weights_and_optimizer": "took weights and optimizer of",
    "resume_weights": "took the weights of",
    "init_weights_from": "began with the weights of",
    "export": "export of",
}


def _of_run(run_id: str | None, step: int | None) -> str:
    return f"run {run_id or 'unknown'}, global step {'unknown' if step is None else step}"


def _of_ancestor(one: Ancestor) -> str:
    if one.kind is None:
        return "no manifest, so no hash"
    digest = "no hash, since its run is private" if one.manifest is None else f"manifest {one.manifest[:16]}"
    return f"{_of_run(one.run_id, one.global_step)}, {digest}"


def _link_as_json(link: Link) -> dict[str, Any]:
    paths = {"path": link.path and str(link.path), "replaced": link.replaced and str(link.replaced)}
    return {**asdict(link.ancestor), **paths, "state": "found" if link.path else "gone"}


def _facts(lineage: Lineage) -> Iterator[str]:
    for title, facts in (("data", lineage.data), ("environment", lineage.environment)):
        if facts:
            yield f"{title}: " + ", ".join(f"{name} {value}" for name, value in facts.items())
    if lineage.privacy_statement is not None:
        yield f"privacy statement: SHA-256 {lineage.privacy_statement}"


def make_key(args: argparse.Namespace) -> int:
    """Write a new pair of keys; 0."""
    public = keys.make_key(args.file)
    digest = keys.fingerprint_of(keys.read_public_key(public))
    private = str(public).removesuffix(".pub")
    if args.json:
        print_json({"private_key": private, "public_key": str(public), "fingerprint": digest})
    else:
        print_line(f"{private}: signs; keep it secret")
        print_line(f"{public}: verifies; give it to readers. Fingerprint {digest}")
    return 0


def sign(args: argparse.Namespace) -> int:
    """Sign checkpoints and exports; 0."""
    from trainstack.cli.checkpoint_contents import located

    made = []
    for given in args.paths:
        if is_address(given):
            raise ConfigurationError(f"{given} is an address. Sign the local copy before it is uploaded.")
        path = located(given)
        made.append((path, signing.sign_checkpoint(path, args.key)))
    if args.json:
        print_json({"signed": [{"path": str(path), **_as_json(one)} for path, one in made]})
        return 0
    for path, one in made:
        print_line(f"{path}: signed {one.subject}, {len(one.files)} files, root {one.root}, key {one.public_key}")
    return 0


def _as_json(one: signing.Signature) -> dict[str, Any]:
    names = ("name", "run_id", "global_step", "created", "algorithm", "public_key", "root")
    return {name: getattr(one, name) for name in names}


def scrub(args: argparse.Namespace) -> int:
    """Read all entries of folders; 1 if one is damaged. With `--every`, repeat this until a signal."""
    every_s = None if args.every is None else _seconds(args.every)
    rate = RATE if args.rate is None and every_s is not None else _bytes(args.rate)
    folders = [inner for given in args.paths for inner in _folders_at(Path(given))]
    if every_s is None:
        return _scrub_once(folders, Pace(rate), args.json)
    code, stopped = 0, threading.Event()
    with _ending(stopped), suppress(ScrubStopped):
        while not stopped.is_set():
            code |= _scrub_once(folders, Pace(rate, stopped), args.json)
            flush()
            stopped.wait(every_s)
    return code


def _scrub_once(folders: list[Path], pace: Pace, as_json: bool) -> int:
    code, results = 0, []
    for folder in folders:
        for path, problem, is_damage in scrub_folder(folder, pace, lambda _, message: print_error(message)):
            code |= is_damage
            results.append({"path": printable(path), "problem": problem})
    results.sort(key=lambda result: str(result["path"]))
    if as_json:
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


@contextmanager
def _ending(stopped: threading.Event) -> Iterator[None]:
    """A block in which SIGTERM and SIGINT set `stopped`."""

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def _seconds(text: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text.strip())
    value = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if value <= 0:
        raise ConfigurationError(f"--every {text}: write a time such as 6h, 30m, 45s or 1d.")
    return value


def _bytes(text: str | None) -> int | None:
    if text is None:
        return None
    from trainstack.checkpointing.sharded.export_files import bytes_of_size  # imports torch

    return bytes_of_size("--rate", text)
