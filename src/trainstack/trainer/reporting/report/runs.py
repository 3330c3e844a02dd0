"""A run as the report reads it from its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import floor
from pathlib import Path
from typing import Any

import numpy as np

from trainstack._files import real_path
from trainstack.checkpointing.directory import CheckpointInfo, scan
from trainstack.errors import ConfigurationError
from trainstack.trainer.reporting.report.facts import FILE_NAME, RunFacts
from trainstack.trainer.tracking.writers.files import read_history

Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""Steps (int64) and values (float64) of a metric."""

_SECRET = ("train/loss", "train/loss_epoch")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRun:
    """The content of a report for one run.

    Attributes:
        label: tells it from other runs.
        facts: of the run.
        curves: all metrics by name.
        checkpoints: oldest first.
        folder: of the run; None while it is written by the run itself.
    """

    label: str
    facts: RunFacts
    curves: Mapping[str, Arrays]
    checkpoints: Sequence[CheckpointInfo] = ()
    folder: Path | None = None

    @property
    def shown_curves(self) -> dict[str, Arrays]:
        """`curves`, of a private run without those of the training loss, which no noise protects."""
        return {name: arrays for name, arrays in self.curves.items() if not self.is_secret(name)}

    def is_secret(self, name: str) -> bool:
        """Whether the metric `name`, perhaps with a prefix, must not be shown."""
        return self.facts.private and name.endswith(_SECRET)


def read_run(directory: Path, label: str) -> ReportedRun:
    """Read the files of a run in `directory`, its `output_dir`, also while it trains.

    Raises:
        ConfigurationError: neither metrics nor `run.json` are there, or they were not written by a run.
    """
    facts: RunFacts | None = None
    if (directory / FILE_NAME).is_file():
        facts = RunFacts.read(directory)
    elif not directory.is_dir():
        raise ConfigurationError(f"there is no folder {directory}. Name the output_dir of a run.")
    has_metrics = any((directory / f"metrics.{suffix}").is_file() for suffix in ("csv", "jsonl"))
    if facts is None and not has_metrics:
        raise ConfigurationError(
            f"{directory} has neither metrics.csv nor metrics.jsonl nor {FILE_NAME}. Name the output_dir of a run."
        )
    facts = facts or RunFacts(name=real_path(directory).name)
    curves = read_history(directory).all_arrays() if has_metrics else {}
    return ReportedRun(
        label=label, facts=facts, curves=curves, checkpoints=checkpoints_of(facts, directory), folder=directory
    )


def checkpoints_of(facts: RunFacts, directory: Path) -> list[CheckpointInfo]:
    """The checkpoints of a run where they were written, or next to its logs if the folder was moved; oldest first.

    Those that an earlier run has left there are not among them.
    """
    places = [Path(facts.checkpoints)] if facts.checkpoints else []
    place = next((place for place in [*places, directory / "checkpoints"] if place.is_dir()), None)
    found = [] if place is None else scan(place).intact[::-1]
    if not facts.sessions or facts.sessions[0].first_step:
        return found
    began = floor(facts.sessions[0].began)
    return [info for info in found if _seconds(info.created) >= began]


def _seconds(created: str) -> float:
    """Seconds since 1970; 0 for an invalid time, as in a manifest that was edited by hand."""
    try:
        return datetime.fromisoformat(created).timestamp()
    except (ValueError, TypeError, OverflowError):
        return 0.0
