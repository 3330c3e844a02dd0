"""`python -m tools.bench profile`: the microseconds of each part of a step, by hand and in trainstack."""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch

from tools.bench.contenders.trainstack_full import HookedModule
from tools.bench.library import arguments_for, null_screen
from tools.bench.task import Task
from tools.bench.workloads import SEED, WORKLOADS
from trainstack import Trainer

Parts = dict[str, float]
Result = TypeVar("Result")
PARTS = {
    "fetching": "the next batch",
    "forward": "forward pass and loss",
    "backward": "backward pass",
    "clipping": "norm and scaling of the gradients",
    "optimizer": "step of the optimizer",
    "log points": "reading losses, writers, bar, signals",
    "the loop": "zeroing gradients, counting, keeping losses, hooks",
    "once a run": "setup before the first step and cleanup after the last",
}


class Clock:
    """Adds wall time by part, in seconds; the time of a nested part counts only for this part."""

    def __init__(self) -> None:
        self.parts: Parts = defaultdict(float)
        self.start()

    def start(self) -> None:
        """Start the clock with the setup of a run."""
        self._now, self._began = "once a run", perf_counter()

    def enter(self, part: str) -> str:
        """Count for `part` from now on; returns the former part."""
        now, before = perf_counter(), self._now
        self.parts[before] += now - self._began
        self._now, self._began = part, now
        return before

    def timed(self, part: str, call: Callable[..., Result]) -> Callable[..., Result]:
        """A function that calls `call` and counts its time for `part`."""

        def counted(*arguments: Any, **named: Any) -> Result:
            before = self.enter(part)
            try:
                return call(*arguments, **named)
            finally:
                self.enter(before)

        return counted

    def fetched(self, batches: Iterable[Result]) -> Iterator[Result]:
        """Yield `batches`, and count the time of fetching."""
        draw = self.timed("fetching", iter(batches).__next__)
        while True:
            try:
                batch = draw()
            except StopIteration:
                return
            yield batch


def by_hand(task: Task, clock: Clock, folder: Path) -> None:
    """The loop of `raw_clip`, part by part."""
    model, loader = task.make_model(), task.make_loader()
    gc.collect()
    clock.start()
    optimizer = task.make_optimizer(model.parameters())
    model.train()
    clock.enter("the loop")
    for inputs, targets in clock.fetched(loader):
        optimizer.zero_grad()
        clock.enter("forward")
        loss = task.loss(model(inputs), targets)
        clock.enter("backward")
        loss.backward()
        clock.enter("clipping")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        clock.enter("optimizer")
        optimizer.step()
        clock.enter("the loop")
    clock.enter("once a run")


def in_trainstack(task: Task, clock: Clock, folder: Path) -> None:
    """The steps of `trainstack_full`, part by part."""
    module = HookedModule(task)
    args = arguments_for(task, folder, writers=["stdout", "csv", "tensorboard"], progress="rich")
    gc.collect()
    clock.start()
    with null_screen(True):
        trainer = Trainer(module, args)
        run: Any = trainer._ready()
        for verb, part in (
            ("forward", "forward"),
            ("backward", "backward"),
            ("clip", "clipping"),
            ("step", "optimizer"),
        ):
            setattr(run.stack, verb, clock.timed(part, getattr(run.stack, verb)))
        run.due.attend = clock.timed("log points", run.due.attend)
        train = clock.timed("the loop", run._train_steps)
        run._train_steps = lambda windows: train(clock.fetched(windows))
        trainer.train()
    clock.enter("once a run")


def profile(task: Task, rounds: int) -> dict[str, Parts]:
    """Microseconds of a step by part: medians over rounds, in alternating order, after a round that is not counted."""
    ways = {"by hand": by_hand, "trainstack": in_trainstack}
    measured: dict[str, list[Parts]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items() if number % 2 else reversed(ways.items()):
            with tempfile.TemporaryDirectory() as folder:
                torch.manual_seed(SEED)
                clock = Clock()
                way(task, clock, Path(folder))
            if number:
                measured[name].append(clock.parts)
    return {
        name: {part: 1e6 * median(parts[part] for parts in rows) / task.steps for part in PARTS}
        for name, rows in measured.items()
    }


def table(found: dict[str, Parts]) -> str:
    """A table in the syntax of Markdown."""
    lines = [f"| part | {' | '.join(found)} | description |", "|---" * (len(found) + 2) + "|"]
    rows = [*PARTS.items(), ("together", "")]
    for part, description in rows:
        values = [sum(parts.values()) if part == "together" else parts[part] for parts in found.values()]
        lines.append(f"| {part} | " + " | ".join(f"{value:.1f}" for value in values) + f" | {description} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Print the table of one workload."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench profile", description=__doc__)
    trains = [name for name, make in WORKLOADS.items() if make().kind == "train" and make().accumulation == 1]
    parser.add_argument("--workload", default="W1-ready", choices=trains)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    task = WORKLOADS[options.workload]()
    print(
        f"{task.name}: {task.title}; us of wall time per step, medians of {options.rounds} rounds of {task.steps} steps"
    )
    print(f"\n{table(profile(task, options.rounds))}")
    return 0
