"""`verify_resume(make_module, args)`: is a killed and resumed run the same as an unbroken one?"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainstack.backends.grammar import parse_spec, written_out
from trainstack.backends.registry import registered_backend
from trainstack.errors import ConfigurationError, LaunchError
from trainstack.pickled_call import pickle_call, refuse_nesting
from trainstack.trainer import ModuleInterface, TrainerArguments
from trainstack.verifying.proving import Subject, prove
from trainstack.verifying.report import ResumeReport


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
        nproc: processes of the training, for a backend that joins several; by default 2.
        timeout_s: seconds for each process.
        quiet: do not print the report.

    Returns:
        What was found; `report.same` is the verdict. If something differs, both trainings are kept in `report.folder`.

    Raises:
        ConfigurationError: an argument is wrong, the factory cannot be imported by a new process, the training saves
            nothing before its end, or is private.
        LaunchError: a process failed by itself or took too long; the message ends with what it printed.
    """
    refuse_nesting("verify_resume()")
    _check(args, kills, nproc, timeout_s)
    pickle_call(module_factory, (), "verify_resume")

    def call_in(place: Path) -> bytes:
        return pickle_call(module_factory, (_placed(args, place),), "verify_resume")

    alone = not _joins_processes(args.backend)
    subject = Subject(
        backend=args.backend,
        nproc=None if alone else nproc or 2,
        call_in=call_in,
        context=multiprocessing.get_context("spawn"),
        timeout_s=timeout_s,
    )
    folder = Path(tempfile.mkdtemp(prefix="trainstack-verify-"))
    keep = False
    try:
        report = prove(subject, kills, random.Random(seed), folder)
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


def _joins_processes(backend: str) -> bool:
    return registered_backend(backend) is not None or any(r.layer.joins_processes for r in parse_spec(backend))


def _is_private(backend: str) -> bool:
    return registered_backend(backend) is None and any(r.layer.private for r in parse_spec(backend))


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
    if not _joins_processes(args.backend) and nproc not in (None, 1):
        features = written_out(args.backend).split("-")[1:]
        raise ConfigurationError(
            f"nproc={nproc}: backend {args.backend!r} trains in one process. Write a backend that joins several, "
            f"such as {'-'.join(['ddp', *features])!r}, or leave nproc out."
        )
    if not args.checkpointer_args.checkpoint:
        raise ConfigurationError(
            "checkpointer_args has checkpoint=False: nothing is saved that a killed run could go on from. Write "
            "checkpointer_args=DefaultCheckpointerArguments(every_n_steps=...)."
        )
    private = args.differential_privacy_args
    if _is_private(args.backend) and (private is None or private.debug_seed is None):
        raise ConfigurationError(
            f"backend {args.backend!r} draws its batches and its noise anew after a resume, and has to: a private "
            "run is never the same twice. To test its checkpoints, write debug_seed in "
            "differential_privacy_args, which makes the run NOT PRIVATE."
        )
