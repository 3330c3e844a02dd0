"""`LegReplay`: the comparison of a replay with the run, by step logs and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from trainstack.checkpointing import CheckpointInfo
from trainstack.errors import CheckpointError, ConfigurationError, LaunchError
from trainstack.replaying.comparison import Span, compare_to_tolerance, count_details, first_difference, parameter_of
from trainstack.replaying.recorded import Leg, RecordedRun, step_of
from trainstack.replaying.report import ReplayReport, StepDifference
from trainstack.replaying.stored import StoredStates, compare_checkpoints, quantity_of
from trainstack.step_log import StepLog, read_step_log


def read_logs(place: Path, size: int) -> list[StepLog]:
    """The logs that a replay has written; none if its processes failed earlier."""
    try:
        return [read_step_log(place / "run", rank) for rank in range(size)]
    except CheckpointError:
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class LegReplay:
    """Replayed steps.

    Attributes:
        recorded: the run.
        leg: the part of the run that contains them.
        span: the steps.
        begin: the checkpoint from which the replay began; None for the start of the run.
        stored: the checkpoints of the run within the span.
        logs: the step logs of the replay, by rank; none if its processes failed earlier.
        scratch: the folder of the replay.
        error: the error of its processes, if they failed.
    """

    recorded: RecordedRun
    leg: Leg
    span: Span
    begin: CheckpointInfo | None
    stored: tuple[CheckpointInfo, ...]
    logs: tuple[StepLog, ...]
    scratch: Path
    error: LaunchError | None

    def report(self, tolerance: float | None) -> ReplayReport:
        """Compare values with a tolerance if another number of processes replayed, otherwise all bits.

        Raises:
            LaunchError: the replay failed before a step differed.
            ConfigurationError: it ended before the last step.
        """
        report = ReplayReport(
            run=str(self.recorded.folder),
            backend=self.leg.start.backend,
            nproc=len(self.logs),
            first_step=self.span.first,
            last_step=self.span.last,
            began_from=None if self.begin is None else self.begin.name,
            mode=self.leg.end.mode,
        )
        if self.logs:
            report = self._compare_bits(report) if tolerance is None else self._compare_values(report, tolerance)
        if report.first_difference is None:
            self._check_complete()
        return report

    @property
    def _recorded_logs(self) -> tuple[StepLog, ...]:
        return self.recorded.logs[: self.leg.start.world_size]

    def _compare_values(self, report: ReplayReport, tolerance: float) -> ReplayReport:
        found, worst = compare_to_tolerance(self._recorded_logs, self.logs, self.span, tolerance)
        return replace(report, first_difference=found, tolerance=tolerance, largest_error=worst)

    def _compare_bits(self, report: ReplayReport) -> ReplayReport:
        found = self._at_the_start() or first_difference(self._recorded_logs, self.logs, self.span)
        states = compare_checkpoints(self.stored, self.scratch, self.recorded.logs[0].checkpoints)
        return replace(
            report,
            first_difference=self._with_parameter(found, states),
            details=count_details(self._recorded_logs[0], self.logs[0], self.span),
            checkpoints=tuple(states.same),
            damaged=tuple(states.damaged),
        )

    def _at_the_start(self) -> StepDifference | None:
        """The first weight that differs before the first step; None if all are equal or cannot be compared."""
        if not self.logs[0].segments or step_of(self.begin) != self.leg.base:
            return None
        one, other = (start.description.get("weights", {}) for start in (self.leg.start, self.logs[0].segments[-1]))
        name = next((name for name in one if other.get(name) != one[name]), None)
        if name is None:
            return None
        return StepDifference(
            step=self.leg.base + 1,
            quantity="weights at the start",
            rank=0,
            recorded=f"{name} with digest {one[name]}",
            replayed=f"{name} with digest {other[name]}" if name in other else f"no {name}",
            parameter=name,
            shown_by="The weights differ before the first step. Is the module made with the seed of the run, and after "
            "seed_everything(args.seed)?",
        )

    def _with_parameter(self, found: StepDifference | None, states: StoredStates) -> StepDifference | None:
        """`found` with the first parameter that differs; the difference of checkpoints if `found` is None."""
        if states.first is not None and (found is None or states.first[0] < found.step):
            step, row = states.first
            return StepDifference(
                step=step,
                quantity=quantity_of(row),
                rank=0,
                recorded=f"{row.where} ({row.one})",
                replayed="another value",
                parameter=row.where,
                shown_by=f"The values of all steps up to {step} agree. Their checkpoints after it differ: {row}",
            )
        if found is None or found.parameter is not None:
            return found
        name = parameter_of(self._recorded_logs[found.rank], self.logs[found.rank], found.step)
        if name is not None:
            words = f"The first parameter that differs in this step is {name}."
        elif states.first is not None:
            step, row = states.first
            name, words = row.where, f"In the checkpoint of step {step}, the first parameter that differs is {row}."
        else:
            words = (
                "No parameter is named: no stored checkpoint of a later step was replayed. A run with record='full' "
                "has digests of each parameter in each step."
            )
        return replace(found, parameter=name, shown_by=words)

    def _check_complete(self) -> None:
        """Refuse a replay that has not reached the last step. It may fail after that step, as the run did."""
        reached = min((int(log.entries["step"][-1]) if len(log.entries) else 0 for log in self.logs), default=0)
        if reached >= self.span.last:
            return
        if self.error is not None:
            raise self.error
        raise ConfigurationError(
            f"the replay ended after global step {reached}, and the run made {self.span.last}. Its arguments have "
            "fewer steps than the run made, such as after trainer.train(epochs=...). Pass the arguments that it had at "
            "the end: args=..., or --config FILE."
        )
