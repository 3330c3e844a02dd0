"""Records as points of a trackio run."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import Context
from typing import Any

from trainstack.trainer.history import Record
from trainstack.trainer.writers.base import RunInfo
from trainstack.trainer.writers.tracker import Tracker, by_step


class TrackioWriter(Tracker):
    """Logs to trackio, in a database on this machine unless told otherwise; arguments and plan are the run's config.

    Args:
        project: the name of trackio's project.
        options: of `trackio.init`, such as `name`, `group`, `space_id`. trackio's environment variables hold, such as
            TRACKIO_DIR and TRACKIO_SPACE_ID.
    """

    package = extra = "trackio"

    def __init__(self, project: str = "trainstack", **options: Any) -> None:
        super().__init__()
        self._project, self._options = project, options
        self._run: Any = None

    def start(self, run: RunInfo, known: str | None) -> str:
        """Call `trackio.init`; trackio knows a run by its name."""
        import trackio  # type: ignore[import-not-found, unused-ignore]

        own: dict[str, Any] = {"config": dict(run.config), "embed": False} | self._options
        if known is not None:
            own |= {"name": known, "resume": "must"}
        # In a context of its own, since it would end the run that is current in ours, be it another trainer's.
        self._run = Context().run(trackio.init, self._project, **own)
        return str(self._run.name)

    def write(self, records: Sequence[Record]) -> None:
        """Log one point a step."""
        for step, epoch, values in by_step(records):
            self._run.log({"epoch": epoch, **values}, step=step)

    def close(self) -> None:
        """Finish the run: what is on its way is sent."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()
