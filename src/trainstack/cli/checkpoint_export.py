"""`trainstack checkpoints export` writes the weights of a checkpoint or an export as a new folder."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainstack.checkpointing.abstract import LEFT_OUT
from trainstack.checkpointing.directory import read_manifest
from trainstack.checkpointing.integrity.lineage import Lineage, descend
from trainstack.checkpointing.manifest import Manifest, decode_plain
from trainstack.checkpointing.reading import read_model
from trainstack.checkpointing.sharded.dcp import write_distributed
from trainstack.checkpointing.weights import flat_tensors, write_export
from trainstack.cli.checkpoint_contents import located
from trainstack.cli.printing import print_json, print_line
from trainstack.errors import CheckpointMismatchError, ConfigurationError


def export_checkpoint(args: argparse.Namespace) -> int:
    """Write the weights; 0."""
    source = located(args.path)
    state = read_model(source, mapped=True)
    content = read_manifest(source)
    if args.dcp:
        made = _write_distributed(args, source, content, state)
    else:
        lineage = replace(descend(source, "export"), **_own_facts(content)).to_json()
        about: dict[str, Any] = {"lineage": lineage, "global_step": content.global_step, "run_id": content.run_id}
        about |= {"plan": decode_plain(content.plan), "metadata": _metadata(content)}
        options = {"part": args.part, "overwrite": args.overwrite, "max_shard_size": args.max_shard_size}
        made = write_export(state, args.target, **options, **about)
    if args.json:
        print_json({"path": str(made)})
    else:
        print_line(str(made))
    return 0


def _write_distributed(args: argparse.Namespace, source: Path, content: Manifest, state: dict[str, Any]) -> Path:
    if args.part or args.max_shard_size or args.overwrite:
        raise ConfigurationError(
            "--dcp writes all weights into a new folder: remove --part, --max-shard-size and --overwrite."
        )
    left_out = (decode_plain(content.metadata) or {}).get(LEFT_OUT)
    if left_out:
        raise CheckpointMismatchError(
            f"{source} leaves out {len(left_out)} frozen tensors, such as {next(iter(left_out))!r}, which a "
            "distributed checkpoint cannot say. Save with DefaultCheckpointerArguments(keep_frozen=True)."
        )
    return write_distributed(flat_tensors(state), args.target)


def _own_facts(content: Manifest) -> dict[str, Any]:
    """The metadata that the export shares with its source: the same run has trained these weights."""
    own = Lineage.from_json(content.lineage)
    return {"data": own.data, "environment": own.environment, "privacy_statement": own.privacy_statement}


def _metadata(content: Manifest) -> dict[str, Any]:
    """The facts of the training for a README; marks of a checkpoint do not belong to an export."""
    facts = decode_plain(content.metadata) or {}
    kept = ("backend", "epoch", "metrics", "module", "privacy", LEFT_OUT)
    return {name: facts[name] for name in kept if name in facts}
