"""Tables and JSON of a measurement."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

import trainstack
from tools.bench.measure import Outcome, same_bits
from tools.bench.task import Task

HEAD = ("contender", "us/step", "of raw", "compared with", "ratio", "lowest - highest", "result")


def table(task: Task, outcomes: Mapping[str, Outcome]) -> str:
    """A table in Markdown with aligned columns."""
    rows = [HEAD, *(_row(outcome, outcomes) for outcome in outcomes.values())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    rounds = len(outcomes["raw"].seconds)
    head = f"{task.name}: {task.title}; {task.steps} forward passes, {rounds} rounds{_clipping(outcomes)}"
    return "\n".join([head, "", *lines])


def _clipping(outcomes: Mapping[str, Outcome]) -> str:
    """A note whether clipping changed the weights: otherwise equal bits do not test it."""
    if "raw_clip" not in outcomes:
        return ""
    idle = same_bits(outcomes["raw"].result, outcomes["raw_clip"].result)
    return "; clipping changed nothing" if idle else "; clipping changed the weights"


def _row(outcome: Outcome, outcomes: Mapping[str, Outcome]) -> tuple[str, ...]:
    of_raw, ratios = outcome.ratios(outcomes["raw"]), outcome.ratios(outcomes[outcome.against])
    own = outcome.name == outcome.against
    return (
        outcome.name,
        f"{outcome.microseconds:.1f}",
        f"{median(of_raw):.2f}",
        "" if own else outcome.against,
        "" if own else f"{median(ratios):.3f}",
        "" if own else f"{min(ratios):.2f} - {max(ratios):.2f}",
        "" if own else "same bits" if outcome.same_bits else "NOT the same bits",
    )


def versions() -> dict[str, str]:
    """The conditions and the date of the measurement, without the name of the machine."""
    return {
        "trainstack": trainstack.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch threads": str(torch.get_num_threads()),
        "date": datetime.date.today().isoformat(),
    }


def as_json(results: Mapping[str, tuple[Task, Mapping[str, Outcome]]]) -> dict[str, Any]:
    """All figures as plain values."""
    return {
        "versions": versions(),
        "workloads": {
            name: {
                "title": task.title,
                "forward_passes": task.steps,
                "contenders": {
                    outcome.name: {
                        "against": outcome.against,
                        "cpu_seconds": outcome.seconds,
                        "us_per_step": outcome.microseconds,
                        "ratio": median(outcome.ratios(outcomes[outcome.against])),
                        "same_bits": outcome.same_bits,
                    }
                    for outcome in outcomes.values()
                },
            }
            for name, (task, outcomes) in results.items()
        },
    }
