"""The moments of kills, the varied settings of processes, and a list of the cases that were not covered."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from trainstack.verifying.report import ResumeReport
from trainstack.verifying.trial import Moment, Surroundings


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The options from which the settings of each process are drawn."""

    threads: tuple[int | None, ...] = (None,)
    workers: tuple[int | None, ...] = (None,)
    async_save: tuple[bool, ...] = (False,)

    def draw(self, draw: random.Random, training: int) -> Surroundings:
        """Draw the settings of one process. All processes of a training save in the same way."""
        return Surroundings(
            hash_seed=draw.randrange(2**32),
            threads=draw.choice(self.threads),
            workers=draw.choice(self.workers),
            async_save=self.async_save[(training - 1) % len(self.async_save)],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Facts about the uninterrupted training.

    Attributes:
        place: its folder.
        seconds, steps, steps_per_epoch: its length; `steps_per_epoch` is 0 if unknown.
        first_save: a step after which there is a checkpoint to resume from.
        workers: of its training loaders.
        untracked: attributes of the module and the callbacks that it changed and did not save.
        first_kind: the kind of the first kill, as a position in their rotation.
        choices: the settings that later processes may vary: threads, loader workers and ways to save.
    """

    place: Path
    seconds: float
    steps: int
    steps_per_epoch: int
    first_save: int
    workers: int
    untracked: tuple[str, ...]
    choices: Choices
    first_kind: int = 0


_KINDS = ("saving", "middle", "start", "saving", "end")


def draw_moments(draw: random.Random, count: int, outline: Outline, before: int) -> list[Moment]:
    """Draw the moments to kill `count` processes of a training: in saves, and at the start, middle and end of epochs.

    `before` is the number of earlier kills. A step followed by a save takes longer than others, so the lag is drawn
    from the time of up to four steps.
    """
    step_s = outline.seconds / max(1, outline.steps)
    moments = []
    for number in range(before, before + count):
        kind = _KINDS[(outline.first_kind + number) % len(_KINDS)]
        steps = _steps_of(kind, outline) or [min(outline.first_save, outline.steps - 1)]
        most = _LONGEST_SAVE_S if kind == "saving" else step_s if kind == "start" else 4 * step_s
        moments.append(Moment(step=draw.choice(steps), lag=draw.uniform(0, most), while_saving=kind == "saving"))
    return sorted(moments, key=lambda moment: moment.step)


_LONGEST_SAVE_S = 0.01
"""Seconds; includes reading back a save of a small module, and the deletion of older checkpoints after it."""


def _steps_of(kind: str, outline: Outline) -> range | list[int]:
    """The steps after which a kill of this kind is made; each has a checkpoint before it and a step after it."""
    first, last, length = max(1, outline.first_save), outline.steps - 1, outline.steps_per_epoch
    if kind in ("saving", "middle") or not length:
        return range(first, last + 1)
    shift = 1 if kind == "start" else 0
    return [step for step in range(shift, last + 1, length) if step >= first]


def place_in_epoch(step: int, outline: Outline) -> str:
    """ "start", "middle" or "end"; "" if the length of an epoch is not known."""
    length = outline.steps_per_epoch
    if not length:
        return ""
    place, edge = step % length, max(1, length // 10)
    return "end" if place == 0 or place > length - edge else "start" if place <= edge else "middle"


def not_covered(report: ResumeReport, outline: Outline) -> tuple[str, ...]:
    """The cases that no counting kill has tried, as text."""
    kills = [kill for kill in report.kills if kill.counts]
    seen = [kill.surroundings for kill in kills if kill.surroundings is not None]
    missing = []
    places = [place for place in ("start", "middle", "end") if all(kill.within != place for kill in kills)]
    if places:
        missing.append(f"checkpoints at the {' and the '.join(places)} of an epoch")
    if not any(kill.while_saving for kill in kills):
        missing.append("a kill during a save")
    ways = {one.async_save for one in seen}
    missing += [
        f"saves in the {name}" for name, way in (("foreground", False), ("background", True)) if way not in ways
    ]
    if len({one.threads for one in seen}) < 2:
        changes = outline.choices.threads == (None,)
        missing.append("another number of threads" + " (it would change the bits, or was not tried)" * changes)
    if len({one.workers for one in seen}) < 2:
        missing.append("another number of loader workers" + " (there are none to leave out)" * (not outline.workers))
    return tuple(missing)
