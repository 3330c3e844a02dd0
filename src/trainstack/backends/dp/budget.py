"""`Accountant` charges each private step before its noise is drawn."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from typing import Any

from trainstack.backends.dp.accounting import epsilon_of, merge_steps, steps_within
from trainstack.backends.dp.arguments import DifferentialPrivacyArguments, PrivacyPlan
from trainstack.backends.dp.epsilon import Entry
from trainstack.backends.dp.ledger import BLOCK, SpendLedger
from trainstack.backends.privacy_statement import round_up
from trainstack.errors import CheckpointMismatchError, PrivacyBudgetError, PrivacyLedgerError

_log = logging.getLogger("trainstack")

_FIXED = ("noise_multiplier", "sample_rate", "delta")
"""Parameters that must match on resume."""

NO_LEDGER = "steps of this run that were lost in a crash may not be counted, because its ledger was missing"


class Accountant:
    """Counts the steps of one run over all its resumes, and refuses the step that would exceed the budget.

    With a ledger, the count is the ledger's: the steps of every process that has gone on from a checkpoint of this run.
    If several do at the same time, each sees the others' blocks, and the budget may be exceeded by one; epsilon has it.
    In a run over several processes the main one holds the ledger; the others have none, count alike, and take over its
    `get_state` when a run is resumed.

    Args:
        plan: the mechanism and the budget.
        args: of which `allow_plan_change` and `on_unsafe` say what is accepted of a checkpoint.
        ledger: where steps are recorded before they are taken; None keeps the count in memory and checkpoints only.
    """

    def __init__(
        self, plan: PrivacyPlan, args: DifferentialPrivacyArguments, ledger: SpendLedger | None = None
    ) -> None:
        self.plan = plan
        self.run = secrets.token_hex(16)
        self.overrides: tuple[str, ...] = ()
        self._ledger = ledger
        self._args = args
        self._counted: list[Entry] = []
        self._beside: list[Entry] = []  # steps of other mechanisms than the plan's, with which
        self._searched = 0  # up to so many of the plan's were looked at,
        self._limit = 0  # and so many of those fit

    @property
    def history(self) -> list[Entry]:
        """All steps as (sigma, q, steps), one entry a mechanism."""
        return list(self._counted) if self._ledger is None else self._ledger.spent(self.run)

    @property
    def steps(self) -> int:
        """All steps, of all mechanisms, those lost in crashes included."""
        return _total(self.history)

    def epsilon(self) -> float:
        """An upper bound of what is spent so far, at the plan's delta; inf without noise."""
        plan = self.plan
        return epsilon_of(self.history, plan.delta, plan.accountant, eps_error=plan.eps_error)

    def allows(self, steps: int = 1) -> bool:
        """Whether `steps` more stay within the budget. The first call may take seconds, the others microseconds."""
        return self._room(steps) >= steps

    def _room(self, steps: int) -> int:
        """How many steps fit, of which `steps` are certainly looked at."""
        plan = self.plan
        if plan.max_epsilon is None:
            return steps + BLOCK
        mechanism = (plan.noise_multiplier, plan.sample_rate)
        if self._ledger is not None and (reserved := self._ledger.reserved(self.run, *mechanism)) >= steps:
            return reserved  # they fitted when they were recorded, and everyone has counted them since
        return self._left(steps)

    def _left(self, steps: int) -> int:
        """How many steps fit, of which `steps` are certainly looked at, by the ledger's newest lines."""
        plan = self.plan
        mechanism = (plan.noise_multiplier, plan.sample_rate)
        assert plan.max_epsilon is not None
        history = self.history
        taken = sum(entry[2] for entry in history if entry[:2] == mechanism)
        beside = [entry for entry in history if entry[:2] != mechanism]
        if beside != self._beside or taken + steps > self._searched:
            self._beside, self._searched = beside, max(taken + steps, plan.planned_steps)
            self._limit = steps_within(
                plan.max_epsilon, beside, *mechanism, plan.delta, plan.accountant, at_most=self._searched
            )
        return self._limit - taken

    def steps_allowed(self, steps: int) -> int:
        """How many of the next `steps` steps fit into the budget."""
        return steps if self.plan.max_epsilon is None else max(0, min(steps, self._left(steps)))

    def exhausted_reason(self) -> str:
        """What the budget was and what was spent, when no further step fits."""
        return (
            f"The privacy budget is spent: epsilon is {round_up(self.epsilon())} after {self.steps} steps, and one "
            f"more would exceed max_epsilon={self.plan.max_epsilon}. Keep the model as it is, or decide on a larger "
            "budget: max_epsilon=... in DifferentialPrivacyArguments."
        )

    def charge(self) -> None:
        """Spend one step. Call it before the noise is drawn; when it raises, nothing was spent and no step may follow.

        Raises:
            PrivacyBudgetError: the step would exceed the budget.
            PrivacyLedgerError: the step could not be recorded.
        """
        plan, room = self.plan, self._room(1)
        if room < 1:
            raise PrivacyBudgetError(self.exhausted_reason())
        if self._ledger is not None:
            self._ledger.charge(self.run, plan.noise_multiplier, plan.sample_rate, at_most=room)
        self._counted = merge_steps([*self._counted, (plan.noise_multiplier, plan.sample_rate, 1)])

    def settle(self) -> None:
        """Hand back what the ledger recorded ahead: call it at checkpoints and at a clean end."""
        if self._ledger is not None:
            self._ledger.settle()

    def on_fresh_start(self, *, retry: bool) -> None:
        """Begin without a checkpoint; `retry` if earlier starts of this run may have ended before the first one.

        Then the steps of the run that the ledger saw last are this run's: nothing was saved of them, but somebody may
        have seen their results. Steps of other runs are not counted, and the log says so.

        Raises:
            PrivacyLedgerError: the ledger is damaged.
        """
        if self._ledger is None or not (runs := self._ledger.runs()):
            return
        path = self._ledger.path
        if retry:
            self.run = next(iter(runs))
            _log.warning(
                "there is no checkpoint to go on from, but the privacy ledger %s has %d steps of earlier starts, which "
                "count as steps of this run. If it is another one, write resume=False or a new output_dir.",
                path,
                runs[self.run],
            )
        others = sum(steps for run, steps in runs.items() if run != self.run)
        if others:
            _log.warning(
                "the privacy ledger %s has %d steps of other runs, which the privacy statement of this one does not "
                "include. If they were on the same data, their epsilons add up.",
                path,
                others,
            )

    def get_state(self) -> dict[str, Any]:
        """Plain numbers and text for a checkpoint. No random state: that is never stored."""
        return {
            "run": self.run,
            "plan": {name: getattr(self.plan, name) for name in _FIXED},
            "history": [list(entry) for entry in self.history],
            "overrides": list(self.overrides),
        }

    def update_state(self, state: Mapping[str, Any] | None) -> None:
        """Go on from `get_state`'s result, and from what the ledger knows beyond it.

        Raises:
            CheckpointMismatchError: `state` is missing or incomplete, or its plan is another one.
            PrivacyLedgerError: the ledger does not know this run, or knows less of it than the checkpoint.
        """
        if not state or not {"run", "plan", "history", "overrides"} <= state.keys():
            raise CheckpointMismatchError(
                "The checkpoint says nothing of what was spent, so epsilon of its steps is unknown. Resume from one "
                "that a private run has written, or begin afresh with the model alone if it never saw private data."
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
        if self._ledger is not None and (missing := _beyond(self._ledger.spent(run), history)):
            if self._args.on_unsafe != "report":
                raise PrivacyLedgerError(
                    f"The privacy ledger {self._ledger.path} lacks {_total(missing)} of the {_total(history)} steps "
                    "before this checkpoint, so it cannot know how many came after it. Copy the ledger file of the run "
                    "to there, in its latest state; or write on_unsafe='report' and go on without a guarantee."
                )
            self._ledger.carry(run, missing)
            overrides = tuple(dict.fromkeys((*overrides, NO_LEDGER)))
        self.run, self.overrides, self._counted = run, overrides, history
        lost = self.steps - _total(history)
        if lost:
            _log.warning(
                "%d private steps beyond the checkpoint are spent as well: the ledger has them, from a run that was "
                "cut short or from another one that went on from this run",
                lost,
            )


def _beyond(known: list[Entry], history: list[Entry]) -> list[Entry]:
    """The part of `history` that `known` lacks."""
    have = {(sigma, q): steps for sigma, q, steps in known}
    lacking = [(sigma, q, steps - have.get((sigma, q), 0)) for sigma, q, steps in history]
    return [entry for entry in lacking if entry[2] > 0]


def _total(history: list[Entry]) -> int:
    return sum(steps for _, _, steps in history)
