"""`compare_by_replay`: the exact step at which two runs diverge, from replays with the full record."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from trainstack.checkpointing import CheckpointInfo
from trainstack.checkpointing.difference import Difference, differences
from trainstack.checkpointing.reading import read_states
from trainstack.errors import CheckpointError, ConfigurationError
from trainstack.launching.options import check_not_in_worker, pickle_call
from trainstack.replaying.comparison import Span
from trainstack.replaying.recorded import RecordedRun, step_of
from trainstack.replaying.replays import say_line
from trainstack.replaying.report import ReplayReport
from trainstack.replaying.task import DAY_S, ReplayTask
from trainstack.step_log.first_difference import unlike_generators
from trainstack.trainer import Callback, ModuleInterface, TrainerArguments
from trainstack.trainer.reporting.run_comparison import START_WEIGHTS, RunComparison, compare_runs, explained

MakeModule = Callable[[], ModuleInterface | tuple[ModuleInterface, Sequence[Callback]]]


def compare_by_replay(
    make_module: MakeModule,
    one: str | os.PathLike[str],
    other: str | os.PathLike[str],
    *,
    other_module: MakeModule | None = None,
    args: TrainerArguments | None = None,
    other_args: TrainerArguments | None = None,
    workers: int | None = None,
    timeout_s: float = DAY_S,
    say: Callable[[str], None] = say_line,
) -> RunComparison:
    """Find the exact step at which two runs diverge, which may be earlier than the first recorded value that differs.

    The step logs are compared first, as in `compare_runs`. If they diverge at a step and have no digests of all tensors
    there, both runs are replayed up to that step, with `record="full"`, in temporary folders. The replays begin with
    the last checkpoint that has the same states in both runs, or with a new module. The folders of the runs are only
    read.

    Args:
        make_module: makes the module of the first run; see `replay`.
        one: the folder of the first run, its `output_dir`.
        other: the folder of the second run.
        other_module: makes the module of the second run; by default `make_module` does.
        args: of the first run; by default those in its `config.yaml`.
        other_args: of the second run; by default those in its `config.yaml`.
        workers: the largest number of worker processes of a training loader; None for the module's number.
        timeout_s: seconds for each replay.
        say: takes each line about the progress; by default it prints the line.

    Returns:
        The step, the quantity and the parameters. The notes name the checkpoints from which the runs were replayed. If
        a replay differs from the record of its run, the reason names that run; step and quantity are then those of the
        logs.

    Raises:
        ConfigurationError: a run has no records, is private, or its steps cannot be replayed.
        LaunchError: the processes of a replay failed before a step differed.
    """
    check_not_in_worker("compare_by_replay()")
    makers = make_module, make_module if other_module is None else other_module
    for maker in makers:
        pickle_call(maker, (), "compare_by_replay")
    tasks = [
        ReplayTask.of(maker, Path(folder), given, workers=workers, timeout_s=timeout_s)
        for maker, folder, given in zip(makers, (one, other), (args, other_args), strict=True)
    ]
    runs = tasks[0].recorded, tasks[1].recorded
    found = compare_runs(one, other)
    if found.step is None or found.quantity == START_WEIGHTS or _is_exact(runs, found.step):
        return found
    if len(runs[0].logs) != len(runs[1].logs):
        return replace(found, notes=(*found.notes, "nothing was replayed: the runs have other numbers of ranks"))
    same_at = last_same_checkpoint(*runs, before=found.step)
    span = Span(first=same_at + 1, last=found.step)
    with tempfile.TemporaryDirectory(prefix="trainstack-compare-", ignore_cleanup_errors=True) as folder:
        places = [Path(folder) / name for name in ("first", "second")]
        replays = [_replay(task, span, place, say) for task, place in zip(tasks, places, strict=True)]
        exact = _first_in(*replays)
    notes = found.notes + tuple(note for run, parts in zip(runs, replays, strict=True) for note in _notes(run, parts))
    failed = [text for run, parts in zip(runs, replays, strict=True) for text in _not_reproduced(run, parts)]
    if failed or exact is None:
        return replace(found, reason=" ".join(failed) or found.reason, notes=notes)
    exact = replace(exact, same_until=exact.same_until or same_at, compared=found.compared, notes=notes)
    return explained(exact, found.changes, has_details=True)


def last_same_checkpoint(one: RecordedRun, other: RecordedRun, before: int) -> int:
    """The last step below `before` with an intact checkpoint of equal states in both runs; 0 for the start.

    It uses bisection, because runs that have diverged do not become equal again. Damaged checkpoints are skipped.
    Generators with different initial states, such as unseeded ones of Python and NumPy, are not compared: their effects
    are visible in other states.
    """
    mine, theirs = ({step_of(info): info for info in run.checkpoints} for run in (one, other))
    steps = sorted(step for step in mine.keys() & theirs.keys() if step < before)
    logs = one.logs[0], other.logs[0]
    known = sorted(set(logs[0].steps_with_details()) & set(logs[1].steps_with_details()))
    unseeded = tuple(f".{name}" for name in unlike_generators(*logs, known))
    low, high, same_at = 0, len(steps), 0  # checkpoints before `low` have the same states, those from `high` on do not
    while low < high:
        middle = (low + high) // 2
        step = steps[middle]
        try:
            alike = _have_same_states(mine[step], theirs[step], unseeded)
        except CheckpointError:
            del steps[middle]
            high -= 1
            continue
        low, high, same_at = (middle + 1, high, step) if alike else (low, middle, same_at)
    return same_at


def _have_same_states(one: CheckpointInfo, other: CheckpointInfo, unseeded: Sequence[str]) -> bool:
    def counts(row: Difference) -> bool:
        return not (row.where.startswith("rng_state") and any(name in row.where for name in unseeded))

    return not any(counts(row) for row in differences(read_states(one.path)[1], read_states(other.path)[1]))


def _is_exact(runs: Sequence[RecordedRun], step: int) -> bool:
    """Whether both runs have digests of all tensors in this step and in the one before."""
    details = [run.logs[0].details(number) for run in runs for number in {max(step - 1, 1), step}]
    return all(one is not None and len(one.parameters) > 0 for one in details)


_Replays = dict[Path, ReplayReport]
"""The reports of the replays of one run, one for each leg, by the folder of the replay."""


def _replay(task: ReplayTask, span: Span, place: Path, say: Callable[[str], None]) -> _Replays:
    found: _Replays = {}
    for number, (leg, part) in enumerate(task.legs_in(span)):
        run, folder = task.recorded, place / str(number)
        try:
            run.start_of(leg, part.first)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{run.folder} cannot be replayed from step {part.first}: it was resumed from step {leg.base}, and no "
                "checkpoint before that step is left. Remove the target to compare only the step logs."
            ) from error
        say(f"{run.folder}:")
        found[folder / "run"] = task.replay_leg(leg, part, folder, say, mode="full")
    return found


def _first_in(one: _Replays, other: _Replays) -> RunComparison | None:
    """The first difference of two replayed runs; None if there is none."""
    found = [
        compare_runs(place, twin)
        for (place, report), (twin, report_too) in itertools.product(one.items(), other.items())
        if max(report.first_step, report_too.first_step) <= min(report.last_step, report_too.last_step)
    ]
    return min((each for each in found if each.step is not None), key=lambda each: each.step or 0, default=None)


def _notes(run: RecordedRun, replays: _Replays) -> list[str]:
    notes = list[str]()
    for report in replays.values():
        where = report.began_from or "the start"
        notes.append(f"{run.folder} was replayed from {where} up to step {report.last_step}, with the full record")
        notes += [f"{run.folder}: {note}" for note in (*report.damaged, *report.notes)]
    return notes


def _not_reproduced(run: RecordedRun, replays: _Replays) -> list[str]:
    """A sentence about the first difference between a replay and the record of its run; none without one."""
    found = [report.first_difference for report in replays.values() if report.first_difference is not None]
    return [
        f"{run.folder} is not reproducible: its replay differs from its record in step {one.step}, {one.quantity}. "
        "It has an operator that is not deterministic, or another module or environment than the run had."
        for one in found[:1]
    ]
