"""Trainings that are killed and resumed, and an uninterrupted one."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainstack.checkpointing.directory import read_manifest
from trainstack.checkpointing.manifest import model_hash
from trainstack.checkpointing.temp_dirs import TEMPORARY
from trainstack.errors import ConfigurationError
from trainstack.verifying.comparison import Divergence, checkpoints_of, compare
from trainstack.verifying.coverage import Choices, Outline, draw_moments, not_covered, place_in_epoch
from trainstack.verifying.report import KillEvent, ResumeReport
from trainstack.verifying.trial import Moment, Surroundings, read_facts, start_trial


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSetup:
    """The training under test.

    Attributes:
        backend: the backend string.
        nproc: the number of processes that train together; None for a single one.
        call_in: returns pickled `(module_factory, (args,))` of a training that writes everything to this folder, and
            saves in the background or not.
        context: of `multiprocessing`; the way to start processes.
        timeout_s: seconds for each process.
        async_save: whether the training saves in the background.
        may_save_otherwise: whether it may also save in the other way.
        compare: returns the first difference of the trainings in two folders; None if there is none.
        self_test: whether one more training continues with a parameter that is not restored, to test the comparison.
        vary: whether threads, loader workers and the way to save differ between the processes; PYTHONHASHSEED always
            does.
    """

    backend: str
    nproc: int | None
    call_in: Callable[[Path, bool], bytes]
    context: Any
    timeout_s: float
    async_save: bool = False
    may_save_otherwise: bool = True
    compare: Callable[[Path, Path], Divergence | None] = compare
    self_test: bool = True
    vary: bool = True

    def start(self, place: Path, folder: Path, surroundings: Surroundings, *, breaks: bool = False) -> Any:
        """A training in `place` that writes its facts to `folder`, as a context manager."""
        call = self.call_in(place, surroundings.async_save)
        return start_trial(call, folder, self.nproc, self.context, self.timeout_s, surroundings, breaks=breaks)


def run_trials(subject: TrialSetup, kills: int, draw: random.Random, folder: Path) -> ResumeReport:
    """Train without interruption, then kill until `kills` kills count, and compare. All files are below `folder`.

    Raises:
        ConfigurationError: the training saves nothing before its end.
        LaunchError: a process failed.
    """
    outline = _train_unbroken(subject, draw, folder)
    end = checkpoints_of(outline.place)[-1]
    report = ResumeReport(
        backend=subject.backend,
        nproc=subject.nproc or 1,
        steps=outline.steps,
        seconds=outline.seconds,
        kills=(),
        asked=kills,
        model_hash=model_hash(read_manifest(end.path)),
    )
    while report.counting < kills and report.divergence is None and report.trainings < 2 * kills + 10:
        training, missing = report.trainings + 1, kills - report.counting
        if training == 2 and subject.vary:  # only now, because missing state is usually found without it
            outline = replace(outline, choices=_with_threads(outline.choices, subject, draw, folder))
        place = folder / f"training-{training}"
        moments = draw_moments(draw, min(missing, _KILLS_PER_TRAINING), outline, len(report.kills))
        struck = _train(subject, place, training, moments, outline, draw)
        parting = subject.compare(outline.place, place)
        report = replace(report, kills=(*report.kills, *struck), trainings=training, divergence=parting)
        if parting is None:
            shutil.rmtree(place)
        else:
            report = replace(report, folder=folder, untracked=outline.untracked)
    if report.divergence is None and report.counting and subject.self_test:
        report = replace(report, blind_to=_blind_to(subject, outline, folder))
    return replace(report, not_covered=not_covered(report, outline))


_LOOK_FOR_SAVES_S = 0.01
_KILLS_PER_TRAINING = 3
"""With more kills, each process would be killed before it has made progress."""


def _train_unbroken(subject: TrialSetup, draw: random.Random, folder: Path) -> Outline:
    place, words, usual = folder / "unbroken", folder / "process-0", Surroundings(async_save=subject.async_save)
    first_save = 0
    with subject.start(place, words, usual) as run:
        began = time.monotonic()
        while not first_save and not run.is_over(_LOOK_FOR_SAVES_S):
            if _has_saved(place):
                first_save = run.progress.step
        run.is_over()
        seconds, length = time.monotonic() - began, run.progress.steps_per_epoch
    _check_saved(place)
    facts, steps = read_facts(words), checkpoints_of(place)[-1].global_step or 0
    choices = Choices(async_save=(subject.async_save,))
    if subject.vary:
        both_ways = (
            (subject.async_save, not subject.async_save) if subject.may_save_otherwise else (subject.async_save,)
        )
        workers = (None, *range(min(2, facts.workers)))
        choices = Choices(workers=workers, async_save=both_ways)
    return Outline(
        place=place,
        seconds=seconds,
        steps=steps,
        steps_per_epoch=length,
        first_save=min(first_save, steps),
        workers=facts.workers,
        untracked=facts.untracked,
        choices=choices,
        first_kind=draw.randrange(5),
    )


def _with_threads(choices: Choices, subject: TrialSetup, draw: random.Random, folder: Path) -> Choices:
    """`choices` with one more thread of torch, if an uninterrupted training has the same bits with it."""
    usual = max(1, torch.get_num_threads() // (subject.nproc or 1))
    place, other = folder / "threads", usual + 1
    surroundings = Surroundings(hash_seed=draw.randrange(2**32), threads=other, async_save=subject.async_save)
    with subject.start(place, folder / "process-threads", surroundings) as run:
        run.is_over()
    same = subject.compare(folder / "unbroken", place) is None
    shutil.rmtree(place)
    return replace(choices, threads=(None, other)) if same else choices


def _blind_to(subject: TrialSetup, outline: Outline, folder: Path) -> str:
    """A parameter that may be omitted without a difference; "" if a difference is found, as it should be.

    The uninterrupted training resumes from its last checkpoint but one, with one parameter as `__init__` makes it.
    """
    place, words = folder / "broken", folder / "process-broken"
    shutil.copytree(outline.place, place)
    found = checkpoints_of(place)
    if not any(0 < (info.global_step or 0) < outline.steps for info in found):
        return ""
    for info in found:
        if (info.global_step or 0) >= outline.steps:
            shutil.rmtree(info.path)
    with subject.start(place, words, Surroundings(async_save=subject.async_save), breaks=True) as run:
        run.is_over()
        restored = 0 < run.began_from < outline.steps
    broken = read_facts(words).broken
    blind = bool(broken) and restored and subject.compare(outline.place, place) is None
    shutil.rmtree(place)
    return broken if blind else ""


def _train(
    subject: TrialSetup, place: Path, training: int, moments: list[Moment], outline: Outline, draw: random.Random
) -> list[KillEvent]:
    """Train to the end in as many processes as needed. The first ones are killed at `moments`."""
    struck: list[KillEvent] = []
    for number, moment in enumerate([*moments, None]):
        words, surroundings = place.parent / f"process-{training}.{number}", outline.choices.draw(draw, training)
        with subject.start(place, words, surroundings) as run:
            if struck:
                struck[-1] = _resumed(struck[-1], run.began_from, surroundings, outline)
            before, began = _half_written(place), time.monotonic()
            saved, saves = partial(_has_saved, place), partial(_saves, place, before)
            ended = run.is_over() if moment is None else run.ends_before(moment, saved, saves)
            lasted = time.monotonic() - began
            step = run.kill()
        if ended:
            break
        saving = bool(_half_written(place) - before)
        struck.append(KillEvent(training=training, at_step=step, resumed_from=0, seconds=lasted, while_saving=saving))
    return struck


def _resumed(kill: KillEvent, step: int, surroundings: Surroundings, outline: Outline) -> KillEvent:
    counts = 0 < step < outline.steps
    return replace(
        kill, resumed_from=step, counts=counts, within=place_in_epoch(step, outline), surroundings=surroundings
    )


def _half_written(place: Path) -> set[str]:
    return {path.name for path in (place / "checkpoints").glob(f"{TEMPORARY}*")}


def _saves(place: Path, before: set[str]) -> bool:
    return bool(_half_written(place) - before)


def _has_saved(place: Path) -> bool:
    """Whether there is a checkpoint of a step in `place`."""
    found = checkpoints_of(place) if (place / "checkpoints").is_dir() else []
    return any(info.global_step for info in found)


def _check_saved(place: Path) -> None:
    found = checkpoints_of(place)
    if not found or found[-1].sequence <= 2:  # 1 is the beginning of the run, and 2 the only checkpoint
        raise ConfigurationError(
            "verify_resume: the training saves only once, at its end, so there is no checkpoint to resume from. Write "
            "checkpointer_args=DefaultCheckpointerArguments(every_n_steps=...), or more epochs."
        )
