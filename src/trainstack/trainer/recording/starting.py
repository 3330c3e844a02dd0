"""`begin_recording` opens the step log of this process for a call of `train()`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainstack.step_log.format import Start
from trainstack.step_log.reading import log_path
from trainstack.trainer import start_description
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.changes import Description
from trainstack.trainer.core.fingerprints import checksums, hash_text
from trainstack.trainer.core.module_extras import without_wrappers
from trainstack.trainer.data.training_data import TrainingData
from trainstack.trainer.recording.digests import digest_generators
from trainstack.trainer.recording.log_file import LogFile
from trainstack.trainer.recording.recorder import DETAILS_EVERY, Recorder

_MASK = (1 << 64) - 1  # shows a signed checksum as unsigned


def begin_recording(
    context: RunContext,
    data: TrainingData,
    optimizers: Sequence[Optimizer],
    log_interval: int,
    resumed: tuple[str | None, Sequence[str | None]] = (None, ()),
) -> Recorder | None:
    """Open the step log of this process, and write the start of a segment. All processes call this together.

    Args:
        context: the context of the run.
        data: the training data of the run.
        optimizers: the optimizers of the run.
        log_interval: global steps between two log points.
        resumed: the run id of the resumed checkpoint, and the heads of the step logs in it.

    Returns:
        the recorder, or None if nothing is recorded: `record` is "off", the run has no claimed folder, or the log
        cannot be written, with a warning.
    """
    args, world, directory = context.args, context.world, context.directory
    where: Mapping[str, Any] | None = None
    if world.is_main and args.record != "off" and directory.is_claimed:
        where = {"folder": str(directory.path), "run_id": directory.run_id or ""}
    where = world.comm.broadcast_object(where, "the folder of the step log")
    if where is None:
        return None
    file, problem = _open(context, log_path(Path(where["folder"]), world.rank))
    segments = world.comm.gather(0 if file is None else file.segments, "the segments of the step logs")
    warn = context.log.warning if world.is_main else partial(context.log.log, logging.ERROR)
    if file is None:
        warn(f"the step log of rank {world.rank} cannot be written, so this rank records nothing: {problem}")
        return None
    head = _head_of(resumed, where["run_id"], world.rank)
    _say_what_is_missing(context, file, head)
    private, lease = context.stack.is_private, context.lease
    start = _start(context, data, optimizers, file, head, number=max(segments), run_id=where["run_id"])
    return Recorder(
        file,
        start,
        world=world,
        state=context.state,
        module=context.module,
        optimizers=optimizers,
        details_every=_details_every(args.record, log_interval, private=private),
        private=private,
        hides_loss=any(layer.hides_losses for layer in context.stack.layers()) or private,
        check_owner=(lambda: None) if lease is None else lease.check,
        warn=warn,
    )


def _say_what_is_missing(context: RunContext, file: LogFile, head: str | None) -> None:
    """Warn of a log whose end was moved, and of a log without the blocks that a checkpoint refers to."""
    if file.cut is not None:
        context.log.warning(
            f"the step log {file.path} is continued after its intact part: {file.cut}. The rest was moved to "
            f"{file.path.with_suffix('.cut-*').name}."
        )
    if head is not None and not file.has_head(head):
        context.log.warning(
            f"the step log {file.path} lacks blocks that it had when the resumed checkpoint was written. The log was "
            "changed or truncated since then. The run itself is not affected."
        )


def _start(
    context: RunContext,
    data: TrainingData,
    optimizers: Sequence[Optimizer],
    file: LogFile,
    head: str | None,
    **names: Any,
) -> Start:
    """Make the start of the segment. `names` are its number and the id of the run."""
    world, args = context.world, context.args
    return Start(
        **names,
        rank=world.rank,
        world_size=world.size,
        backend=context.stack.spec,
        resumed_step=context.state.global_step,
        mode=args.record,
        parameters=[without_wrappers(name) for name, _ in context.module.named_parameters()],
        generators=[] if context.stack.is_private else list(digest_generators(world.device)),
        description=_describe(context, data, optimizers),
        resumed_head=head,
        cut=file.cut,
    )


def _describe(context: RunContext, data: TrainingData, optimizers: Sequence[Optimizer]) -> Description:
    """The description of a start as in a checkpoint, with seed, samples and weights of the run.

    Of sharded weights, the checksums are those of the part of this process.
    """
    described = start_description.describe_start(context, data)
    described["arguments"]["seed"] = str(context.state.seed)  # a resumed run keeps its first seed
    described["data"]["version of the order"] = str(context.state.order_version)
    if not context.stack.is_private:  # a private run must store nothing about its records
        described["data"]["samples in an epoch"] = str(data.plan.samples_per_epoch)
        described["data"] |= {f"sample {index}": hash_text(repr(one)) for index, one in data.sample_hashes.items()}
    made = start_description.describe_optimizers(optimizers)
    return {**described, "optimizers": made, "weights": _weights(context.module)}


def _weights(module: nn.Module) -> dict[str, str]:
    """The checksums of parameters and buffers."""
    named = [*module.named_parameters(), *module.named_buffers()]
    tensors = {without_wrappers(name): one for name, one in named if not is_lazy(one) and not one.is_meta}
    sums = checksums(tensors.values())
    return {name: f"{value & _MASK:016x}" for name, value in zip(tensors, sums, strict=True)}


def _open(context: RunContext, path: Path) -> tuple[LogFile | None, OSError | None]:
    try:
        context.directory.protect(context.args)  # the lease has done this only on the main process
        return LogFile(path), None
    except OSError as error:
        return None, error


def _details_every(mode: str, log_interval: int, *, private: bool) -> int | None:
    """Global steps between two steps with details: a multiple of the log interval, at least `DETAILS_EVERY`."""
    if private:
        return None
    return 1 if mode == "full" else log_interval * -(-DETAILS_EVERY // log_interval)


def _head_of(resumed: tuple[str | None, Sequence[str | None]], run_id: str, rank: int) -> str | None:
    """The head of this rank's log in a checkpoint of the run `run_id`; None in a checkpoint of another run."""
    written_by, heads = resumed
    return heads[rank] if written_by == run_id and rank < len(heads) else None
