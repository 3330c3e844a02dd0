"""Exports of the module, and their upload to the hub."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from shutil import copytree
from typing import Any

from trainstack._files import is_address, remote_address
from trainstack._keywords import keywords_taken
from trainstack._tensor_classes import class_of
from trainstack.checkpointing import CheckpointInfo, DefaultCheckpointer, list_checkpoints, push_to_hub
from trainstack.checkpointing.abstract import LEFT_OUT
from trainstack.checkpointing.remote.fetching import upload_export
from trainstack.checkpointing.sharded.export_files import bytes_of_size
from trainstack.checkpointing.weights import find_part, require_hub, write_export
from trainstack.errors import ConfigurationError
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.plan import TrainingPlan
from trainstack.trainer.core.shards import ShardGatherer, gather_shards, has_shards
from trainstack.trainer.events import Event
from trainstack.trainer.resume.checkpoint_states import metadata_of
from trainstack.trainer.resume.lineage import lineage_of
from trainstack.trainer.resume.saving import Saver


def export_model(
    context: RunContext,
    saver: Saver,
    plan: TrainingPlan,
    path: str | os.PathLike[str] | None = None,
    *,
    overwrite: bool = False,
    part: str = "",
    card: Mapping[str, Any] | None = None,
    max_shard_size: int | str | None = None,
) -> None:
    """Export the module's state and `plan` to `path`, or by default with the checkpointer. See `write_export`."""
    about: dict[str, Any] = {"plan": plan.to_dict(), "global_step": context.state.global_step}
    about["metadata"] = {**metadata_of(context), "module": class_of(context.module).__name__}
    if context.stack.is_private:
        about["metadata"]["privacy statement"] = context.stack.privacy_statement().text  # for the README
    about["lineage"] = lineage_of(context, about["metadata"])
    bytes_of_size("max_shard_size", max_shard_size)  # refuses a wrong value before all ranks gather the weights
    options: dict[str, Any] = {"part": part, "card": card, "run_id": context.directory.run_id}
    options["max_shard_size"] = max_shard_size
    options["owner"] = find_part(context.module, part) if part else None
    if isinstance(context.checkpointer, DefaultCheckpointer) and context.world.is_main:
        options["sign"] = context.checkpointer.signer
    with context.events.optimizer_modes.evaluation():
        module_state, gatherer = dict(context.module.get_state()), None
        if has_shards(context.module) and context.events.has_foreign(Event.SAVE_MODEL):
            module_state = gather_shards(module_state, keep=context.world.is_main, main_of=context.world)
        elif has_shards(context.module):
            gatherer = ShardGatherer(module_state, context.world)
            module_state = gatherer.state
        context.events.fire(Event.SAVE_MODEL, module_state)
        _write_model(context, saver, module_state, about, options, path, overwrite, gatherer)


def _write_model(
    context: RunContext,
    saver: Saver,
    module_state: dict[str, Any],
    about: dict[str, Any],
    options: dict[str, Any],
    path: str | os.PathLike[str] | None,
    overwrite: bool,
    gatherer: ShardGatherer | None,
) -> None:
    def write() -> str | None:
        if path is None:
            saver.owner.check()
            save = context.checkpointer.save_model
            kept, left_out = context.frozen.split(module_state)
            about["metadata"] |= {LEFT_OUT: left_out} if left_out else {}
            return save(kept, context.state.last_epoch, **keywords_taken(save, about))
        if is_address(path):
            address = remote_address("path", path)
            with tempfile.TemporaryDirectory(prefix="trainstack-") as folder:
                made = write_export(module_state, Path(folder, address.rpartition("/")[2]), **about, **options)
                upload_export(made, address, overwrite=overwrite)
        else:
            write_export(module_state, path, overwrite=overwrite, **about, **options)
        return saver.exported_as

    with saver.owner.held_for_writing() if path is None else nullcontext():
        if path is None and getattr(getattr(context.checkpointer, "args", None), "checkpoint", False):
            saver.claim_directory()
        saver.exported_as = saver.run_on_rank_zero(write, "exporting the model", gatherer)


def push_export(
    context: RunContext,
    saver: Saver,
    plan: TrainingPlan,
    repo_id: str,
    *,
    part: str,
    card: Mapping[str, Any] | None,
    include: Sequence[str],
    **options: Any,
) -> str:
    """Export to a temporary folder, add the items of `include`, and upload it. See `Trainer.push_to_hub`."""
    require_hub()
    saver.finish()
    with tempfile.TemporaryDirectory(prefix="trainstack-") as folder:
        path = Path(folder) / repo_id.rpartition("/")[2]
        export_model(context, saver, plan, path, part=part, card=card)

        def push() -> str:
            if "checkpoint" in include:
                copytree(_newest_own(context), path / "checkpoint")
            if "logs" in include:
                context.directory.copy_logs(path / "logs")
            return push_to_hub(path, repo_id, **options)

        return saver.run_on_rank_zero(push, f"pushing to {repo_id}")


def _newest_own(context: RunContext) -> Path:
    """The newest checkpoint that this run has written."""
    checkpointer, run_id = context.checkpointer, context.directory.run_id
    found: list[CheckpointInfo] = []
    if isinstance(checkpointer, DefaultCheckpointer) and checkpointer.save_dir.is_dir():
        found = [one for one in list_checkpoints(checkpointer.save_dir) if one.kind == "checkpoint"]
    own = [one for one in found if one.run_id == run_id]
    if not own:
        raise ConfigurationError(
            "push_to_hub(include=('checkpoint',)): this run has saved no checkpoint. Write "
            "DefaultCheckpointerArguments(checkpoint=True), and call trainer.save_checkpoint(force=True) before."
        )
    return own[-1].path
