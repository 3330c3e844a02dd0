"""Write the states of a run into a checkpoint, and restore them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from trainstack._deferred import materialized
from trainstack.checkpointing import Checkpoint
from trainstack.errors import UnsupportedStateError
from trainstack.step_log.checkpoint_heads import heads_in
from trainstack.trainer.core.module_extras import EXTRAS
from trainstack.trainer.core.shards import has_shards, states_of
from trainstack.trainer.core.tensors import check_finite_weights
from trainstack.trainer.events import Event
from trainstack.trainer.resume.checkpoint_states import make_checkpoint
from trainstack.trainer.resume.loading import LOADING
from trainstack.trainer.resume.module_generators import restore_generators
from trainstack.trainer.resume.own_states import overrides_update_state, restore_own_buffers
from trainstack.trainer.resume.rank_zero import wait_for_all_ranks
from trainstack.trainer.resume.restoring import (
    check_resumable,
    check_schedules,
    must_have_settings,
    restore_module,
    rng_of_rank,
)
from trainstack.trainer.resume.resume_changes import SAMPLES, changes_at_resume, comparable_samples, report_changes
from trainstack.trainer.run.run import Run


def take_checkpoint(
    run: Run,
    get_state: Callable[[], Mapping[str, Any]],
    *,
    pinned: bool = False,
    after: BaseException | None = None,
    everywhere: bool = False,
) -> Checkpoint:
    """Make a checkpoint of the run at a step boundary. All processes call this together.

    Its tensors are not copies. Of a sharded tensor it has the part of this process. The main process has the states of
    all ranks; with `everywhere`, all processes have them, for checkpoints that several processes write.

    After an exception, given as `after`, nothing is refused, and no other process is involved.

    Raises:
        NonFiniteError: a loss, a gradient, a weight or a state of an optimizer is inf or nan.
        PeerError: the processes do not have the same weights.
    """
    context, plan, state = run.context, run.data.plan, run.state
    if after is not None and has_shards(run.module):
        raise UnsupportedStateError(
            "this process has a part of each sharded weight, and cannot gather the rest after an exception. Save "
            "checkpoints more often."
        )
    if after is not None:
        return make_checkpoint(context, plan, get_state, None, None, after=after)
    run.loop.meter.flush()
    with run.loop.optimizer_states.whole():
        states = get_state()
    run.loop.optimizer_states.warn_of_lost(run.log)
    optimizers = states.get("optimizers", ())
    check_finite_weights(run.stack, run.loop.work, run.may_be_nonfinite, optimizers, state.global_step)
    run.refuse_diverged("No checkpoint was written.")
    loader_state = run.data.loader_state.get_state(within=state.steps_in_epoch > 0)
    begun = run.start.begun if run.start.begun is not None and run.start.begun.epoch == state.epoch else None
    begin = run.beginnings.old_states(begun, over=run.is_over)
    make = partial(make_checkpoint, pinned=pinned, everywhere=everywhere)
    made = make(context, plan, lambda: states, run.start.epoch_rng, loader_state, begin, run.describe())
    if not overrides_update_state(run.module):
        context.extras.warn_of_additions(run.log)
    samples = comparable_samples(run.data, within=begun is not None and not state.epoch_end)
    if samples:
        made.metadata = {**(made.metadata or {}), SAMPLES: samples}
    return made


def resume_evaluation(run: Run, checkpoint: Checkpoint) -> None:
    """Restore the states that an evaluation uses. Module state and counters of `checkpoint` are already restored."""
    if run.context.args.resume_mode == "full":
        with _waiting(run):
            restore_own_buffers(checkpoint, run.context)
            if extras := (checkpoint.trainer_state or {}).get(EXTRAS):
                run.context.extras.restore({**extras, "requires_grad": {}})  # READY expects the flags of the start
            run.events.update_state(checkpoint.callback_states)
        run.events.warn_of_other_weights(checkpoint.callback_states)


def resume_training(run: Run, checkpoint: Checkpoint, update_state: Callable[[Mapping[str, Any] | None], None]) -> None:
    """Restore the states of `checkpoint` that `resume_mode` asks for. The module state is already restored.

    Raises:
        CheckpointMismatchError: they belong to another optimizer, backend, data set or a shorter schedule.
    """
    # The order matters: checks come before the first change, and `LOAD_CHECKPOINT` sees all restored states.
    context, state, plan = run.context, run.state, run.data.plan
    mode, saved = context.args.resume_mode, checkpoint.trainer_state or {}
    if mode == "weights":
        return
    if mode == "full":
        run.resumed_log = checkpoint.run_id, heads_in(checkpoint.metadata)
        check_resumable(checkpoint, context, plan, length_may_change=run.start.length_may_change)
        if state.steps_in_epoch:
            run.data.lengths.expected = (checkpoint.plan or {}).get("samples_per_epoch")
        run.start.saved_metadata = checkpoint.metadata
        run.loop.optimizer_states.same_settings = must_have_settings(checkpoint, context)
        changes = changes_at_resume(checkpoint, context, plan, run.describe())
        with _waiting(run):
            update_state(checkpoint.trainer_state)
        report_changes(changes + run.loop.optimizer_states.changes, context, complete=True)
    else:
        with _waiting(run):
            run.loop.update_state(saved, fresh_optimizers=False, log=run.log)
        report_changes(run.loop.optimizer_states.changes, context)
    restore_own_buffers(checkpoint, context)
    run.stack.update_state(checkpoint.trainer_backend_state or {})
    check_schedules(run.loop.schedules, plan, state)
    if mode != "full":
        return
    if checkpoint.history_state is not None:
        run.history.update_state(checkpoint.history_state)
    if "user" in saved:
        context.user_state.update_state(saved["user"])
    rng = rng_of_rank(checkpoint.rng_state, run.world, state)
    if rng is not None:
        if run.streams is None:  # older versions stored random states of private runs
            run.start.pending_rng, run.start.epoch_rng = rng["now"], rng["epoch"]
        run.beginnings.load(rng.get("begin"))
    restore_generators(context, (checkpoint.rng_state or {}).get("ranks", ()))
    run.data.loader_state.restore(saved.get("loaders"), run.world)
    run.saver.saved_at = (state.global_step, state.epoch)
    run.events.fire(Event.LOAD_CHECKPOINT, _restore_user_states(run, checkpoint, saved.get(EXTRAS)))


def _restore_user_states(run: Run, checkpoint: Checkpoint, extras: Mapping[str, Any] | None) -> Checkpoint:
    """Restore the module and the callbacks, and return the checkpoint for subscribers.

    The module is restored a second time, because `get_train_dataloader` was called for the plan after the first time.
    """
    with _waiting(run):
        restore_module(run.module, checkpoint)
        restore_own_buffers(checkpoint, run.context)
        run.context.extras.restore(extras)
        run.events.update_state(checkpoint.callback_states)
        if not run.events.has_foreign(Event.LOAD_CHECKPOINT):
            return checkpoint
        return replace(checkpoint, **materialized(states_of(checkpoint)))


def _waiting(run: Run) -> AbstractContextManager[None]:
    """A block in which each rank reads the checkpoint. The ranks wait for each other at its end."""
    return wait_for_all_ranks(run.world, LOADING, run.context.args.rank_zero_timeout_s)
