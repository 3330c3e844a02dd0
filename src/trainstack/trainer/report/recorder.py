"""`RunRecorder`: keeps what a report needs while a run goes on, and writes the report when it ends."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch

from trainstack.errors import ConfigurationError
from trainstack.trainer.history import RunHistory
from trainstack.trainer.memory import device_peak_gib, host_peak_gib
from trainstack.trainer.report.facts import FILE_NAME, REPORT_NAME, RunFacts, Session, replace_file
from trainstack.trainer.writers.rows import free_name

_MOST_SAMPLES = 1000


class RunRecorder:
    """Writes `run.json` and `report.html` in `directory`; nothing happens between log points.

    Args:
        directory: of the logs.
        facts: of the run; its sessions are added here.
        device: whose memory is looked at.
        resume_step: as for `RunInfo`: a fresh run leaves the files of an earlier one alone and renames them aside.
    """

    def __init__(self, directory: Path, facts: RunFacts, device: torch.device, resume_step: int | None) -> None:
        self._directory, self._device = directory, device
        self._samples: list[tuple[int, float, float | None, float | None]] = []
        self._stride, self._log_points = 1, 0
        self._clock = time.perf_counter()
        self._session = Session(began=time.time(), first_step=resume_step or 0)
        directory.mkdir(parents=True, exist_ok=True)
        earlier = self._earlier_sessions() if resume_step is not None else ()
        if resume_step is None:
            for name in (FILE_NAME, REPORT_NAME):
                if (directory / name).exists():
                    (directory / name).rename(free_name(directory / name))
        self._facts = replace(facts, sessions=(*earlier, self._session))
        self._facts.write(directory)

    def sample(self, step: int) -> None:
        """A log point: note time and memory. The longer a run is, the fewer log points are noted."""
        self._log_points += 1
        if self._log_points % self._stride:
            return
        seconds = round(time.perf_counter() - self._clock, 4)
        self._samples.append((step, seconds, _rounded(host_peak_gib()), _rounded(device_peak_gib(self._device))))
        if len(self._samples) > _MOST_SAMPLES:
            self._samples, self._stride = self._samples[1::2], 2 * self._stride

    def end(
        self, history: RunHistory, step: int, status: str, reason: str | None = None, privacy: str | None = None
    ) -> Path:
        """Write both files; returns where the report is.

        Args:
            history: the metrics. After a failure nothing that waits on the device is read: it may never answer.
            step: global steps that were made.
            status, reason: as for `Session`.
            privacy: the privacy statement in words.
        """
        # The page is drawn once a run; what draws it would delay the first step of every run.
        from trainstack.trainer.report.page import page_of
        from trainstack.trainer.report.run_on_disk import ReportedRun, checkpoints_of

        seconds = round(time.perf_counter() - self._clock, 3)
        ended = replace(
            self._session,
            status=status,
            reason=reason,
            seconds=seconds,
            last_step=step,
            samples=tuple(self._samples),
        )
        facts = replace(self._facts, sessions=(*self._facts.sessions[:-1], ended), privacy=privacy)
        facts.write(self._directory)
        run = ReportedRun(
            label=facts.name,
            facts=facts,
            curves=history.all_arrays(read_device=status != "failed"),
            checkpoints=checkpoints_of(facts, self._directory),
        )
        path = self._directory / REPORT_NAME
        replace_file(path, page_of([run]))
        return path

    def _earlier_sessions(self) -> tuple[Session, ...]:
        try:
            return RunFacts.read(self._directory).sessions
        except (OSError, ConfigurationError):
            return ()  # the run began elsewhere, or without a report


def _rounded(gib: float | None) -> float | None:
    return None if gib is None else round(gib, 4)
