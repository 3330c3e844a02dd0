"""The contents of a run's checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainstack.backends import World
from trainstack.checkpointing import Checkpoint
from trainstack.errors import CheckpointMismatchError
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.order import mix
from trainstack.trainer.core.plan import TrainingPlan
from trainstack.trainer.core.random_state import capture_rng, isolated_rng
from trainstack.trainer.core.state import RunState


def restore_module(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Give the module its state.

    Raises:
        CheckpointMismatchError: the checkpoint is of another model.
    """
    try:
        module.update_state(checkpoint.module_interface_state)  # type: ignore[operator]
    except RuntimeError as error:
        what = " ".join(str(error).split()).rstrip(". ")
        raise CheckpointMismatchError(
            f"the checkpoint does not fit {type(module).__name__}: {what}. Build the module as it was when the "
            "checkpoint was written, start afresh in another output_dir, or override update_state to take what fits."
        ) from error


def check_plan(checkpoint: Checkpoint, plan: TrainingPlan, state: RunState, log: RunLogger) -> None:
    """Refuse to go on in the middle of an epoch over other data, and say what else is not as it was.

    Raises:
        CheckpointMismatchError: the data set has another length than when the checkpoint was written.
    """
    planned = checkpoint.plan or {}
    placed = (checkpoint.trainer_state or {}).get("loaders")  # by states of its own, whoever reads it
    for size in ("micro_batch", "accumulation", *(() if placed else ("world_size",))):
        if state.steps_in_epoch and plan.samples_per_epoch is None and planned.get(size) != getattr(plan, size):
            raise CheckpointMismatchError(
                f"the checkpoint lies within epoch {state.epoch} of a loader with an order of its own, whose batches "
                f"can only be counted; {size} was {planned.get(size)} and is now {getattr(plan, size)}. Resume with "
                "the same train_batch_size, gpu_batch_size_limit and processes."
            )
    batch = planned.get("global_batch", plan.global_batch)
    if batch != plan.global_batch:
        log.warning(
            f"the checkpoint's run trained on {batch} samples a step; train_batch_size={plan.global_batch} makes this "
            "another training from here on. The order of the samples is kept."
        )
    before, now = planned.get("samples_per_epoch"), plan.samples_per_epoch
    if before is None or now is None or before == now:
        return
    if not state.steps_in_epoch:
        log.warning(f"the data set had {before} samples when the checkpoint was written, and now has {now}.")
    else:
        raise CheckpointMismatchError(
            f"the checkpoint lies within epoch {state.epoch} of a data set of {before} samples; the data set now "
            f"has {now}. Resume with the same data, or from a checkpoint at an epoch's end."
        )


def make_checkpoint(
    context: RunContext,
    plan: TrainingPlan,
    get_state: Callable[[], Mapping[str, Any]],
    epoch_rng: Mapping[str, Any] | None,
    loader_state: Mapping[str, Any] | None,
    *,
    pinned: bool = False,
    after: BaseException | None = None,
) -> Checkpoint:
    """Everything that a run needs to go on from here; tensors are the live ones.

    The metadata can be read without the tensors: what was measured with these very weights tells which is the best.

    `get_state` is called after the processes have met. After an exception, `after`, the other processes are not asked
    for anything, so there are no random states.
    """
    rng = {"now": capture_rng(context.world.device), "epoch": epoch_rng}
    ranks = context.world.comm.gather((rng, loader_state)) if after is None else []
    loaders = [loader for _, loader in ranks]
    aside: dict[str, Any] = {"pinned": True} if pinned else {}
    if after is not None:
        aside[EXCEPTION] = f"{type(after).__name__}: {after}"
    own = {"user": context.user_state.get_state()} | ({"loaders": loaders} if any(loaders) else {})
    return Checkpoint(
        module_interface_state=context.module.get_state(),
        trainer_state={**get_state(), **own},
        trainer_backend_state=context.stack.get_state(),
        rng_state={"ranks": [rng for rng, _ in ranks]} if after is None else None,
        history_state=context.history.get_state(),
        callback_states=context.events.get_state(),
        plan=plan.to_dict(),
        global_step=context.state.global_step,
        metadata=metadata_of(context) | aside,
    )


def metadata_of(context: RunContext) -> dict[str, Any]:
    """What should be readable in a manifest: the backend, the epoch under way, what was measured at this step, and what
    a private run has promised so far."""
    metrics, stack = context.history.values_at(context.state.global_step), context.stack
    facts = {"backend": stack.spec, "epoch": context.state.epoch, "metrics": metrics}
    return facts | ({"privacy": json.loads(stack.privacy_statement().to_json())} if stack.is_private else {})


EXCEPTION = "exception"
"""The key in a checkpoint's metadata of what went wrong before it was written."""


def rng_of_rank(rng_state: Mapping[str, Any] | None, world: World, state: RunState) -> Mapping[str, Any] | None:
    """The random state that this process goes on with; None if it is to seed itself.

    Where the number of processes has changed there is none to go back to: each then gets one of its own, made of
    the run's seed, the step and the rank.
    """
    if rng_state is None or len(rng_state["ranks"]) == world.size:
        return None if rng_state is None else rng_state["ranks"][world.rank]
    with isolated_rng(mix(state.seed, state.global_step, world.size, world.rank), world.device):
        return {"now": capture_rng(world.device), "epoch": None}


def load_states(kind: str, owners: Sequence[Any], states: Sequence[Any], kinds: Sequence[str], log: RunLogger) -> None:
    """Give optimizers or schedulers the states of a checkpoint.

    Args:
        kind: "optimizer" or "scheduler".
        owners: of the run; `states` and `kinds`, the names of their classes, are those of the checkpoint.

    Raises:
        CheckpointMismatchError: they are not those of the checkpoint.
    """
    how = "Make the same ones, or write reset_optimizers_schedulers=True to start them anew."
    if len(owners) != len(states):
        raise CheckpointMismatchError(
            f"get_optimizers_schedulers returned {len(owners)} {kind}s, the checkpoint has {len(states)}. {how}"
        )
    for position, (owner, state) in enumerate(zip(owners, states, strict=True)):
        if type(owner).__name__ != kinds[position]:
            raise CheckpointMismatchError(
                f"{kind} {position} is a {type(owner).__name__}; the checkpoint's is a {kinds[position]}. {how}"
            )
        if kind == "optimizer":
            _warn_if_settings_differ(position, owner, state, log)
        else:
            _warn_if_length_differs(position, owner, state, log)
        try:
            owner.load_state_dict(state)
        except (KeyError, ValueError, RuntimeError, TypeError) as error:
            raise CheckpointMismatchError(
                f"{kind} {position} ({type(owner).__name__}) does not fit the checkpoint's: {error}. {how}"
            ) from error


def _warn_if_settings_differ(position: int, optimizer: Optimizer, state: Mapping[str, Any], log: RunLogger) -> None:
    name = f"optimizer {position} ({type(optimizer).__name__})"
    for mine, theirs in zip(optimizer.param_groups, state["param_groups"], strict=False):
        scheduled = "initial_lr" in mine and "initial_lr" in theirs
        for key in sorted(set(mine) & set(theirs) - {"params", "lr" if scheduled else "initial_lr"}):
            if not _same(mine[key], theirs[key]):
                log.warning(
                    f"{name} was made with {key.removeprefix('initial_')}={mine[key]!r}; the run goes on with the "
                    f"checkpoint's {theirs[key]!r}. To use the new one, write reset_optimizers_schedulers=True."
                )


def _warn_if_length_differs(position: int, scheduler: Any, state: Mapping[str, Any], log: RunLogger) -> None:
    """Say that a schedule goes on as it was laid when the run began, also where the run has become longer since."""
    mine = scheduler.state_dict()
    for key in ("total_steps", "T_max", "total_iters", "lr_lambdas"):
        if key in mine and key in state and not _same(mine[key], state[key]):
            log.warning(
                f"scheduler {position} ({type(scheduler).__name__}) was made with {key}={mine[key]!r}; the run goes on "
                f"with the checkpoint's {state[key]!r}. To lay the schedule anew over the epochs that are left, write "
                "reset_optimizers_schedulers=True."
            )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return torch.equal(torch.as_tensor(one).cpu(), torch.as_tensor(other).cpu())
    return bool(one == other)
