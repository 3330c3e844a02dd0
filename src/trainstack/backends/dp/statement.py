"""The statement of a private run, from its plan and its steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from importlib.metadata import version

from trainstack.backends.dp.accounting import epsilon_of, merge_steps
from trainstack.backends.dp.arguments import DifferentialPrivacyArguments, PrivacyPlan
from trainstack.backends.dp.epsilon import Entry, fixed_order_epsilon, opacus_version
from trainstack.backends.privacy_statement import PrivacyStatement

COVERED = ("the weights after every step, all of them together, and whatever is computed from them",)
SEEDED = "whoever knows debug_seed knows which items were sampled and what the noise was"
EXPOSED = "hooks and events were given records and outputs of training (expose_records=True)"
NOT_COVERED = (
    "validation and tests on private data",
    "hyper-parameters, early stopping and the choice of a checkpoint, if private data guided them",
    "statistics of the data used to prepare it",
    "what train_step logs or returns, and callbacks write",
    "numbers that hooks and callbacks set in the module, if records decided them",
    "records kept in global variables, closures, files or the workers of a loader",
)


def private_statement(
    plan: PrivacyPlan,
    args: DifferentialPrivacyArguments,
    history: Iterable[Sequence[float]],
    *,
    max_grad_norm: Sequence[float],
    grad_mode: str,
    world_size: int,
    overrides: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> PrivacyStatement:
    """The statement of a run with a privacy layer.

    Args:
        plan: its constants.
        args: what the user wrote; a debug seed voids the guarantee.
        history: (noise multiplier, sampling rate, steps) of all steps so far.
        max_grad_norm: C, or one number a layer; with adaptive clipping that of now.
        grad_mode: how per-sample gradients were computed, "auto" resolved.
        world_size: processes.
        overrides: every other reason for which the guarantee does not hold.
        notes: what else the guarantee does not cover.
    """
    entries = tuple(merge_steps(history))
    epsilon = epsilon_of(entries, plan.delta, plan.accountant, eps_error=plan.eps_error)
    found = {SEEDED: args.debug_seed is not None, "steps were taken without noise": math.isinf(epsilon)}
    reasons = list(dict.fromkeys((*overrides, *(reason for reason, holds in found.items() if holds))))
    return PrivacyStatement(
        epsilon=None if reasons else epsilon,
        delta=None if reasons else plan.delta,
        overrides=tuple(reasons),
        accountant=plan.accountant,
        eps_error=plan.eps_error,
        history=entries,
        clipping=args.clipping,
        max_grad_norm=tuple(float(norm) for norm in max_grad_norm),
        expected_batch_size=plan.expected_batch_size,
        dataset_size=plan.dataset_size,
        planned_steps=plan.planned_steps,
        max_epsilon=plan.max_epsilon,
        stopped_by_budget=_is_stopped(plan, entries),
        fixed_order_epsilon=None if reasons else fixed_order_epsilon(entries, plan.delta),
        randomness=_randomness(args),
        grad_mode=grad_mode,
        world_size=world_size,
        covered=() if reasons else COVERED,
        not_covered=(*(("the training loss, which was logged",) if args.log_train_loss else ()), *NOT_COVERED, *notes),
        versions=(("trainstack", version("trainstack")), ("torch", version("torch")), ("opacus", opacus_version())),
    )


def _randomness(args: DifferentialPrivacyArguments) -> str:
    if args.debug_seed is not None:
        return "debug_seed, the same in every run"
    if args.secure:
        return "every mask and every noise value from the operating system's entropy"
    return "generators seeded by the operating system, not by the run's seed; never stored"


def _is_stopped(plan: PrivacyPlan, entries: tuple[Entry, ...]) -> bool:
    if plan.max_epsilon is None:
        return False
    further = [*entries, (plan.noise_multiplier, plan.sample_rate, 1)]
    if epsilon_of(further, plan.delta, "rdp") <= plan.max_epsilon:
        return False  # microseconds, which are enough for most statements of a run
    return epsilon_of(further, plan.delta, plan.accountant, eps_error=plan.eps_error) > plan.max_epsilon
