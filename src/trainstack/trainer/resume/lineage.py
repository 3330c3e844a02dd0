"""The origin of the weights of a run, and its environment, for manifests."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trainstack.backends import World
from trainstack.checkpointing import Checkpoint
from trainstack.checkpointing.integrity.lineage import Ancestor, How, Lineage, descend, digest_of
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.fingerprints import hash_text
from trainstack.trainer.data.training_data import TrainingData

_HOW: Mapping[str, How] = {
    "full": "resume",
    "weights_and_optimizer": "resume_weights_and_optimizer",
    "weights": "resume_weights",
}


def ancestors_of(checkpoint: Checkpoint, path: Path | None, mode: str) -> Lineage:
    """The ancestors of a run that resumes from `checkpoint`; an empty lineage for an empty checkpoint.

    Args:
        checkpoint: the loaded checkpoint.
        path: its folder; None if the checkpointer does not store it in a folder.
        mode: `resume_mode` of the arguments.
    """
    if checkpoint.is_empty:
        return Lineage()
    if path is not None:
        return descend(path, _HOW[mode])
    step, before = checkpoint.global_step, Lineage.from_json(checkpoint.lineage)
    name = "unknown" if step is None else f"global step {step}"
    parent = Ancestor(how=_HOW[mode], name=name, run_id=checkpoint.run_id, global_step=step)
    return Lineage(ancestors=(parent, *before.ancestors), omitted=before.omitted)


def ancestors_of_weights(source: Path, folder: Path | None) -> Lineage:
    """The ancestors of a run whose initial weights are from `source`. `folder` is the checkpoint with `source`."""
    if folder is not None:
        return descend(folder, "init_weights_from")
    name = source.name if source.exists() else os.fspath(source)  # else it is the id of a model on the Hub
    return Lineage(ancestors=(Ancestor(how="init_weights_from", name=name),))


def begin_lineage(context: RunContext, found: Lineage) -> None:
    """Set the ancestors of the run. All ranks call this."""
    context.lineage = replace(context.lineage, ancestors=found.ancestors, omitted=found.omitted)


def note_data(context: RunContext, data: TrainingData) -> None:
    """Note the facts of the training data. A private run notes none, because they depend on its records."""
    if context.stack.is_private:
        return
    samples = hash_text(repr(sorted(data.sample_hashes.items()))) if data.sample_hashes else None
    fingerprint = getattr(getattr(data.loader, "dataset", None), "_fingerprint", None)  # private, of datasets.Dataset
    facts = {"length": data.training_set.length, "samples": samples}
    facts["fingerprint"] = fingerprint if isinstance(fingerprint, str) else None
    known = {name: value for name, value in facts.items() if value is not None}
    context.lineage = replace(context.lineage, data=known or None)


def lineage_of(context: RunContext, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The lineage of a checkpoint or an export with this metadata."""
    statement = metadata.get("privacy")
    digest = None if statement is None else digest_of(statement)
    return replace(context.lineage, environment=_environment(context.world), privacy_statement=digest).to_json()


def _environment(world: World) -> dict[str, str]:
    """The facts that determine the bits of a training, except for versions. It contains no host name."""
    device = torch.device(world.device)
    found = {"system": platform.system(), "machine": platform.machine(), "processes": str(world.size)}
    if device.type == "cuda" and torch.version.cuda is not None:
        found["device"] = torch.cuda.get_device_name(device)
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        found |= {"cuda": str(torch.version.cuda), "cudnn": str(cudnn)}
    else:
        found["device"] = (
            f"{device.type} {torch.backends.cpu.get_cpu_capability()}" if device.type == "cpu" else device.type
        )
    return found
