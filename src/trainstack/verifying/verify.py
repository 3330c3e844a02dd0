"""`verify_resume(make_module, args)` compares killed and resumed runs with an uninterrupted one."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainstack.backends.spec import expand_auto, may_join_processes, parse_spec, registered_backend
from trainstack.errors import ConfigurationError, LaunchError
from trainstack.launching.options import check_not_in_worker, pickle_call
from trainstack.trainer import Callback, ModuleInterface, TrainerArguments
from trainstack.verifying.arguments import arguments_in
from trainstack.verifying.report import ResumeReport
from trainstack.verifying.trials import TrialSetup, run_trials


def verify_resume(
    module_factory: Callable[[], ModuleInterface | tuple[ModuleInterface, Sequence[Callback]]],
    args: TrainerArguments,
    *,
    kills: int = 5,
    seed: int = 0,
    nproc: int | None = None,
    timeout_s: float = 600.0,
    vary: bool = True,
    quiet: bool = False,
) -> ResumeReport:
    """Train without interruption in a new process, then in processes that are killed at random moments, and compare.

    After a kill, by SIGKILL and with all started processes, a new process continues with `resume="auto"`, until the
    training ends. After three kills another training begins. At the end the last checkpoints are compared bit by bit:
    module, optimizers, schedulers, layers, random states, counters, history.

    A kill counts if the next process restored a checkpoint and had steps left to train. Kills happen in saves, and at
    the start, the middle and the end of epochs. Each process has another PYTHONHASHSEED. At the end one more training
    resumes with a parameter that is not restored: the comparison has to notice that.

    Everything is written to a temporary folder (set by TMPDIR), which needs space for the checkpoints of two trainings;
    `args.output_dir` is not used. Writers are disabled. Each process calls `seed_everything(args.seed)`, and then
    `module_factory()`.

    Args:
        module_factory: makes the module; a function at the top of a module or a script, or the module's class. A
            function may also return the module and a list of callbacks.
        args: of the training. Few steps are enough, as long as it saves within them. `resume` and the folders for
            saving and loading are replaced.
        kills: the number of kills that have to count; at most `2 * kills + 10` trainings are made.
        seed: of the moments and of the settings that differ between processes.
        nproc: processes of the training, for a backend that joins several; by default 2. The backend "auto" joins this
            number, by default one.
        timeout_s: seconds for each process.
        vary: let processes also differ in the number of threads (from the second killed training on, after one more
            uninterrupted one has shown that the bits do not depend on it) and in the number of loader workers (at most
            the module's). Each second training saves in the background if `args` do not, and the reverse.
        quiet: do not print the report.

    Returns:
        The report. `report.same` is True if all bits agree, and `report.not_covered` lists untested cases. If something
        differs, both trainings are kept in `report.folder`.

    Raises:
        ConfigurationError: an argument is wrong, a new process cannot import the factory, the training saves nothing
            before its end, or is private.
        LaunchError: a process failed without a kill or took too long; the message ends with its output.

    Examples:
        >>> saving = ts.DefaultCheckpointerArguments(every_n_steps=2)
        >>> args = replace(args, epochs=5, checkpointer_args=saving)
        >>> if __name__ == "__main__":
        ...     report = ts.verify_resume(make_module, args, kills=1, quiet=True)
        ...     print(report.same)
        True
    """
    check_not_in_worker("verify_resume()")
    _check(args, kills, nproc, timeout_s)
    pickle_call(module_factory, (), "verify_resume")

    def call_in(place: Path, async_save: bool) -> bytes:
        return pickle_call(module_factory, (_placed(args, place, async_save),), "verify_resume")

    backend = _expand_auto(args.backend, nproc)
    subject = TrialSetup(
        backend=backend,
        nproc=(nproc or 2) if may_join_processes(backend) else None,
        call_in=call_in,
        context=multiprocessing.get_context("spawn"),
        timeout_s=timeout_s,
        async_save=args.checkpointer_args.async_save,
        may_save_otherwise=args.differential_privacy_args is None,
        vary=vary,
    )
    folder, keep = Path(tempfile.mkdtemp(prefix="trainstack-verify-")), False
    try:
        report = run_trials(subject, kills, random.Random(seed), folder)
        keep = report.divergence is not None
    except LaunchError:
        keep = True
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    if not quiet:
        sys.stdout.write(f"{report}\n")
    return report


def _expand_auto(backend: str, nproc: int | None) -> str:
    """`backend` as the processes of the training will expand it."""
    known = registered_backend(backend) is not None
    return backend if known else expand_auto(backend, joins=nproc is not None and nproc > 1)


def _placed(args: TrainerArguments, place: Path, async_save: bool) -> TrainerArguments:
    """The arguments of the same training with all files in `place`, resuming from a checkpoint there."""
    return arguments_in(place, args, {"async_save": async_save}, resume="auto", writers=())


def _check(args: Any, kills: Any, nproc: Any, timeout_s: Any) -> None:
    if not isinstance(args, TrainerArguments):
        raise ConfigurationError(f"verify_resume(args=...) got a {type(args).__name__}. Write TrainerArguments.")
    if not hasattr(os, "killpg"):
        raise ConfigurationError(
            "verify_resume kills process groups, which this system lacks. Run it on Linux or macOS."
        )
    for name, value in (("kills", kills), ("nproc", 1 if nproc is None else nproc)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigurationError(f"{name}={value!r}: write a whole number, 1 or more.")
    if not timeout_s > 0:
        raise ConfigurationError(f"timeout_s={timeout_s!r}: write a number of seconds above 0.")
    if not may_join_processes(_expand_auto(args.backend, nproc)) and nproc not in (None, 1):
        features = args.backend.split("-")[1:]
        raise ConfigurationError(
            f"nproc={nproc}: backend {args.backend!r} trains in one process. Write a backend that joins several, "
            f"such as {'-'.join(['ddp', *features])!r}, or remove nproc."
        )
    if not args.checkpointer_args.checkpoint:
        raise ConfigurationError(
            "checkpointer_args has checkpoint=False: nothing is saved from which a killed run could resume. Write "
            "checkpointer_args=DefaultCheckpointerArguments(every_n_steps=...)."
        )
    settings = args.differential_privacy_args
    private = registered_backend(args.backend) is None and any(r.layer.private for r in parse_spec(args.backend))
    if private and (settings is None or settings.debug_seed is None):
        raise ConfigurationError(
            f"backend {args.backend!r} draws new batches and new noise after a resume, and has to: a private "
            "run is never the same twice. To test its checkpoints, write debug_seed in "
            "differential_privacy_args, which makes the run NOT PRIVATE."
        )
