"""`replay(make_module, run)` repeats recorded steps and compares their bits."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from trainstack.launching.options import check_not_in_worker, pickle_call
from trainstack.replaying.report import ReplayReport
from trainstack.replaying.task import DAY_S, TOLERANCE, ReplayTask
from trainstack.trainer import Callback, ModuleInterface, TrainerArguments


def replay(
    make_module: Callable[[], ModuleInterface | tuple[ModuleInterface, Sequence[Callback]]],
    run: str | os.PathLike[str],
    *,
    args: TrainerArguments | None = None,
    from_step: int | None = None,
    to_step: int | None = None,
    nproc: int | None = None,
    workers: int | None = None,
    tolerance: float = TOLERANCE,
    timeout_s: float = DAY_S,
    quiet: bool = False,
) -> ReplayReport:
    """Repeat recorded steps of a run in new processes, in a temporary folder, and compare every recorded bit.

    The replay begins with the newest checkpoint before `from_step`, or with a new module. The folder of the run is only
    read. Steps between that checkpoint and `from_step` are compared too.

    Args:
        make_module: makes the module; a function at the top of a module or a script, or the module's class. A function
            may also return the module and a list of callbacks. Before calling it, the processes call
            `seed_everything(args.seed)`.
        run: the folder of the run.
        args: of the run; by default those in its `config.yaml`. `output_dir`, `resume`, writers and the folders for
            saving and loading are replaced.
        from_step: the first global step to compare, counted from 1; by default the first that can be replayed.
        to_step: the last one; by default the last recorded one.
        nproc: processes of the replay, by default the number of the run. With another number, the global loss and the
            gradient norm are compared to `tolerance`.
        workers: the largest number of worker processes of a training loader; None for the module's number.
        tolerance: the largest relative difference if another number of processes replays.
        timeout_s: seconds for the replay.
        quiet: print nothing.

    Returns:
        The report. `report.same` is True if everything agrees.

    Raises:
        ConfigurationError: the run has no records, is private, or the steps cannot be replayed.
        LaunchError: the processes failed before a step differed.

    Examples:
        >>> if __name__ == "__main__":
        ...     ts.seed_everything(args.seed)
        ...     ts.Trainer(make_module(), replace(args, output_dir="runs/line")).train()
        ...     print(ts.replay(make_module, "runs/line", quiet=True).same)
        True
    """
    check_not_in_worker("replay()")
    pickle_call(make_module, (), "replay")
    task = ReplayTask.of(make_module, Path(run), args, nproc, workers, tolerance, timeout_s)
    say = _silent if quiet else say_line
    report = task.replay(task.span(from_step, to_step), say)
    say(report.verdict)
    return report


def say_line(line: str) -> None:
    """Print a line and flush the output."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def print_report(report: ReplayReport) -> None:
    """Print a report."""
    say_line(str(report))


def _silent(_: str) -> None:
    pass
