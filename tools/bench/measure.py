"""Measure contenders, interleaved over rounds: CPU time of all threads, medians of ratios within a round."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from tools.bench.contender import Contender
from tools.bench.task import Task
from tools.bench.workloads import SEED


@dataclass(slots=True)
class Outcome:
    """The measurements of one contender in one workload.

    Attributes:
        name, against: the names of the contender and of the one that it is compared with.
        steps: the number of forward passes of one run.
        seconds: CPU seconds of each round, in order.
        result: the result of its last run.
        same_bits: whether the results of all rounds have the bits of `against` in the same round.
    """

    name: str
    against: str
    steps: int
    seconds: list[float]
    result: Sequence[Tensor] = ()
    same_bits: bool = True

    @property
    def microseconds(self) -> float:
        """CPU time of a step: the median over rounds."""
        return 1e6 * median(self.seconds) / self.steps

    def ratios(self, other: Outcome) -> list[float]:
        """CPU time as a multiple of that of `other`, round by round."""
        return [mine / its for mine, its in zip(self.seconds, other.seconds, strict=True)]


def measure(
    task: Task, contenders: Sequence[Contender], rounds: int, tell: Callable[[str], None] = lambda line: None
) -> dict[str, Outcome]:
    """Run each contender once in each round, in alternating order, after a round that is not counted.

    Args:
        task: the task of all contenders.
        contenders: those that cannot run the task are omitted.
        rounds: the number of counted rounds.
        tell: gets a line of progress.
    """
    takes_part = [contender for contender in contenders if contender.can_do(task)]
    names = {contender.name for contender in takes_part}
    outcomes = {
        contender.name: Outcome(
            name=contender.name,
            against=contender.against if contender.against in names else "raw",
            steps=task.steps,
            seconds=[],
        )
        for contender in takes_part
    }
    for number in range(rounds + 1):
        tell(f"{task.name}: round {number} of {rounds}" if number else f"{task.name}: warming up")
        for contender in takes_part if number % 2 else reversed(takes_part):
            outcome = outcomes[contender.name]
            seconds, outcome.result = run_once(contender, task)
            if number:
                outcome.seconds.append(seconds)
        for outcome in outcomes.values():
            outcome.same_bits &= same_bits(outcome.result, outcomes[outcome.against].result)
    return outcomes


def run_once(contender: Contender, task: Task) -> tuple[float, Sequence[Tensor]]:
    """CPU seconds of one run with a new model from the same seed, and its result."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(SEED)
        run = contender.prepare(task, Path(folder))
        gc.collect()
        began = time.process_time()
        result = run()
        seconds = time.process_time() - began
    return seconds, [tensor.detach() for tensor in result]


def same_bits(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Whether both have the same tensors, bit for bit: a NaN equals itself, and 0.0 differs from -0.0."""
    return len(left) == len(right) and all(
        a.shape == b.shape and a.dtype == b.dtype and a.numpy().tobytes() == b.numpy().tobytes()
        for a, b in zip(left, right, strict=True)
    )
