"""`RecordedRun`: the step logs and checkpoints in the folder of a run, and its legs of equally made steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainstack.checkpointing import CheckpointInfo, verify_checkpoint
from trainstack.checkpointing.directory import scan
from trainstack.errors import CheckpointError, ConfigurationError
from trainstack.replaying.comparison import Span
from trainstack.replaying.scratch import decides
from trainstack.replaying.stored import contradiction
from trainstack.step_log import Start, StepLog, contradicting_checkpoints, ranks_of, read_step_log
from trainstack.trainer import TrainerArguments
from trainstack.trainer.run_record import read_record


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """Consecutive steps that were made by the same number of processes with the same backend and arguments.

    Attributes:
        span: of the steps.
        base: the global step from which the first session of these steps began; 0 for the start of the run.
        start: of that session, on rank 0.
        end: of the last session of these steps, on rank 0.
    """

    span: Span
    base: int
    start: Start
    end: Start


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run that can be replayed.

    Attributes:
        folder: of the run.
        logs: of all ranks, in order.
        legs: in order; at least one.
        checkpoints: intact ones of the run, by rising step.
    """

    folder: Path
    logs: tuple[StepLog, ...]
    legs: tuple[Leg, ...]
    checkpoints: tuple[CheckpointInfo, ...]

    @property
    def span(self) -> Span:
        """All steps of the record."""
        return Span(first=self.legs[0].span.first, last=self.legs[-1].span.last)

    @property
    def notes(self) -> tuple[str, ...]:
        """Damage of the record, and steps that were made twice with different bits, as text."""
        damage = [
            f"{log.path.name} is damaged: {log.damage}; its intact part is used" for log in self.logs if log.damage
        ]
        twice = [
            f"step {step} was made twice with other bits on rank {log.rank} ({', '.join(names)})"
            for log in self.logs
            for step, names in list(log.repeated.items())[:1]
        ]
        return (*damage, *twice)

    @property
    def contradictions(self) -> tuple[str, ...]:
        """Contradictions between checkpoints and logs, which show that a log was changed or cut, as text."""
        found = [f"{log.path.name}: {problem}" for log in self.logs for problem in log.contradictions]
        return (*found, *contradicting_checkpoints(self.folder)[:1])  # later checkpoints have the same contradiction

    def start_of(self, leg: Leg, first: int) -> CheckpointInfo | None:
        """The newest checkpoint from which the steps of `leg` from `first` on can be replayed; None for the start.

        Raises:
            ConfigurationError: there is none.
        """
        found = [info for info in self.checkpoints if leg.base <= step_of(info) < first]
        if found:
            return found[-1]
        if leg.base == 0:
            return None
        later = next((step for step in self.steps_of_checkpoints if leg.base <= step < leg.span.last), None)
        instead = "" if later is None else f" Write --from {later + 1}, or from_step={later + 1}, for a later one."
        raise ConfigurationError(
            f"step {first} of {self.folder} cannot be replayed: there, the run was resumed from step {leg.base} with "
            f"other processes or arguments, or from another run, and no checkpoint of step {leg.base} to {first - 1} "
            f"is left.{instead}"
        )

    def intact_start(self, leg: Leg, first: int) -> tuple[CheckpointInfo | None, tuple[str, ...]]:
        """`start_of` without damaged checkpoints, and the damage of newer ones."""
        run, damaged = self, list[str]()
        while (info := run.start_of(leg, first)) is not None:
            try:
                verify_checkpoint(info.path)
                problem = contradiction(info, self.logs[0].checkpoints)
            except CheckpointError as error:
                problem = str(error)
            if problem is None:
                break
            damaged.append(problem)
            run = replace(run, checkpoints=tuple(other for other in run.checkpoints if other.path != info.path))
        return info, tuple(damaged)

    @property
    def steps_of_checkpoints(self) -> list[int]:
        """The global steps of the intact checkpoints."""
        return [step_of(info) for info in self.checkpoints]


def step_of(info: CheckpointInfo | None) -> int:
    """The global steps that are finished in a checkpoint; 0 at the start."""
    return 0 if info is None else info.global_step or 0


def check_is_run(folder: Path) -> None:
    """Refuse a folder without a run.

    Raises:
        ConfigurationError: it has neither a record nor a step log.
    """
    if read_record(folder) is None and not ranks_of(folder):
        raise ConfigurationError(
            f"{folder} is not the folder of a run: it has no run-record.json and no step_log. Write the output_dir of "
            "a run."
        )


def has_steps(folder: Path) -> bool:
    """Whether all ranks have written steps that can be replayed."""
    return bool(_common_steps([read_step_log(folder, rank) for rank in ranks_of(folder)]))


def read_run(folder: Path, args: TrainerArguments | None = None) -> RecordedRun:
    """Read the records of the run in `folder`, without writing there.

    Raises:
        ConfigurationError: it has no recorded steps.
    """
    logs = tuple(read_step_log(folder, rank) for rank in ranks_of(folder))
    steps = _common_steps(logs)
    if not steps:
        damage = "".join(f" {log.path.name}: {log.damage}." for log in logs if log.damage)
        raise ConfigurationError(
            f"{folder} has no recorded steps, so there is nothing to compare a replay with.{damage} A run records its "
            'steps unless record="off" is in its TrainerArguments, it writes no files, or an older version wrote it.'
        )
    run_ids = {log.segments[-1].run_id for log in logs if log.segments}
    return RecordedRun(
        folder=folder,
        logs=logs,
        legs=tuple(_legs(logs[0], steps)),
        checkpoints=tuple(_checkpoints(folder, args, run_ids)),
    )


def _common_steps(logs: Sequence[StepLog]) -> list[int]:
    """The steps that all ranks of their session have: a killed rank may have written fewer."""
    if not logs:
        return []
    sizes = [start.world_size for start in logs[0].segments]
    return [
        step
        for step, origin in zip(logs[0].entries["step"].tolist(), logs[0].origins.tolist(), strict=True)
        if len(logs) >= sizes[origin] and all(log.entry(step) is not None for log in logs[1 : sizes[origin]])
    ]


def _legs(log: StepLog, steps: Sequence[int]) -> list[Leg]:
    origins = dict(zip(log.entries["step"].tolist(), log.origins.tolist(), strict=True))
    legs: list[Leg] = []
    for step in steps:
        start, last = log.segments[origins[step]], legs[-1] if legs else None
        if last is not None and last.span.last == step - 1 and (start is last.end or _is_alike(start, last.end)):
            legs[-1] = Leg(span=Span(first=last.span.first, last=step), base=last.base, start=last.start, end=start)
        else:
            legs.append(Leg(span=Span(first=step, last=step), base=start.resumed_step, start=start, end=start))
    return legs


def _is_alike(one: Start, other: Start) -> bool:
    facts = [(start.world_size, start.backend, recorded_arguments(start)) for start in (one, other)]
    return facts[0] == facts[1]


def recorded_arguments(start: Start) -> dict[str, str]:
    """The recorded arguments that may affect the bits of a step."""
    arguments = start.description.get("arguments", {})
    return {name: text for name, text in arguments.items() if decides(name)}


def _checkpoints(folder: Path, args: TrainerArguments | None, run_ids: set[str]) -> list[CheckpointInfo]:
    places = [folder / "checkpoints"]
    chosen = None if args is None else args.checkpointer_args.save_dir
    if chosen:
        places.insert(0, Path(chosen))
    found = dict[int, CheckpointInfo]()
    for place in places:
        try:
            infos = scan(place).intact
        except CheckpointError:
            continue
        for info in sorted(infos, key=lambda info: info.sequence):
            if info.kind == "checkpoint" and info.global_step and info.run_id in run_ids:
                found[info.global_step] = info
    return [found[step] for step in sorted(found)]
