"""The writer for Aim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainstack.trainer.tracking.history import Record
from trainstack.trainer.tracking.media import Pixels, Table
from trainstack.trainer.tracking.writers.base import RunInfo
from trainstack.trainer.tracking.writers.tracker import Tracker


class AimWriter(Tracker):
    """Logs to an Aim repository; arguments, plan and hyperparameters are the run's `hparams`.

    Args:
        run: an open `aim.Run`, which is used and not closed.
        options: of `aim.Run`, such as `repo`, `experiment`. Aim's recording of the system and of the terminal is off
            unless they ask for it.
    """

    package = extra = "aim"

    def __init__(self, run: Any = None, **options: Any) -> None:
        super().__init__()
        self._given, self._options = run, options

    def find_open(self) -> Any:
        """The run that was given."""
        return self._given

    def adopt(self, found: Any, run: RunInfo) -> str:
        """Log to this run."""
        self._run = found
        found["hparams"] = dict(run.config)
        return str(found.hash)

    def start(self, run: RunInfo, known: str | None) -> str:
        """Make an `aim.Run`."""
        from aim import Run  # type: ignore[import-not-found, unused-ignore]

        own: dict[str, Any] = {"system_tracking_interval": None, "capture_terminal_logs": False}
        own |= {} if known is None else {"run_hash": known, "force_resume": True}
        return self.adopt(Run(**(own | self._options)), run)

    def write(self, records: Sequence[Record]) -> None:
        """Track each value."""
        for record in records:
            self._run.track(record.value, name=record.name, step=record.step, epoch=record.epoch)

    def log_image(self, name: str, image: Pixels, step: int) -> None:
        """Track an `aim.Image`."""
        from aim import Image
        from PIL.Image import fromarray

        self._run.track(Image(fromarray(image)), name=name, step=step)

    def log_text(self, name: str, text: str, step: int) -> None:
        """Track an `aim.Text`."""
        from aim import Text

        self._run.track(Text(text), name=name, step=step)

    def log_table(self, name: str, table: Table, step: int) -> None:
        """Track a table as an `aim.Text` in Markdown."""
        self.log_text(name, table.to_markdown(), step)

    def finish(self, run: Any, status: str, reason: str | None) -> None:
        """Close the run; its item "status" tells how it has ended."""
        run["status"], run["reason"] = status, reason or ""
        if not self.has_failed:
            run.report_successful_finish(block=True)
        run.close()
