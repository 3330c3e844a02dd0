"""The writer for DVCLive."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainstack.trainer.tracking.history import Record
from trainstack.trainer.tracking.media import Pixels
from trainstack.trainer.tracking.writers.base import RunInfo
from trainstack.trainer.tracking.writers.tracker import Artifacts, Tracker, by_step, parameters


class DvcliveWriter(Tracker):
    """Logs to the folder of a `dvclive.Live`; arguments, plan and hyperparameters are its parameters.

    DVCLive has no texts and no tables, and no status of a run.

    Args:
        live: an open `dvclive.Live`, which is used and not ended.
        artifacts: see `Tracker`; in a DVC repository DVC keeps them.
        options: of `dvclive.Live`, such as `dir`, `save_dvc_exp`, `report`. By default the folder is `dvclive` in the
            folder of the run's logs.
    """

    package = extra = "dvclive"

    def __init__(self, live: Any = None, *, artifacts: Artifacts = "none", **options: Any) -> None:
        super().__init__(artifacts=artifacts)
        self._given, self._options = live, options

    def find_open(self) -> Any:
        """The `Live` that was given."""
        return self._given

    def adopt(self, found: Any, run: RunInfo) -> str:
        """Log to this `Live`."""
        self._run = found
        found.log_params(parameters(run.config))
        return str(found.dir)

    def start(self, run: RunInfo, known: str | None) -> str:
        """Make a `Live`, which goes on in the folder `known`."""
        from dvclive import Live  # type: ignore[import-not-found, unused-ignore]

        own = {"dir": known or str(run.log_dir / "dvclive"), "resume": known is not None}
        return self.adopt(Live(**(own | self._options)), run)

    def write(self, records: Sequence[Record]) -> None:
        """Log the values of each step, and the summary of the last ones."""
        for step, epoch, values in by_step(records):
            self._run.step = step
            for name, value in (("epoch", epoch), *values.items()):
                self._run.log_metric(name, value)
        self._run.make_summary()

    def log_image(self, name: str, image: Pixels, step: int) -> None:
        """Log an image as a PNG file."""
        self._run.step = step
        self._run.log_image(f"{name}.png", image)

    def log_artifact(self, name: str, path: Path, kind: str) -> None:
        """Log a file or a folder; its name has the characters that DVC takes."""
        label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "file"
        self._run.log_artifact(str(path), type=None if kind == "file" else "model", name=label)

    def finish(self, run: Any, status: str, reason: str | None) -> None:
        """End the `Live`."""
        run.end()
