"""`verify_resume(make_module, args)` compares killed and resumed runs with an unbroken one."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainstack.backends.spec import expand_auto, parse_spec, registered_backend
from trainstack.checkpointing.directory import read_manifest
from trainstack.checkpointing.manifest import MODEL_FILE
from trainstack.checkpointing.temp_dirs import TEMPORARY
from trainstack.errors import ConfigurationError, LaunchError
from trainstack.launching.options import check_not_in_worker, pickle_call
from trainstack.trainer import ModuleInterface, TrainerArguments
from trainstack.verifying.comparison import checkpoints_of, compare
from trainstack.verifying.report import KillEvent, ResumeReport
from trainstack.verifying.trial import read_untracked, start_trial


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSetup:
    """What is put to the test.

    Attributes:
        backend: the backend string.
        nproc: how many processes find each other; None for one that stands alone.
        call_in: pickled `(module_factory, (args,))` of a training that keeps everything in this folder.
        context: of `multiprocessing`: how processes are started.
        timeout_s: seconds for each process.
    """

    backend: str
    nproc: int | None
    call_in: Callable[[Path], bytes]
    context: Any
    timeout_s: float


def run_trials(subject: TrialSetup, kills: int, draw: random.Random, folder: Path) -> ResumeReport:
    """Train unbroken, then kill `kills` times at moments that `draw` gives, and compare; all of it below `folder`.

    Raises:
        ConfigurationError: the training saves nothing before its end, or is over before it can be killed.
        LaunchError: a process failed.
    """
    whole = folder / "unbroken"
    with start_trial(
        subject.call_in(whole), folder / "process-0", subject.nproc, subject.context, subject.timeout_s
    ) as run:
        began = time.monotonic()
        run.is_over()
        seconds = time.monotonic() - began
    _check_saved(whole)
    end = checkpoints_of(whole)[-1]
    report = ResumeReport(
        backend=subject.backend,
        nproc=subject.nproc or 1,
        steps=end.global_step or 0,
        seconds=seconds,
        kills=(),
        model_hash=read_manifest(end.path).files[MODEL_FILE].xxh3_128,
    )
    while len(report.kills) < kills and report.same:
        training = report.trainings + 1
        if training > 2 * kills + 10:
            raise ConfigurationError(
                f"verify_resume: the training takes {seconds:.2f} s, too short to be killed in time. Write more epochs."
            )
        left = min(kills - len(report.kills), 4)  # with more, each process would be killed before it has come anywhere
        place = folder / f"training-{training}"
        struck = _train(subject, place, training, _moments(draw, left, report))
        parting = compare(whole, place)
        report = replace(report, kills=(*report.kills, *struck), trainings=training, divergence=parting)
        if report.same:
            shutil.rmtree(place)
        else:
            report = replace(report, folder=folder, untracked=read_untracked(folder / "process-0"))
    return report


def _moments(draw: random.Random, count: int, report: ResumeReport) -> list[tuple[float, int, float]]:
    """When to kill each of `count` processes: after a time, or, if it is quicker than that, a little after a step.

    A step that is followed by a save lasts longer than others, so the lag is drawn from the time of a few.
    """
    seconds = [draw.uniform(0, 2 * report.seconds / (count + 1)) for _ in range(count)]
    steps = sorted(draw.randint(1, max(1, report.steps - 1)) for _ in range(count))
    lags = [draw.uniform(0, 4 * report.seconds / max(1, report.steps)) for _ in range(count)]
    return list(zip(seconds, steps, lags, strict=True))


def _train(subject: TrialSetup, place: Path, training: int, moments: list[tuple[float, int, float]]) -> list[KillEvent]:
    """Train to the end in as many processes as it takes, the first of which are killed at `moments`."""
    call = subject.call_in(place)
    struck: list[KillEvent] = []
    for number, moment in enumerate([*moments, None]):
        words = place.parent / f"process-{training}.{number}"
        with start_trial(call, words, subject.nproc, subject.context, subject.timeout_s) as run:
            if struck:
                struck[-1] = replace(struck[-1], resumed_from=run.began_from)
            before, began = _half_written(place), time.monotonic()
            ended = run.is_over() if moment is None else run.is_over_by(*moment)
            lasted = time.monotonic() - began
            step = run.kill()
        if ended:
            break
        saving = bool(_half_written(place) - before)
        struck.append(KillEvent(training=training, at_step=step, resumed_from=0, seconds=lasted, while_saving=saving))
    return struck


def _half_written(place: Path) -> set[str]:
    return {path.name for path in (place / "checkpoints").glob(f"{TEMPORARY}*")}


def _check_saved(place: Path) -> None:
    found = checkpoints_of(place)
    if not found or found[-1].sequence == 1:
        raise ConfigurationError(
            "verify_resume: the training saves only once, at its end, so there is nothing to go on from. Write "
            "checkpointer_args=DefaultCheckpointerArguments(every_n_steps=...), or more epochs."
        )


def verify_resume(
    module_factory: Callable[[], ModuleInterface],
    args: TrainerArguments,
    *,
    kills: int = 5,
    seed: int = 0,
    nproc: int | None = None,
    timeout_s: float = 600.0,
    quiet: bool = False,
) -> ResumeReport:
    """Train unbroken in a new process, then again in processes that are killed at random moments, and compare.

    A process that is killed, by SIGKILL and with all that it has started, is followed by a new one with
    `resume="auto"`, until the training ends. With more than four kills another training begins then. At the end the
    last checkpoints are compared bit by bit: module, optimizers, schedulers, layers, random states, counters, history.

    Everything is written to a temporary folder (TMPDIR says where), which has to take two trainings' checkpoints;
    `args.output_dir` is not touched. Writers are left out. Each process calls `seed_everything(args.seed)`, and then
    `module_factory()`.

    Args:
        module_factory: makes the module; a function at the top of a module or a script, or the module's class.
        args: of the training. Few steps are enough, as long as it saves within them. `resume` and where to save or load
            from are set here.
        kills: how many.
        seed: of the moments: after a time or at a step, whichever comes first, both uniform over the unbroken training.
        nproc: processes of the training, for a backend that joins several; by default 2. The backend "auto" joins as
            many as are asked for, by default one.
        timeout_s: seconds for each process.
        quiet: do not print the report.

    Returns:
        What was found; `report.same` is the verdict. If something differs, both trainings are kept in `report.folder`.

    Raises:
        ConfigurationError: an argument is wrong, the factory cannot be imported by a new process, the training saves
            nothing before its end, or is private.
        LaunchError: a process failed by itself or took too long; the message ends with what it printed.
    """
    check_not_in_worker("verify_resume()")
    _check(args, kills, nproc, timeout_s)
    pickle_call(module_factory, (), "verify_resume")

    def call_in(place: Path) -> bytes:
        return pickle_call(module_factory, (_placed(args, place),), "verify_resume")

    backend = _expand_auto(args.backend, nproc)
    subject = TrialSetup(
        backend=backend,
        nproc=(nproc or 2) if _joins_processes(backend) else None,
        call_in=call_in,
        context=multiprocessing.get_context("spawn"),
        timeout_s=timeout_s,
    )
    folder = Path(tempfile.mkdtemp(prefix="trainstack-verify-"))
    keep = False
    try:
        report = run_trials(subject, kills, random.Random(seed), folder)
        keep = not report.same
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
    """`backend` as the processes of the training will read it."""
    known = registered_backend(backend) is not None
    return backend if known else expand_auto(backend, joins=nproc is not None and nproc > 1)


def _joins_processes(backend: str) -> bool:
    return registered_backend(backend) is not None or any(r.layer.joins_processes for r in parse_spec(backend))


def _placed(args: TrainerArguments, place: Path) -> TrainerArguments:
    """The same training, which keeps everything in `place`, and goes on from what lies there."""
    saving = dataclasses.replace(
        args.checkpointer_args,
        save_dir=None,
        model_state_save_dir=None,
        load_dir=None,
        load_filename=None,
        delete_existing_checkpoints=False,
    )
    return dataclasses.replace(
        args,
        output_dir=str(place),
        resume="auto",
        resume_mode="full",
        reset_optimizers_schedulers=False,
        checkpointer_args=saving,
        writers=(),
        writer_args=None,
        progress="none",
    )


def _check(args: Any, kills: Any, nproc: Any, timeout_s: Any) -> None:
    if not isinstance(args, TrainerArguments):
        raise ConfigurationError(f"verify_resume(args=...) was given a {type(args).__name__}. Write TrainerArguments.")
    if not hasattr(os, "killpg"):
        raise ConfigurationError(
            "verify_resume kills process groups, which this system has not. Run it on Linux or macOS."
        )
    for name, value in (("kills", kills), ("nproc", 1 if nproc is None else nproc)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigurationError(f"{name}={value!r}: write a whole number, 1 or more.")
    if not timeout_s > 0:
        raise ConfigurationError(f"timeout_s={timeout_s!r}: write a number of seconds above 0.")
    if not _joins_processes(_expand_auto(args.backend, nproc)) and nproc not in (None, 1):
        features = args.backend.split("-")[1:]
        raise ConfigurationError(
            f"nproc={nproc}: backend {args.backend!r} trains in one process. Write a backend that joins several, "
            f"such as {'-'.join(['ddp', *features])!r}, or leave nproc out."
        )
    if not args.checkpointer_args.checkpoint:
        raise ConfigurationError(
            "checkpointer_args has checkpoint=False: nothing is saved that a killed run could go on from. Write "
            "checkpointer_args=DefaultCheckpointerArguments(every_n_steps=...)."
        )
    settings = args.differential_privacy_args
    private = registered_backend(args.backend) is None and any(r.layer.private for r in parse_spec(args.backend))
    if private and (settings is None or settings.debug_seed is None):
        raise ConfigurationError(
            f"backend {args.backend!r} draws its batches and its noise anew after a resume, and has to: a private "
            "run is never the same twice. To test its checkpoints, write debug_seed in "
            "differential_privacy_args, which makes the run NOT PRIVATE."
        )
