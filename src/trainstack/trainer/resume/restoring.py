"""Restore a run from a checkpoint or from weights."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from trainstack._files import is_address, read_small, real_path
from trainstack.backends import TrainerBackend, World
from trainstack.backends.spec import known_layers
from trainstack.checkpointing import Checkpoint, WarmStartReport
from trainstack.checkpointing.directory import is_checkpoint_directory, read_manifest
from trainstack.checkpointing.manifest import FILE_NAME as MANIFEST
from trainstack.checkpointing.verification import resolve_pointer
from trainstack.errors import OTHER_RUN, CheckpointMismatchError
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.module_extras import EXTRAS
from trainstack.trainer.core.order import mix
from trainstack.trainer.core.plan import TrainingPlan
from trainstack.trainer.core.random_state import capture_rng, isolated_rng
from trainstack.trainer.core.state import RunState
from trainstack.trainer.events.optimizer_modes import WITH_MODES, trained_weights_of
from trainstack.trainer.resume.checkpoint_states import EXCEPTION
from trainstack.trainer.resume.lineage import ancestors_of_weights, begin_lineage
from trainstack.trainer.resume.own_states import CALLBACKS, LAYERS, MODULE, USER, take_own_states, update_module
from trainstack.trainer.schedulers.building import counts_at_end
from trainstack.trainer.schedulers.stepping import Schedules

if TYPE_CHECKING:
    from trainstack.backends.privacy_statement import WeightsOrigin

_OF_OPTIMIZERS = ("optimizers", "schedulers")


def select_resume_state(checkpoint: Checkpoint, context: RunContext) -> Checkpoint:
    """The parts of `checkpoint` that `args.resume_mode` asks for, with the values of this rank. All ranks call this.

    Raises:
        CheckpointMismatchError: the state of a layer that requires it would be lost, or states that differ between
            ranks were written by another number of ranks or not stored.
    """
    args, stack = context.args, context.stack
    if checkpoint.is_empty:
        return checkpoint
    if args.resume_mode == "full":
        checkpoint = take_own_states(checkpoint, context, (MODULE, CALLBACKS, USER, LAYERS))
        _fit_buffers(checkpoint, context)
        return checkpoint
    kept = Checkpoint()
    log, what = RunLogger(args.log_level), "the weights"
    if args.resume_mode == "weights_and_optimizer":
        what = "weights, optimizers, schedulers and layers"
        checkpoint = take_own_states(checkpoint, context, (MODULE, LAYERS))
        state = checkpoint.trainer_state or {}
        kept.trainer_state = {name: state[name] for name in _OF_OPTIMIZERS if name in state}
        kept.trainer_backend_state = checkpoint.trainer_backend_state
        kept.metadata = {WITH_MODES: (checkpoint.metadata or {}).get(WITH_MODES)}
    else:
        lost = [name for name in checkpoint.trainer_backend_state or {} if name in _layers_requiring_state(stack)]
        if lost:
            raise CheckpointMismatchError(
                f"resume_mode='weights' would lose the state of {lost}, which accounts for all earlier steps and must "
                "be kept. Write resume_mode='full', or 'weights_and_optimizer', which keeps it."
            )
        checkpoint = take_own_states(checkpoint, context, (MODULE,))
        _warn_of_trained_weights(checkpoint.metadata, "resume_mode='weights'", log)
    _fit_buffers(checkpoint, context)
    kept.module_interface_state = checkpoint.module_interface_state
    log.info(
        f"resume_mode={args.resume_mode!r}: loaded {what} of the checkpoint at global step {checkpoint.global_step}. "
        "Counters, order of the data, random numbers and history start from the beginning."
    )
    return kept


def _fit_buffers(checkpoint: Checkpoint, context: RunContext) -> None:
    extras = (checkpoint.trainer_state or {}).get(EXTRAS)
    if extras:
        context.extras.fit(extras["forms"], checkpoint.module_interface_state)


def _layers_requiring_state(stack: TrainerBackend) -> set[str]:
    layers: list[TrainerBackend | type[TrainerBackend]] = [record.layer for record in known_layers().values()]
    layers += stack.layers()
    return {layer.name for layer in layers if layer.requires_state}


def start_from_weights(
    context: RunContext,
    load: Callable[[Path], WarmStartReport],
    fetch: Callable[[str], Path],
    *,
    resumed: bool,
    left_out: bool = False,
) -> WarmStartReport | None:
    """Load `init_weights_from` into the module, if it is set and the run does not resume.

    `load` loads a file or folder into the module on all processes, and `fetch` returns the local copy for an address.
    A `resumed` run already has its weights, unless its checkpoint omits some (`left_out`).

    Raises:
        CheckpointMismatchError: no tensor fits, or not all fit and `init_weights_strict` is set.
        CheckpointNotFoundError, CheckpointDamagedError: the source cannot be read.
    """
    args, log = context.args, RunLogger(context.args.log_level)
    source = args.init_weights_from
    if source is None:
        return None
    if resumed and not left_out:
        if not context.frozen.has_completed:  # else the frozen weights came from this source
            log.info(f"init_weights_from={os.fspath(source)!r} is not used: the run resumes from a checkpoint.")
        return None
    source = fetch(os.fspath(source)) if is_address(source) else resolve_pointer(Path(source))
    _check_not_private(source, context.stack)
    folder = _checkpoint_of(source)
    if folder is not None:
        _warn_of_trained_weights(read_manifest(folder).metadata, f"init_weights_from={os.fspath(source)!r}", log)
    if context.stack.is_private and not resumed:  # in a resumed run the ledger has the origin
        context.stack.on_initial_weights(origin_of(source))
    report = load(source)
    if not resumed:
        begin_lineage(context, ancestors_of_weights(source, folder))
    log.info(str(report)) if report.is_complete else log.warning(str(report))
    return report


def _warn_of_trained_weights(metadata: Mapping[str, Any] | None, what: str, log: RunLogger) -> None:
    problem = trained_weights_of(metadata)
    if problem is not None:
        log.warning(
            f"{what}: {problem} They are loaded without a change. To load the evaluated weights, write an export in "
            "init_weights_from, such as the folder checkpoint-model-... next to it."
        )


def _check_not_private(source: Path, stack: TrainerBackend) -> None:
    """Weights of a private checkpoint may not be loaded without its accountant; an export may."""
    folder = _checkpoint_of(source)
    if folder is None:
        return
    content = read_manifest(folder)
    spec = (content.metadata or {}).get("backend", "")
    private = [token for token in _layers_requiring_state(stack) if token and f"-{token}-" in f"-{spec}-"]
    if content.kind == "checkpoint" and private:
        part = "" if folder == source else "a file of "
        raise CheckpointMismatchError(
            f"init_weights_from={str(source)!r} is {part}a checkpoint of backend {spec!r}, and would be loaded without "
            f"the state of {private}, which accounts for all earlier steps. Write resume={str(folder)!r}. If these "
            "weights are released, write an export of them instead."
        )


def origin_of(source: Path) -> WeightsOrigin:
    """The facts of training in the manifest of `source`. A file without a manifest has none."""
    from trainstack.backends.privacy_statement import PrivacyStatement, WeightsOrigin  # only private runs need it

    folder = _checkpoint_of(source)
    if folder is None:  # a path that does not exist is the id of a model on the Hub
        return WeightsOrigin(path=os.path.abspath(source) if source.exists() else os.fspath(source))
    facts = read_manifest(folder).metadata or {}
    told = facts.get("privacy")
    return WeightsOrigin(
        path=os.path.abspath(source),
        digest=hashlib.sha256(read_small(folder / MANIFEST)).hexdigest(),
        backend=str(facts.get("backend", "")) or None,
        statement=None if told is None else PrivacyStatement.from_json(json.dumps(told)),
    )


def _checkpoint_of(source: Path) -> Path | None:
    """The checkpoint or export at `source`, or that contains the file (or the target of the link) `source`; or None."""
    if source.is_dir():
        return source if is_checkpoint_directory(source) else None
    folders = (source.parent, real_path(source).parent)
    own = (folder for folder in folders if (folder / MANIFEST).exists() and is_checkpoint_directory(folder))
    return next(own, None)


def check_resumable(
    checkpoint: Checkpoint, context: RunContext, plan: TrainingPlan, *, length_may_change: bool = False
) -> None:
    """Refuse a checkpoint of other data, and warn of other differences.

    If the length of epochs may change, the length of this epoch is compared when it begins.

    Raises:
        CheckpointMismatchError: the data set, the split of a loader that only counts batches, or the seed of a run that
            was found with resume="auto" differs.
    """
    state, log = context.state, context.log
    error = (checkpoint.metadata or {}).get(EXCEPTION)
    if error is not None:
        log.warning(
            f"the checkpoint was written after an exception ({error}), perhaps in the middle of a step. A run that "
            "resumes from it differs from an uninterrupted run. For an exact resume, use the newest checkpoint before "
            "it."
        )
    check_plan(checkpoint, plan, state, length_may_change=length_may_change)
    if state.seed != context.args.seed and must_have_settings(checkpoint, context):
        raise CheckpointMismatchError(
            f"the run in this folder began with seed={state.seed}, and seed={context.args.seed} was given. {OTHER_RUN}"
        )


def must_have_settings(checkpoint: Checkpoint, context: RunContext) -> bool:
    """Whether to refuse settings without effect. With "auto", the user has not chosen a certain run.

    On another number of ranks, other settings are allowed, because scripts scale the learning rate by the number of
    ranks. The run continues with the rate of the checkpoint.
    """
    ranks = (checkpoint.rng_state or {}).get("ranks", ())
    return context.args.resume == "auto" and len(ranks) == context.world.size


def check_schedules(schedules: Schedules, plan: TrainingPlan, state: RunState) -> None:
    """Refuse a schedule that torch would refuse to step in the middle of the run.

    Raises:
        CheckpointMismatchError: it is shorter than the run.
    """
    counts = counts_at_end(schedules, plan, state)
    for position, (scheduler, count) in enumerate(zip(schedules.schedulers, counts, strict=True)):
        if isinstance(scheduler, OneCycleLR) and count is not None and count > scheduler.total_steps:
            done = scheduler.last_epoch
            raise CheckpointMismatchError(
                f"scheduler {position} (OneCycleLR) of the checkpoint was made for {scheduler.total_steps} steps, of "
                f"which {done} are done; epochs={plan.epochs} has {count - done} more. Write "
                "reset_optimizers_schedulers=True for a new cycle over the remaining epochs, or the epochs that the "
                "run began with."
            )


def restore_module(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Load the module state. The module gets a copy, so that its later writes do not change the checkpoint.

    `update_state` is not called if the checkpoint has no module state.

    Raises:
        CheckpointMismatchError: the checkpoint belongs to another model.
    """
    if checkpoint.module_interface_state is None:
        return
    try:
        update_module(module, checkpoint.module_interface_state)
    except RuntimeError as error:
        reason = " ".join(str(error).split()).rstrip(". ")
        raise CheckpointMismatchError(
            f"the checkpoint does not fit {type(module).__name__}: {reason}. Build the same module as when the "
            "checkpoint was written, start in another output_dir, or override update_state to load the matching "
            "tensors."
        ) from error


def check_plan(checkpoint: Checkpoint, plan: TrainingPlan, state: RunState, *, length_may_change: bool = False) -> None:
    """Refuse to continue in the middle of an epoch with other data.

    Raises:
        CheckpointMismatchError: the length of the data set, or the split of a loader that only counts batches, differs.
    """
    planned = checkpoint.plan or {}
    placed = (checkpoint.trainer_state or {}).get("loaders")  # the loader has a state for each rank
    for size in ("micro_batch", "accumulation", *(() if placed else ("world_size",))):
        if state.steps_in_epoch and plan.samples_per_epoch is None and planned.get(size) != getattr(plan, size):
            raise CheckpointMismatchError(
                f"the checkpoint was written within epoch {state.epoch} of a loader with a custom order, whose batches "
                f"can only be counted; {size} was {planned.get(size)} and is now {getattr(plan, size)}. Resume with "
                "the same train_batch_size, gpu_batch_size_limit and number of processes."
            )
    before, now = planned.get("samples_per_epoch"), plan.samples_per_epoch
    if state.steps_in_epoch and None not in (before, now) and before != now and not length_may_change:
        raise CheckpointMismatchError(
            f"the checkpoint was written within epoch {state.epoch} of a data set of {before} samples; the data set "
            f"now has {now}. Resume with the same data, or from a checkpoint at the end of an epoch."
        )


def rng_of_rank(rng_state: Mapping[str, Any] | None, world: World, state: RunState) -> Mapping[str, Any] | None:
    """The random state with which this process continues; None if the checkpoint has none.

    If the number of processes has changed, each process gets a new random state from the run's seed, the step and the
    rank.
    """
    if rng_state is None or len(rng_state["ranks"]) == world.size:
        return None if rng_state is None else rng_state["ranks"][world.rank]
    with isolated_rng(mix(state.seed, state.global_step, world.size, world.rank), world.device):
        begin = rng_state["ranks"][0].get("begin")  # states that differ between ranks are refused elsewhere
        return {"now": capture_rng(world.device), "epoch": None, "begin": begin}
