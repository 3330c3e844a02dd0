"""The recorded runs: every kind of backend string with every kind of state; half of them are killed."""

from __future__ import annotations

import dataclasses
import functools
import random
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import trainstack as ts
from tools.replays.subject import Settings, arguments, make
from trainstack.launching.options import pickle_call
from trainstack.replaying import ReplayReport
from trainstack.replaying.task import ReplayTask
from trainstack.verifying.comparison import checkpoints_of
from trainstack.verifying.trial import Moment, start_trial

BACKENDS = ("sp", "ddp", "fsdp", "sp-amp", "sp-bf16", "ddp-amp", "ddp-bf16", "fsdp-amp", "fsdp-bf16")
"""All strings without a privacy layer and without apex, which needs another package."""
TIMEOUT_S = 120.0

FEATURES: dict[str, tuple[Settings, dict[str, Any]]] = {
    "dropout and a schedule": (Settings(), {}),
    "workers and EMA": (Settings(workers=2, ema=True), {}),
    "accumulation": (Settings(optimizer="sgd"), {"gpu_batch_size_limit": 3, "max_grad_norm": 0.5}),
    "running statistics": (
        Settings(norm=True, schedule="plateau", ema=True),
        {"nonfinite": "skip", "train_batch_size": 12},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run.

    Attributes:
        backend: the backend string.
        features: a key of `FEATURES`.
        record: "steps" or "full".
        killed: whether the run is killed twice and resumed.
    """

    backend: str
    features: str
    record: str
    killed: bool

    @property
    def name(self) -> str:
        """The name of the run in the results."""
        return f"{self.backend}, {self.features}, record={self.record!r}{', killed' * self.killed}"

    @property
    def nproc(self) -> int | None:
        """The number of processes that train together; None for a single one."""
        return None if self.backend.startswith("sp") else 2

    def arguments(self, place: Path) -> ts.TrainerArguments:
        """The arguments of the run in `place`."""
        return arguments(place, backend=self.backend, record=self.record, **FEATURES[self.features][1])


def cases() -> list[Case]:
    """36 runs of each string with each set of features, and 4 more of `sp`, `ddp`, `fsdp` and `sp-bf16`."""
    pairs = [*product(BACKENDS, FEATURES), *((backend, "accumulation") for backend in ("sp", "ddp", "fsdp", "sp-bf16"))]
    return [
        Case(
            backend=backend,
            features=features,
            record="full" if number // 2 % 2 else "steps",
            killed=bool(number % 2),
        )
        for number, (backend, features) in enumerate(pairs)
    ]


def train(case: Case, folder: Path, context: Any, draw: random.Random) -> int:
    """Train the run of `case` in `folder`/run; returns the number of kills."""
    place, settings = folder / "run", FEATURES[case.features][0]
    call = pickle_call(functools.partial(make, settings), (case.arguments(place),), "replays")
    steps = sorted(draw.sample(range(5, 17), 2)) if case.killed else []
    moments = [Moment(step=step, lag=draw.uniform(0, 0.05), while_saving=False) for step in steps]
    kills = 0
    for number, moment in enumerate([*moments, None]):
        with start_trial(call, folder / f"train-{number}", case.nproc, context, TIMEOUT_S) as trial:
            if moment is None:
                trial.is_over()
            elif trial.ends_before(moment, lambda: has_saved(place), lambda: False):
                break
            else:
                trial.kill()
                kills += 1
    return kills


def has_saved(place: Path) -> bool:
    """Whether there is a checkpoint of a step."""
    return (place / "checkpoints").is_dir() and any(info.global_step for info in checkpoints_of(place))


def task_of(settings: Settings, place: Path, context: Any, **options: Any) -> ReplayTask:
    """A replay of the run in `place` by the module of `settings`."""
    task = ReplayTask.of(functools.partial(make, settings), place, timeout_s=TIMEOUT_S, **options)
    return dataclasses.replace(task, context=context)


def replay_from(task: ReplayTask, first: int, last: int | None = None) -> ReplayReport:
    """Replay the steps from `first` to `last`, or to the end."""
    return task.replay(task.span(first, last), lambda _: None)


@dataclass(kw_only=True)
class Outcome:
    """The result of a run.

    Attributes:
        replays: the number of replays.
        steps, checkpoints, details: the numbers of compared ones.
        kills: the number of kills of the run.
        false_alarms: the reports of replays that differ.
        untouched: whether the replays did not change the folder of the run.
        seconds: the time of training and replays.
    """

    replays: int = 0
    steps: int = 0
    checkpoints: int = 0
    details: int = 0
    kills: int = 0
    false_alarms: list[str] = dataclasses.field(default_factory=list)
    untouched: bool = True
    seconds: float = 0.0


def attempt(case: Case, folder: Path, context: Any, draw: random.Random) -> Outcome:
    """Train `case`, and replay from the start and from every checkpoint."""
    began, outcome = time.monotonic(), Outcome()
    outcome.kills = train(case, folder, context, draw)
    place = folder / "run"
    before = _state_of(place)
    task = task_of(FEATURES[case.features][0], place, context, workers=draw.choice([None, 0, 1]))
    last = task.recorded.span.last
    for step in [0, *task.recorded.steps_of_checkpoints]:
        if step >= last:
            continue
        report = replay_from(task, step + 1)
        outcome.replays += 1
        outcome.steps += report.last_step - report.first_step + 1
        outcome.checkpoints += len(report.checkpoints)
        outcome.details += report.details
        if not report.same or (report.first_step, report.last_step) != (step + 1, last):
            outcome.false_alarms.append(f"from step {step + 1}: {report}")
    outcome.untouched = _state_of(place) == before
    outcome.seconds = time.monotonic() - began
    return outcome


def _state_of(place: Path) -> list[tuple[str, int, int, int]]:
    stats = ((path, path.stat()) for path in sorted(place.rglob("*")))
    return [(str(path), one.st_mtime_ns, one.st_ctime_ns, one.st_size) for path, one in stats]


def is_good(outcome: Outcome) -> bool:
    """Whether every replay had the same bits."""
    return outcome.untouched and not outcome.false_alarms and outcome.replays > 0
