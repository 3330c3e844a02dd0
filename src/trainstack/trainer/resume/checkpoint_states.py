"""Make the checkpoint of a run from its states."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from trainstack.checkpointing import Checkpoint, DefaultCheckpointer
from trainstack.checkpointing.abstract import LEFT_OUT
from trainstack.checkpointing.encoding import StateEncoder
from trainstack.step_log.checkpoint_heads import KEY as HEADS
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.changes import Description
from trainstack.trainer.core.module_extras import EXTRAS
from trainstack.trainer.core.plan import TrainingPlan
from trainstack.trainer.core.random_state import capture_rng
from trainstack.trainer.core.shards import local_shards
from trainstack.trainer.resume.module_generators import GENERATORS, get_generator_states, warn_of_unreachable
from trainstack.trainer.resume.own_states import CALLBACKS, DIFFERING, LAYERS, MODULE, USER, comparable
from trainstack.trainer.resume.rank_states import describe_place, divide_by_rank
from trainstack.trainer.resume.resume_changes import START
from trainstack.trainer.start_description import merge_environments

EXCEPTION = "exception"
"""The key in a checkpoint's metadata of the exception after which it was written."""


_OfRank = tuple[dict[str, Any], Mapping[str, Any] | None, dict[str, str], str | None]
"""Random states, the state of the loader, the environment and the head of the step log of a rank."""


def make_checkpoint(
    context: RunContext,
    plan: TrainingPlan,
    get_state: Callable[[], Mapping[str, Any]],
    epoch_rng: Mapping[str, Any] | None,
    loader_state: Mapping[str, Any] | None,
    begin: Mapping[str, Any] | None = None,
    start: Description | None = None,
    *,
    pinned: bool = False,
    after: BaseException | None = None,
    everywhere: bool = False,
) -> Checkpoint:
    """Make a checkpoint from which the run can resume exactly. Its tensors are not copies.

    The metadata can be read without the tensors. It has the metrics of these weights, to choose the best checkpoint.

    `get_state` is called after the first communication of the processes. `begin` is the result of
    `Beginnings.old_states`; like the random states, it is stored for each rank. `start` describes the start of the run.
    The main process gets the states of all ranks. With `everywhere`, all processes do.

    After an exception, given as `after`, the processes do not communicate, so the checkpoint has no random states and
    no states of other ranks.
    """
    rng: dict[str, Any] = {"begin": begin}
    if not context.stack.is_private:  # a private run stores no random states, because they reveal its draws
        rng |= {"now": capture_rng(context.world.device), "epoch": epoch_rng}
        rng[GENERATORS] = get_generator_states(context)
    mine = (rng, loader_state, start["environment"] if start else {}, None if after is not None else context.log_head())
    ranks = [] if after is not None else _gather(context, mine, everywhere=everywhere)
    loaders, aside = [loader for _, loader, *_ in ranks], _facts_of_ranks(ranks, start)
    aside |= ({"pinned": True} if pinned else {}) | context.events.optimizer_modes.metadata
    if after is not None:
        # The message of an exception may contain values of records.
        aside[EXCEPTION] = type(after).__name__ + ("" if context.stack.is_private else f": {after}")
    states, rank_states, differing = _states_of(context, by_rank=after is None, everywhere=everywhere)
    module_state, left_out = context.frozen.split(states[MODULE])
    own = {"user": states[USER], EXTRAS: states[EXTRAS]} | ({"loaders": loaders} if any(loaders) else {})
    own |= {DIFFERING: differing} if differing else {}
    return Checkpoint(
        module_interface_state=module_state,
        trainer_state={**get_state(), **own},
        trainer_backend_state=states[LAYERS],
        rng_state={"ranks": [rng for rng, *_ in ranks]} if after is None else None,
        history_state=context.history.get_state(),
        callback_states=states[CALLBACKS],
        plan=plan.to_dict(),
        global_step=context.state.global_step,
        metadata=metadata_of(context) | aside | ({LEFT_OUT: left_out} if left_out else {}),
        rank_states=rank_states,
    )


def _facts_of_ranks(ranks: list[_OfRank], start: Description | None) -> dict[str, Any]:
    """For the metadata: the heads of the step logs, and the description of the start with all environments."""
    heads = [head for *_, head in ranks]
    facts: dict[str, Any] = {HEADS: heads} if any(heads) else {}
    if start is not None:
        facts[START] = {**start, "environment": merge_environments([environment for _, _, environment, _ in ranks])}
    return facts


def _gather(context: RunContext, mine: _OfRank, *, everywhere: bool) -> list[_OfRank]:
    comm = context.world.comm
    gather = comm.gather if everywhere else comm.gather_to_main
    return gather(mine, "taking a checkpoint")


def _states_of(
    context: RunContext, *, by_rank: bool, everywhere: bool = False
) -> tuple[dict[str, Any], list[dict[str, Any]] | None, list[str]]:
    """The states that may differ between ranks, the part of each rank, and the names of the leaves that differ.

    The parameters are not compared here, because they were compared bit by bit before.
    """
    states = {
        MODULE: context.module.get_state(),
        CALLBACKS: context.events.get_state(),
        USER: context.user_state.get_state(),
        LAYERS: context.stack.get_state(),
        # They may depend on records, so a private run stores none.
        EXTRAS: None if context.stack.is_private else context.extras.get_state(),
    }
    if not by_rank:
        return states, None, []
    tree, weights = comparable(states, context.stack), context.module.parameters()
    parts, places = divide_by_rank(context.world.comm, tree, weights, everywhere=everywhere)
    names = [describe_place(place) for place in places]
    buffers = {name for name, _ in context.module.named_buffers()} & {p[-1] for p in places if p[0] == MODULE}
    if buffers and not context.said_of_buffers:
        context.said_of_buffers = True
        context.log.warning(
            f"the buffers {', '.join(sorted(buffers))} differ between the ranks. A checkpoint stores the buffers of "
            "each rank, so a resume needs the same number of ranks. An export has the buffers of rank 0. To train "
            "with those on all ranks, let ddp synchronize buffers."
        )
    return states, parts, names


def check_storable(context: RunContext, get_state: Callable[[], Mapping[str, Any]]) -> None:
    """Check before the first step that a checkpoint can store all states. Encodes them without copies of tensors.

    Raises:
        UnsupportedStateError: names the place in the state and its type.
    """
    checkpointer = context.checkpointer
    if not isinstance(checkpointer, DefaultCheckpointer) or not checkpointer.is_due(0, force=True):
        return  # another checkpointer may store other types
    try:
        states = {**_states_of(context, by_rank=False)[0], "trainer_state": get_state()}
        states[MODULE], _ = context.frozen.split(states[MODULE])
    except Exception:  # a state may need an object of the first hook; the first save reports a real fault
        return
    encoder = StateEncoder()
    for name, state in states.items():
        encoder.encode(local_shards(state), root=name)
    warn_of_unreachable(context)


def metadata_of(context: RunContext) -> dict[str, Any]:
    """The metadata in a manifest: the backend, the current epoch, the metrics of this step, and the privacy statement.

    In a private run it has only metrics that are public or covered by the guarantee, because exports are shared.
    """
    metrics, stack = context.history.usable_values_at(context.state.global_step), context.stack
    facts = {"backend": stack.spec, "epoch": context.state.epoch, "metrics": metrics}
    return facts | ({"privacy": json.loads(stack.privacy_statement().to_json())} if stack.is_private else {})
