"""The statement of a private run, from its plan and its steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from trainstack.backends.dp.accounting import LARGEST_ERROR, epsilon_of, merge_steps
from trainstack.backends.dp.arguments import DifferentialPrivacyArguments, PrivacyPlan
from trainstack.backends.dp.epsilon import Entry, fixed_order_epsilon, opacus_version
from trainstack.backends.privacy_statement import PrivacyStatement, round_up
from trainstack.errors import PrivacyLedgerError

if TYPE_CHECKING:
    from trainstack.backends.dp.budget import Accountant
    from trainstack.backends.dp.ledger import SpendLedger

COVERED = ("the weights after every step, all of them together, and everything that is computed from them",)
_OF_PLAN = ("expected_batch_size", "dataset_size", "planned_steps", "max_epsilon")
SEEDED = "whoever knows debug_seed knows which items were sampled and what the noise was"
EXPOSED = "hooks and events were given records and outputs of training (expose_records=True)"
NOT_COVERED = (
    "validation and tests on private data",
    "choices between runs that private data guided, such as hyper-parameters",
    "statistics of the data that prepare it",
    "values that train_step, hooks, callbacks, functions write, save, set or decide by records or without noise",
    "the gradient mode, errors, warnings and times, which depend on private records",
    "records kept in global variables, closures, files, attributes of more than 1 MiB or the workers of a loader",
)
_LOGGED = "the training loss and values that train_step logs, which were recorded without noise"
_ALONE = "each record's loss is computed from that record alone, by construction of the gradient mode"
_COMPARED = (
    "each step compares the loss of the batch with the mean of the losses of its records, in value and slope, and "
    "opacus' gradients with autograd, to a thousandth: hooks those of all records, ghost the norm of one"
)
LOSSES = {"bookkeeping": _ALONE, "vmap": _ALONE, "loop": _ALONE, "hooks": _COMPARED, "ghost": _COMPARED}
"""The reason why one record cannot change the loss of another, by gradient mode."""
_ONE_RECORD = "data set and collate_fn make each sample of one record"
_PERSONS = "a person with k items has k times epsilon, by group privacy, and a larger delta"
_SCHEDULERS = "schedules, early stopping and the choice of a checkpoint are given public and covered values only"


def private_statement(
    plan: PrivacyPlan,
    args: DifferentialPrivacyArguments,
    history: Iterable[Sequence[float]],
    *,
    max_grad_norm: Sequence[float],
    grad_mode: str,
    world_size: int,
    overrides: Sequence[str] = (),
    not_covered: Sequence[str] = (),
    accountant: Accountant | None = None,
    status: str | None = None,
    unused_steps: int = 0,
) -> PrivacyStatement:
    """The statement of a run with a privacy layer.

    Args:
        plan: its constants.
        args: the arguments of the user; with a debug seed there is no guarantee.
        history: (noise multiplier, sampling rate, steps) of all steps so far.
        max_grad_norm: C, or one number a layer; with adaptive clipping that of now.
        grad_mode: the way in which per-sample gradients were computed; never "auto".
        world_size: processes.
        overrides: every other reason for which the guarantee does not hold.
        not_covered: further lines on the limits of the guarantee.
        accountant: has the ledger, the earlier clippings and the initial weights.
        status: "running" if `history` has the planned steps.
        unused_steps: the number of steps of `history` that were planned and not taken, because training was stopped.
    """
    entries = tuple(merge_steps(history))
    epsilon = epsilon_of(entries, plan.delta, plan.accountant, eps_error=plan.eps_error)
    found = {SEEDED: args.debug_seed is not None, "steps were taken without noise": math.isinf(epsilon)}
    reasons = tuple(dict.fromkeys((*overrides, *(reason for reason, holds in found.items() if holds))))
    return PrivacyStatement(
        epsilon=None if reasons else epsilon,
        delta=None if reasons else plan.delta,
        overrides=reasons,
        accountant=plan.accountant,
        eps_error=plan.eps_error,
        history=entries,
        clipping=args.clipping,
        max_grad_norm=tuple(float(norm) for norm in max_grad_norm),
        **{name: getattr(plan, name) for name in _OF_PLAN},
        stopped_by_budget=_is_stopped(plan, entries),
        fixed_order_epsilon=None if reasons else fixed_order_epsilon(entries, plan.delta),
        randomness=_randomness(args),
        grad_mode=grad_mode,
        world_size=world_size,
        covered=() if reasons else _covered(args, unused_steps),
        not_covered=tuple(dict.fromkeys((*_not_covered(args), *not_covered))),
        **({} if accountant is None else _of_account(accountant)),
        status=status,
        notes=_notes(accountant, grad_mode),
        versions=_versions(plan.accountant),
    )


def _covered(args: DifferentialPrivacyArguments, unused_steps: int) -> tuple[str, ...]:
    found = list(COVERED)
    if unused_steps:
        found.append(f"the moment of the stop: {unused_steps} planned steps count although they were not taken")
    if args.telemetry:
        found.append(f"noisy telemetry: {', '.join(args.telemetry)}")
    if args.public_validation:
        found.append("validation and tests, whose data were declared public")
    return tuple(found)


def option_notes(args: DifferentialPrivacyArguments) -> tuple[str, ...]:
    """Limits of the guarantee by the options of one start; they stay, also if the next start has other options."""
    return ((_LOGGED,) if args.log_train_loss else ()) + (() if args.public_validation else (NOT_COVERED[0],))


def _not_covered(args: DifferentialPrivacyArguments) -> tuple[str, ...]:
    rest = NOT_COVERED[1:] if args.public_validation else NOT_COVERED
    return (*((_LOGGED,) if args.log_train_loss else ()), *rest)


def _notes(accountant: Accountant | None, grad_mode: str) -> tuple[tuple[str, str], ...]:
    losses = LOSSES.get(grad_mode, _COMPARED)
    assumed = _ONE_RECORD if losses is _ALONE else f"{_ONE_RECORD}; no layer mixes records"
    notes = [("Persons", _PERSONS), ("Losses", losses), ("Assumed", assumed), ("Schedulers", _SCHEDULERS)]
    if accountant is None:
        return tuple(notes)
    notes.insert(1, ("Initial weights", accountant.initial_weights))
    ledger = accountant.ledger
    if ledger is not None and ledger.shared is not None:
        notes.append(("Dataset", ledger_words(ledger, accountant.plan.delta, accountant.plan.accountant)))
    if ledger is not None:
        notes += _other_runs(ledger, accountant.run)
        notes += [("Copies", words) for words in ledger.copies(accountant.run if ledger.shared is None else None)]
    return tuple(notes)


@cache  # reading the metadata of packages takes milliseconds, and a run makes several statements
def _versions(accountant: str) -> tuple[tuple[str, str], ...]:
    found = [("trainstack", version("trainstack")), ("torch", version("torch")), ("opacus", opacus_version())]
    return (*found, ("dp-accounting", version("dp-accounting"))) if accountant == "pld" else tuple(found)


def _of_account(accountant: Accountant) -> dict[str, Any]:
    ledger, plan = accountant.ledger, accountant.plan
    spent = None
    if ledger is not None and ledger.shared is not None and not ledger.voided:
        counted = merge_steps([*ledger.spent(), *ledger.unused()])
        spent = epsilon_of(counted, plan.delta, plan.accountant, eps_error=plan.eps_error)
    return {
        "run": accountant.run,
        "ledger": None if ledger is None else ledger.path,
        "ledger_epsilon": None if spent is None or math.isinf(spent) else spent,
        "before": tuple(accountant.before),
        "clippings": tuple(accountant.clippings),
    }


def restated(stated: Sequence[PrivacyStatement], ledger: SpendLedger) -> PrivacyStatement:
    """The newest of the `stated` statements of a run, with all that the others and the ledger know by now.

    Args:
        stated: those of one run, first the newest.
        ledger: has the steps of the run.

    Raises:
        PrivacyLedgerError: the ledger lacks steps of the run.
    """
    statement = joined(stated)
    run = str(statement.run)
    own = ledger.spent(run)
    known = sum(steps for _, _, steps in own)
    least = max(sum(entry[2] for entry in one.clippings) for one in stated)
    if known < least:
        raise PrivacyLedgerError(
            f"The privacy ledger {ledger.path} has {known} steps of this run, which had stated {least}: it is an "
            "older copy or another ledger. Put the newest one there."
        )
    history = tuple(merge_steps([*statement.before, *own, *ledger.unused(run)]))
    delta, accountant, error = statement.delta, statement.accountant or "prv", statement.eps_error or LARGEST_ERROR
    notes = [note for note in statement.notes if note[0] not in ("Dataset", "Other runs", "Copies")]
    together = None
    if ledger.dataset is not None and delta is not None:
        notes.append(("Dataset", ledger_words(ledger, delta, accountant)))
        spent = merge_steps([*ledger.spent(), *ledger.unused()])
        together = None if ledger.voided else epsilon_of(spent, delta, accountant, eps_error=error)
    notes += _other_runs(ledger, run)
    notes += [("Copies", words) for words in ledger.copies(None if ledger.dataset is not None else run)]
    said, reason = "; ".join(statement.overrides), ledger.voided.get(run, "")
    found = replace(
        statement,
        history=history,
        clippings=tuple(ledger.spent_by_clipping(run)),
        epsilon=None if delta is None else epsilon_of(history, delta, accountant, eps_error=error),
        fixed_order_epsilon=None if delta is None else fixed_order_epsilon(history, delta),
        status=None,
        ledger=ledger.path,
        ledger_epsilon=together,
        not_covered=tuple(dict.fromkeys((*statement.not_covered, *ledger.notes.get(run, ())))),
        notes=tuple(notes),
    )
    is_new = any(part not in said for part in reason.split("; "))
    return _void(found, (*statement.overrides, reason)) if is_new else found


def joined(stated: Sequence[PrivacyStatement]) -> PrivacyStatement:
    """The one of the statements of a run that counts most steps, the newest of those, with the limits of all."""
    overrides = tuple(dict.fromkeys(reason for one in stated for reason in one.overrides))
    lines = tuple(dict.fromkeys(line for one in stated for line in one.not_covered))
    found = replace(max(stated, key=lambda one: one.steps), not_covered=lines)
    return _void(found, overrides) if overrides else found


def _other_runs(ledger: SpendLedger, run: str) -> list[tuple[str, str]]:
    """The line on other runs in the ledger of a folder; that of a dataset has a line with their sum."""
    others = sum(steps for other, steps in ledger.runs().items() if other != run)
    if not others or ledger.dataset is not None or ledger.shared is not None:
        return []
    words = f"{others} steps of other runs in this ledger are not included; on the same data, their epsilons add up"
    return [("Other runs", words)]


def _void(statement: PrivacyStatement, reasons: tuple[str, ...]) -> PrivacyStatement:
    nothing: dict[str, Any] = dict.fromkeys(("epsilon", "delta", "fixed_order_epsilon", "ledger_epsilon"))
    return replace(statement, overrides=reasons, covered=(), **nothing)


def ledger_words(ledger: SpendLedger, delta: float, accountant: str) -> str:
    """The epsilon of all runs that charge `ledger` together, as a sentence."""
    runs, history = ledger.runs(), merge_steps([*ledger.spent(), *ledger.unused()])
    name = ledger.dataset[0] if ledger.dataset is not None and ledger.dataset[0] else "of the ledger"
    head = f"{sum(runs.values())} steps of {len(runs)} runs on the dataset {name} ({ledger.path})"
    if ledger.voided:
        return f"{head}, which guarantee nothing: {'; '.join(sorted(set(ledger.voided.values())))}"
    epsilon = epsilon_of(history, delta, accountant)
    budget = "no budget" if ledger.budget is None else f"budget epsilon {ledger.budget[0]:g} at {ledger.budget[1]:g}"
    shown = "infinite" if math.isinf(epsilon) else round_up(epsilon)
    return f"{head} have spent epsilon {shown} at delta {delta:g} together, until now; {budget}"


def _randomness(args: DifferentialPrivacyArguments) -> str:
    if args.debug_seed is not None:
        return "debug_seed, the same in every run"
    if args.secure:
        return (
            "every mask and every noise value from the operating system's entropy; train_step and data sets draw from "
            "generators that it seeds; no random state is in a file"
        )
    return (
        "generators seeded by the operating system, for masks, noise, train_step and data sets, independent of seeds "
        "that the script sets; no random state is in a file"
    )


def _is_stopped(plan: PrivacyPlan, entries: tuple[Entry, ...]) -> bool:
    if plan.max_epsilon is None:
        return False
    further = [*entries, (plan.noise_multiplier, plan.sample_rate, 1)]
    if epsilon_of(further, plan.delta, "rdp") <= plan.max_epsilon:
        return False  # microseconds, which are enough for most statements of a run
    return epsilon_of(further, plan.delta, plan.accountant, eps_error=plan.eps_error) > plan.max_epsilon
