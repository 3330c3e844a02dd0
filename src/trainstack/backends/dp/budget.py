"""`Accountant` charges each private step before its noise is drawn."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

from trainstack.backends.dp.accounting import epsilon_of, merge_steps, steps_within
from trainstack.backends.dp.arguments import DifferentialPrivacyArguments, PrivacyPlan
from trainstack.backends.dp.epsilon import Entry
from trainstack.backends.dp.ledger import BLOCK, Clipped, SharedUse, SpendLedger
from trainstack.backends.privacy_statement import round_up
from trainstack.backends.workload import Workload
from trainstack.errors import CheckpointMismatchError, PrivacyBudgetError, PrivacyLedgerError

_log = logging.getLogger("trainstack")

_FIXED = ("noise_multiplier", "sample_rate", "delta")
"""Parameters that must match on resume."""

NO_LEDGER = "steps of this run that were lost in a crash may not be counted, because its ledger was missing"


OLD_LEDGER = "steps of this run may not be counted, because its ledger was an older copy or another one"


def open_accountant(
    work: Workload, plan: PrivacyPlan, args: DifferentialPrivacyArguments, own_ledger: str | PathLike[str] | None
) -> Accountant:
    """The accountant of a run, which charges `args.ledger` or else `own_ledger`; on the main process only.

    Args:
        work: of the run.
        plan: its mechanism and budget.
        args: the arguments of the user.
        own_ledger: the file in the run's folder; None if it has no folder.
    """
    norms = args.per_sample_max_grad_norm
    limits = ", ".join(f"{norm:g}" for norm in ([norms] if isinstance(norms, int | float) else norms))
    clip = f"{limits}{' at first' if args.clipping == 'adaptive' else ''} ({args.clipping})"
    own = SpendLedger(own_ledger) if own_ledger is not None and work.world.is_main else None
    if args.ledger is None or not work.world.is_main:
        return Accountant(plan, args, own, clip=clip)
    use = SharedUse(
        name=args.dataset_name,
        records=plan.dataset_size,
        budget=None if args.ledger_budget is None else (float(args.ledger_budget), plan.delta),
        folder=None if work.run_dir is None else os.path.realpath(work.run_dir),
    )
    return Accountant(plan, args, SpendLedger(args.ledger, shared=use), clip=clip, earlier_ledger=own)


class Limit:
    """The number of steps of one mechanism that fit into a budget; computed again only if other steps were charged.

    Args:
        epsilon: of the budget.
        delta: of the budget.
        plan: the mechanism, the accountant, and the number of planned steps.
    """

    epsilon: float
    delta: float

    def __init__(self, epsilon: float, delta: float, plan: PrivacyPlan) -> None:
        self.epsilon, self.delta, self._plan = epsilon, delta, plan
        self._others: list[Entry] = []  # the steps of other mechanisms in the last computation,
        self._searched = 0  # the largest number of the plan's steps in it,
        self._limit = 0  # and its result: the number of these that fit

    def left(self, history: list[Entry], steps: int) -> int:
        """The number of steps that fit after `history`. The search covers at least `steps` of them."""
        plan = self._plan
        mechanism = (plan.noise_multiplier, plan.sample_rate)
        taken = sum(entry[2] for entry in history if entry[:2] == mechanism)
        others = [entry for entry in history if entry[:2] != mechanism]
        if others != self._others or taken + steps > self._searched:
            self._others, self._searched = others, max(taken + steps, plan.planned_steps)
            self._limit = steps_within(
                self.epsilon, others, *mechanism, self.delta, plan.accountant, at_most=self._searched
            )
        return self._limit - taken


class Accountant:
    """Counts the steps of one run over all its resumes, and refuses the step that would exceed a budget.

    With a ledger, the count is the ledger's: the steps of every process that has continued from a checkpoint of this
    run. If several do at the same time, each checks the budget and records its block under one lock, so that together
    they stay within the budget. The ledger may have a budget for all runs on the dataset. In a run over several
    processes the main one holds the ledger; the others have none, count the same steps, and load its `get_state` when a
    run is resumed.

    Args:
        plan: the mechanism and the budget.
        args: `allow_plan_change` and `on_unsafe` decide which checkpoints are accepted.
        ledger: records steps before they are taken; None keeps the count in memory and checkpoints only.
        clip: the description of the clipping, for statements.
        earlier_ledger: the ledger of the run's folder, if `ledger` is that of a dataset. The steps of a run that began
            with the former are moved to the latter.
    """

    plan: PrivacyPlan
    clip: str
    run: str
    initial_weights: str

    def __init__(
        self,
        plan: PrivacyPlan,
        args: DifferentialPrivacyArguments,
        ledger: SpendLedger | None = None,
        *,
        clip: str = "",
        earlier_ledger: SpendLedger | None = None,
    ) -> None:
        self.plan, self.clip = plan, clip
        self.run = secrets.token_hex(16)
        self.overrides: tuple[str, ...] = ()
        self.notes: tuple[str, ...] = ()
        """Lines on the limits of the guarantee, by the options of this start and the ledger."""
        self.before: list[Entry] = []
        """Steps of other runs on the weights that this one began with."""
        self.initial_weights = "as the module had them; earlier training of them is not known"
        self.unused: list[Entry] = []
        """Planned steps that chosen stops omitted, which count as long as no later start takes them."""
        self.publish: Callable[[list[Entry]], None] | None = None
        """Called with the steps that the statement on the disk has to cover, before the first of them is recorded."""
        self._ledger, self._earlier_ledger = ledger, earlier_ledger
        self._args = args
        self._counted: list[Clipped] = []
        self._left_in_plan = 0
        self._plan_is_stated = True
        self._stated: list[Entry] = []
        self._own_limit = None if plan.max_epsilon is None else Limit(plan.max_epsilon, plan.delta, plan)
        self._shared_limit: Limit | None = None

    @property
    def mechanism(self) -> tuple[float, float]:
        """Noise multiplier and sampling rate of the plan."""
        return self.plan.noise_multiplier, self.plan.sample_rate

    @property
    def ledger(self) -> SpendLedger | None:
        """Records the steps; None on all processes except for the main one."""
        return self._ledger

    @property
    def history(self) -> list[Entry]:
        """All steps as (sigma, q, steps), one entry a mechanism, including earlier steps on the same weights."""
        return merge_steps([*self.before, *self._own])

    def last_history(self) -> list[Entry]:
        """`history`, also if the ledger no longer exists."""
        try:
            return self.history
        except PrivacyLedgerError:
            return merge_steps([*self.before, *(entry[:3] for entry in self._counted)])

    @property
    def clippings(self) -> list[Clipped]:
        """The steps of this run, with the clipping of their gradients."""
        return list(self._counted) if self._ledger is None else self._ledger.spent_by_clipping(self.run)

    @property
    def _own(self) -> list[Entry]:
        return merge_steps([entry[:3] for entry in self.clippings])

    @property
    def steps(self) -> int:
        """The number of steps of all mechanisms, including steps lost in crashes."""
        return _total(self.history)

    def epsilon(self) -> float:
        """An upper bound of the epsilon spent so far, at the plan's delta; inf without noise."""
        return self.get_epsilon(self.plan.delta)

    def get_epsilon(self, delta: float) -> float:
        """An upper bound of the epsilon spent so far, at any delta. opacus has the same name."""
        return epsilon_of(self.history, delta, self.plan.accountant, eps_error=self.plan.eps_error)

    def allows(self, steps: int = 1) -> bool:
        """Whether `steps` more stay within the budget. The first call may take seconds, the others microseconds."""
        if self._ledger is not None and self._ledger.reserved(self.run, *self.mechanism, self.clip) >= steps:
            return True  # they fitted when they were recorded, and all processes have counted them since
        return self._room(steps) >= steps

    def _room(self, steps: int) -> int:
        """The number of steps that fit, by the ledger's newest lines; see `Limit.left`."""
        return min((limit.left(history, steps) for limit, history in self._limits()), default=steps + BLOCK)

    def _limits(self) -> Iterator[tuple[Limit, list[Entry]]]:
        """The budgets in force, each with the steps that count against it."""
        if self._own_limit is not None:
            yield self._own_limit, merge_steps([*self.history, *self._left_behind()])
        if self._ledger is None or self._ledger.shared is None:
            return
        history = merge_steps([*self._ledger.spent(), *self._ledger.unused(besides=self.run), *self._left_behind()])
        budget = self._ledger.budget or self._ledger.shared.budget
        if budget is not None:
            if self._shared_limit is None or budget != (self._shared_limit.epsilon, self._shared_limit.delta):
                self._shared_limit = Limit(*budget, self.plan)
            yield self._shared_limit, history

    def steps_allowed(self, steps: int) -> int:
        """The number of the next `steps` steps that fit into the budget."""
        return max(0, min(steps, self._room(steps)))

    def exhausted_reason(self) -> str:
        """A sentence with the budget and the spent epsilon, for the case that no further step fits."""
        plan, ledger = self.plan, self._ledger
        limit = next((limit for limit, history in self._limits() if limit.left(history, 1) < 1), self._own_limit)
        if ledger is not None and limit is not None and limit is self._shared_limit:
            spent = epsilon_of(ledger.spent(), limit.delta, plan.accountant)
            return (
                f"The budget of the privacy ledger {ledger.path} is spent: epsilon is {round_up(spent)} at delta "
                f"{limit.delta:g} after the steps of {len(ledger.runs())} runs, and one more would exceed "
                f"{limit.epsilon:g}. Keep the models as they are, or decide on a larger budget for the dataset: "
                "trainstack privacy ledger FILE --budget EPSILON --delta DELTA."
            )
        is_target = self._args.target_epsilon is not None and self._args.max_epsilon is None
        larger = "max_epsilon=... in DifferentialPrivacyArguments"
        if is_target:
            noise = self.history[-1][0] if self.history else plan.noise_multiplier
            larger = (
                "in DifferentialPrivacyArguments, write a larger target_epsilon with allow_plan_change=True, which "
                f"calibrates the noise again, or noise_multiplier={noise!r} with max_epsilon=..., which keeps the noise"
            )
        return (
            f"The privacy budget is spent: epsilon is {round_up(self.epsilon())} after {self.steps} steps, and one "
            f"more would exceed {'target' if is_target else 'max'}_epsilon={plan.max_epsilon}. Keep the model as it "
            f"is, or decide on a larger budget: {larger}."
        )

    def announce_steps(self, steps: int) -> None:
        """The next `steps` steps are planned; `publish` is called before the first charge or remark.

        Until then a start can be refused, and the statement of the earlier steps remains on the disk.
        """
        self._left_in_plan, self._plan_is_stated = steps, False

    def _state_plan(self) -> None:
        if not self._plan_is_stated:
            self.plan_steps(self._left_in_plan)

    def plan_steps(self, steps: int) -> list[Entry]:
        """The next `steps` steps are planned; returns all steps including them, and publishes these."""
        self._left_in_plan, self._plan_is_stated = steps, True
        mechanism, unused = self.mechanism, merge_steps(self.unused)
        counted = max(steps, *(entry[2] for entry in unused if entry[:2] == mechanism), 0)
        self._stated = merge_steps([*self.history, *self._left_behind(), (*mechanism, counted)])
        if self.publish is not None:
            self.publish(self._stated)
        return self._stated

    def charge(self) -> None:
        """Spend one step. Call it before the noise is drawn. If it raises, nothing was spent, and no step may follow.

        Raises:
            PrivacyBudgetError: the step would exceed the budget.
            PrivacyLedgerError: the step could not be recorded.
        """
        mechanism = self.mechanism
        self._state_plan()  # outside of the lock of the ledger, because epsilon can take seconds
        if self._ledger is None:
            is_charged = self._room(1) >= 1
        else:
            is_charged = self._ledger.charge(
                self.run, *mechanism, self.clip, room=self._steps_to_record, void=self.overrides, notes=self.notes
            )
        if not is_charged:
            raise PrivacyBudgetError(self.exhausted_reason())
        self._left_in_plan -= 1
        self.unused = [
            (*entry[:2], entry[2] - 1) if entry[:2] == mechanism else entry
            for entry in self.unused
            if entry[:2] != mechanism or entry[2] > 1
        ]
        self._counted = _merged([*self._counted, (*mechanism, 1, self.clip)])

    def _steps_to_record(self) -> int:
        """The number of steps to record ahead: at most those that fit, and at most the rest of the plan."""
        planned = self._left_in_plan if self._left_in_plan > 0 else BLOCK
        room = min(self._room(1), planned, BLOCK)
        if room > 0 and self.publish is not None:
            after = merge_steps([*self.history, (*self.mechanism, room)])
            if _beyond(self._stated, after):  # other processes charge this run too, or it is longer than its plan
                self.plan_steps(max(self._left_in_plan, 4 * BLOCK))
        return room

    def void(self, reason: str) -> None:
        """Record at once in the ledger and the statement that nothing is guaranteed from now on, with the reason.

        Raises:
            PrivacyLedgerError: it cannot be recorded.
        """
        if reason not in self.overrides:
            self.overrides = (*self.overrides, reason)
            self._remark(void=reason)

    def note(self, text: str) -> None:
        """Record at once in the ledger and the statement that the guarantee does not cover `text`.

        Raises:
            PrivacyLedgerError: it cannot be recorded.
        """
        if text not in self.notes:
            self.notes = (*self.notes, text)
            self._remark(note=text)

    def _remark(self, *, void: str = "", note: str = "") -> None:
        self._state_plan()
        try:
            if self._ledger is not None and self.publish is not None:
                self._ledger.remark(self.run, *self.mechanism, void=void, note=note)
        finally:
            if self.publish is not None:
                self.publish(self._stated)

    def plan_unused(self, steps: int) -> None:
        """Record that a chosen stop omits `steps` planned steps, which count in all statements of the run from now on.

        Raises:
            PrivacyLedgerError: it cannot be recorded.
        """
        mechanism = self.mechanism
        self.unused = [*self._left_behind(), *([(*mechanism, steps)] if steps else [])]
        if self._ledger is not None and steps:
            self._ledger.settle()
            taken = sum(entry[2] for entry in self._own if entry[:2] == mechanism)
            self._ledger.remark(self.run, *mechanism, planned=taken + steps)

    def find_unused(self, known: Iterable[Sequence[float]] = ()) -> None:
        """Find the steps that earlier chosen stops omitted and no start has taken since, in the ledger or `known`."""
        recorded = [] if self._ledger is None else self._ledger.unused(self.run)
        most = {entry[:2]: entry for entry in sorted([*merge_steps(known), *recorded], key=lambda entry: entry[2])}
        self.unused = merge_steps(most.values())

    def _left_behind(self) -> list[Entry]:
        """`unused` of earlier plans. No step of the current plan replaces one of these."""
        return [entry for entry in self.unused if entry[:2] != self.mechanism]

    def settle(self) -> None:
        """Return the steps that the ledger recorded ahead: call it at checkpoints and at a normal end."""
        if self._ledger is not None:
            self._ledger.settle()

    def on_fresh_start(self, *, retry: bool) -> None:
        """Begin without a checkpoint; `retry` if earlier starts of this run may have ended before the first one.

        Then the steps of the last run of the ledger in this folder count for this run: they were not saved, but their
        results may have been seen. A ledger of a dataset has the sum over all runs; that of a folder counts no steps of
        other runs, and the log says so.

        Raises:
            PrivacyLedgerError: the ledger is damaged, or that of another dataset.
        """
        if self._ledger is None:
            return
        self._check_ledger()
        if retry and self._earlier_ledger is not None:
            run = self._earlier_ledger.last_run_in(None)
            if run is not None and run not in self._ledger.runs() and run not in self._earlier_ledger.moved:
                self._ledger.carry_from(self._earlier_ledger, run)
        if not (runs := self._ledger.runs()):
            return
        path, shared = self._ledger.path, self._ledger.shared
        earlier = self._ledger.last_run_in(None if shared is None else shared.folder) if retry else None
        if earlier is not None:
            self.run = earlier
            _log.warning(
                "there is no checkpoint to resume from, but the privacy ledger %s has %d steps of earlier starts. They "
                "count as steps of this run. If it is another one, write resume=False or a new output_dir.",
                path,
                runs[self.run],
            )
            self._take_remarks()
        others = sum(steps for run, steps in runs.items() if run != self.run)
        if others and shared is None:
            _log.warning(
                "the privacy ledger %s has %d steps of other runs, which the privacy statement of this one does not "
                "include. If they were on the same data, their epsilons add up.",
                path,
                others,
            )

    def _take_remarks(self) -> None:
        """Copy the reasons and notes that the ledger has for the run."""
        assert self._ledger is not None
        reason = self._ledger.voided.get(self.run, "")
        stated = "; ".join(self.overrides)
        if reason and any(part not in stated for part in reason.split("; ")):
            self.overrides = (*self.overrides, reason)
        self.notes = tuple(dict.fromkeys((*self.notes, *self._ledger.notes.get(self.run, ()))))

    def _check_ledger(self) -> None:
        """Compare the ledger's dataset with this run's, and warn of copies."""
        assert self._ledger is not None
        self._ledger.check_use()
        for words in self._ledger.copies(self.run if self._ledger.shared is None else None):
            _log.warning("the privacy ledger %s: %s", self._ledger.path, words)

    def start_from(self, words: str, history: Iterable[Sequence[float]], overrides: Sequence[str]) -> None:
        """Begin with weights that were trained before.

        Args:
            words: their origin, for the statement.
            history: the private steps of their training, which count as steps on these weights.
            overrides: the reasons why their training guarantees nothing.
        """
        self.initial_weights = words
        self.before = merge_steps([*self.before, *history])
        self.overrides = tuple(dict.fromkeys((*self.overrides, *overrides)))
        if self.publish is not None:
            self.plan_steps(self._left_in_plan)

    def get_state(self) -> dict[str, Any]:
        """Plain numbers and text for a checkpoint. No random state: that is never stored."""
        state: dict[str, Any] = {
            "run": self.run,
            "plan": {name: getattr(self.plan, name) for name in _FIXED},
            "history": [list(entry) for entry in self._own],
            "clippings": [list(entry) for entry in self.clippings],
            "before": [list(entry) for entry in self.before],
            "initial_weights": self.initial_weights,
            "overrides": list(self.overrides),
            "unused": [list(entry) for entry in self.unused],
        }
        if self._ledger is not None:
            state["ledger"] = {"address": self._ledger.path, "head": self._ledger.head()}
        return state

    def update_state(self, state: Mapping[str, Any] | None) -> None:
        """Continue from the result of `get_state`, and from later steps in the ledger.

        Raises:
            CheckpointMismatchError: `state` is missing or incomplete, or its plan is another one.
            PrivacyLedgerError: the ledger lacks this run, or has less of it than the checkpoint.
        """
        if not state or not {"run", "plan", "history", "overrides"} <= state.keys():
            raise CheckpointMismatchError(
                "The checkpoint does not have the steps that were spent, so their epsilon is unknown. Resume from one "
                "of a private run, or start a new run with the model alone if it never saw private data."
            )
        earlier, now = state["plan"], {name: getattr(self.plan, name) for name in _FIXED}
        changed = [
            f"{name} was {earlier.get(name)}, is {value}" for name, value in now.items() if earlier.get(name) != value
        ]
        if changed and not self._args.allow_plan_change:
            raise CheckpointMismatchError(
                f"The checkpoint was trained under another privacy plan: {'; '.join(changed)}. Resume with the same "
                "arguments (target_epsilon gives another noise for other epochs or batches), or write "
                "allow_plan_change=True: then both parts are accounted for."
            )
        history = merge_steps(state["history"])
        overrides = tuple(dict.fromkeys((*self.overrides, *map(str, state["overrides"]))))
        run = str(state["run"])
        if self._ledger is not None:
            lacking = self._find_in_ledger(run, history, state.get("ledger") or {})
            overrides = tuple(dict.fromkeys((*overrides, *lacking)))
        self.run, self.overrides = run, overrides
        self.before = merge_steps(state.get("before", ()))
        self.initial_weights = str(state.get("initial_weights", "of a checkpoint that does not say"))
        clippings = state.get("clippings") or [[*entry, ""] for entry in history]
        self._counted = _merged([(float(sigma), float(q), int(n), str(clip)) for sigma, q, n, clip in clippings])
        self.find_unused(state.get("unused", ()))
        if self._ledger is not None:
            self._check_ledger()
            self._take_remarks()
        lost = _total(self._own) - _total(history)
        if lost:
            _log.warning(
                "%d private steps after the checkpoint are spent too: the ledger has them, from a run that was "
                "interrupted or from another one that was resumed from this run",
                lost,
            )

    def _find_in_ledger(self, run: str, history: list[Entry], saved: Mapping[str, Any]) -> list[str]:
        """Check that the ledger has the `history` of a checkpoint and its newest line.

        Returns:
            The reasons why nothing is guaranteed; empty if the ledger has both.

        Raises:
            PrivacyLedgerError: it lacks one of them, and `on_unsafe` is not "report".
        """
        assert self._ledger is not None
        ledger, earlier, head = self._ledger, self._earlier_ledger, str(saved.get("head", ""))
        began_there = earlier is not None and run not in ledger.runs() and earlier.holds(head)
        if earlier is not None and began_there and not _beyond(earlier.spent(run), history):
            ledger.carry_from(earlier, run, head)  # the run charges the ledger of its dataset from now on
            return []
        missing = _beyond(ledger.spent(run), history)
        moved = ledger.moved.get(run)
        if not missing and not moved and ledger.holds(head):
            if earlier is not None and ledger.was_carried(head):
                earlier.leave(run, ledger.path)  # killed between the two records
            return []
        if not missing and not moved and earlier is not None and earlier.holds(head) and run in earlier.moved:
            return []  # another checkpoint from before that
        if moved and self._args.on_unsafe != "report":
            raise PrivacyLedgerError(
                f"The privacy ledger {ledger.path} says that this run charges {moved} since, so it cannot know how "
                f"many steps came after that. Please write ledger={moved!r} in DifferentialPrivacyArguments, or "
                "on_unsafe='report' to continue without a guarantee."
            )
        if self._args.on_unsafe != "report":
            what = (
                f"lacks {_total(missing)} of the {_total(history)} steps before this checkpoint"
                if missing
                else "lacks the newest line that this checkpoint names: it is an older copy or another ledger"
            )
            place = saved.get("address", "in the folder of the run")
            raise PrivacyLedgerError(
                f"The privacy ledger {ledger.path} {what}, so it cannot know how many came after it. Copy the ledger "
                f"file of the run to there, in its latest state (it was {place}); for a second branch of the run "
                "write ledger=... with the path of that ledger, so that both charge it; or write on_unsafe='report' "
                "and go on without a guarantee."
            )
        ledger.carry(run, missing)
        return [NO_LEDGER if missing else OLD_LEDGER]


def _beyond(known: list[Entry], history: list[Entry]) -> list[Entry]:
    """The part of `history` that `known` lacks."""
    have = {(sigma, q): steps for sigma, q, steps in known}
    lacking = [(sigma, q, steps - have.get((sigma, q), 0)) for sigma, q, steps in history]
    return [entry for entry in lacking if entry[2] > 0]


def _merged(entries: Iterable[Clipped]) -> list[Clipped]:
    """`entries` with the sums of steps of equal mechanisms and clipping."""
    total: dict[tuple[float, float, str], int] = {}
    for sigma, q, steps, clip in entries:
        total[sigma, q, clip] = total.get((sigma, q, clip), 0) + steps
    return [(sigma, q, steps, clip) for (sigma, q, clip), steps in total.items()]


def _total(history: list[Entry]) -> int:
    return sum(steps for _, _, steps in history)
