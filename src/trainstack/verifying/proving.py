"""One training unbroken, the same killed and resumed until it ends, again and again, and the ends compared."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainstack.checkpointing.directory import read_manifest
from trainstack.checkpointing.leftovers import TEMPORARY
from trainstack.checkpointing.manifest import MODEL_FILE
from trainstack.errors import ConfigurationError
from trainstack.verifying.attempt import attempt
from trainstack.verifying.child import read_forgotten
from trainstack.verifying.comparing import checkpoints_of, compare
from trainstack.verifying.report import Kill, ResumeReport

MOST_KILLS = 4
"""In one training: with more, each process would be killed before it has come anywhere."""

_LAG_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
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


def prove(subject: Subject, kills: int, draw: random.Random, folder: Path) -> ResumeReport:
    """Train unbroken, then kill `kills` times at moments that `draw` gives, and compare; all of it below `folder`.

    Raises:
        ConfigurationError: the training saves nothing before its end, or is over before it can be killed.
        LaunchError: a process failed.
    """
    whole = folder / "unbroken"
    with attempt(
        subject.call_in(whole), folder / "process-0", subject.nproc, subject.context, subject.timeout_s
    ) as run:
        began = time.monotonic()
        run.is_over()
        seconds = time.monotonic() - began
    _refuse_unsaved(whole)
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
        left = min(kills - len(report.kills), MOST_KILLS)
        moments = _moments(draw, left, report)
        place = folder / f"training-{training}"
        struck = _train(subject, place, training, moments)
        parting = compare(whole, place)
        report = replace(report, kills=(*report.kills, *struck), trainings=training, parting=parting)
        if report.same:
            shutil.rmtree(place)
        else:
            report = replace(report, folder=folder, forgotten=read_forgotten(folder / "process-0"))
    return report


def _moments(draw: random.Random, count: int, report: ResumeReport) -> list[tuple[float, int, float]]:
    """When to kill each of `count` processes: after a time, or, if it is quicker than that, a little after a step.

    A step that is followed by a save lasts longer than others, so the lag is drawn from the time of a few.
    """
    seconds = [draw.uniform(0, 2 * report.seconds / (count + 1)) for _ in range(count)]
    steps = sorted(draw.randint(1, max(1, report.steps - 1)) for _ in range(count))
    lags = [draw.uniform(0, _LAG_STEPS * report.seconds / max(1, report.steps)) for _ in range(count)]
    return list(zip(seconds, steps, lags, strict=True))


def _train(subject: Subject, place: Path, training: int, moments: list[tuple[float, int, float]]) -> list[Kill]:
    """Train to the end in as many processes as it takes, the first of which are killed at `moments`."""
    call = subject.call_in(place)
    struck: list[Kill] = []
    for number, moment in enumerate([*moments, None]):
        words = place.parent / f"process-{training}.{number}"
        with attempt(call, words, subject.nproc, subject.context, subject.timeout_s) as run:
            if struck:
                struck[-1] = replace(struck[-1], resumed_from=run.began_from)
            before, began = _half_written(place), time.monotonic()
            ended = run.is_over() if moment is None else run.is_over_by(*moment)
            lasted = time.monotonic() - began
            step = run.kill()
        if ended:
            break
        saving = bool(_half_written(place) - before)
        struck.append(Kill(training=training, at_step=step, resumed_from=0, seconds=lasted, while_saving=saving))
    return struck


def _half_written(place: Path) -> set[str]:
    return {path.name for path in (place / "checkpoints").glob(f"{TEMPORARY}*")}


def _refuse_unsaved(place: Path) -> None:
    found = checkpoints_of(place)
    if not found or found[-1].sequence == 1:
        raise ConfigurationError(
            "verify_resume: the training saves only once, at its end, so there is nothing to go on from. Write "
            "checkpointer_args=DefaultCheckpointerArguments(every_n_steps=...), or more epochs."
        )
