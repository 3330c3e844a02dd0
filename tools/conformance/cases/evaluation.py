"""Evaluation over processes."""

from __future__ import annotations

from pathlib import Path

from tools.conformance.adapter import Adapter, Verdict
from tools.conformance.case import case, passed, wrong
from tools.conformance.process import in_processes
from tools.conformance.task import Samples, Stream, make_task


@case("distributed evaluation without duplicates")
def no_duplicates(adapter: Adapter, name: str, folder: Path) -> Verdict:
    """9 samples with the scores 0 to 8 on 2 processes in batches of 2: the mean score is 4."""
    value = in_processes(2, name, "evaluation:evaluate_samples", folder=str(folder))[0]
    return passed() if abs(value - 4) < 1e-6 else wrong(f"reports {value:.4g} instead of 4")


@case("constant metric over uneven ranks")
def constant_metric(adapter: Adapter, name: str, folder: Path) -> Verdict:
    """A stream of 7 samples, every score 0.75, 4 for one process and 3 for the other: the mean score is 0.75."""
    value = in_processes(2, name, "evaluation:evaluate_stream", folder=str(folder))[0]
    return passed() if abs(value - 0.75) < 1e-6 else wrong(f"reports {value:.4g} instead of 0.75")


def evaluate_samples(adapter: Adapter, folder: str) -> float:
    """In each process."""
    return adapter.evaluate(make_task(Path(folder), validation=Samples(9), batch=2, processes=2))


def evaluate_stream(adapter: Adapter, folder: str) -> float:
    """In each process."""
    stream = Stream(7)
    stream.samples.x[:, 0] = 0.75
    return adapter.evaluate(make_task(Path(folder), validation=stream, batch=2, processes=2))
