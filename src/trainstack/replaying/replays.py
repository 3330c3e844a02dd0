"""`replay(make_module, run)` makes recorded steps again and compares their bits."""

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
    """Make recorded steps of a run again in new processes, in a temporary folder, and compare every recorded bit.

    The replay begins with the newest checkpoint before `from_step`, or with a fresh module. The folder of the run is
    only read. Steps between that checkpoint and `from_step` are compared too.

    Args:
        make_module: makes the module; a function at the top of a module or a script, or the module's class. A
            function may also return the module and a list of callbacks. Before it is called, the processes call
            `seed_everything(args.seed)`.
        run: the folder of the run.
        args: of the run; by default those in its `config.yaml`. `output_dir`, `resume`, writers and where to save or
            load from are set here.
        from_step: the first global step to compare, counted from 1; by default the first that can be replayed.
        to_step: the last one; by default the last that is recorded.
        nproc: processes of the replay, by default as many as the run had. With another number, the global loss and the
            gradient norm are compared to `tolerance`.
        workers: the most worker processes that a training loader may have; None for as many as the module asks for.
        tolerance: the largest relative difference, where another number of processes replays.
        timeout_s: seconds for the replay.
        quiet: print nothing.

    Returns:
        What was found; `report.same` is the verdict.

    Raises:
        ConfigurationError: the run has no records, is private, or the steps cannot be replayed.
        LaunchError: the processes failed by themselves, before a step differed.
    """
    check_not_in_worker("replay()")
    pickle_call(make_module, (), "replay")
    task = ReplayTask.of(make_module, Path(run), args, nproc, workers, tolerance, timeout_s)
    say = _silent if quiet else say_line
    report = task.replay(task.span(from_step, to_step), say)
    say(report.verdict)
    return report


def say_line(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def print_report(report: ReplayReport) -> None:
    """Print a report."""
    say_line(str(report))


def _silent(_: str) -> None:
    pass
