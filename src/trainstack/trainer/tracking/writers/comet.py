"""The writer for Comet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainstack.trainer.tracking.history import Record
from trainstack.trainer.tracking.media import Pixels, Table
from trainstack.trainer.tracking.writers.base import RunInfo
from trainstack.trainer.tracking.writers.tracker import Artifacts, Tracker, by_step, parameters


class CometWriter(Tracker):
    """Logs to Comet; arguments, plan and hyperparameters are the experiment's parameters.

    An experiment that is running in the process is used.

    Args:
        own_run, artifacts: see `Tracker`.
        options: of `comet_ml.start`, such as `project_name`, `online=False`, `experiment_config`. What is left out
            comes from Comet's environment variables, such as COMET_API_KEY and COMET_START_ONLINE.
    """

    package, extra = "comet_ml", "comet"

    def __init__(self, *, own_run: bool = False, artifacts: Artifacts = "none", **options: Any) -> None:
        super().__init__(own_run=own_run or "experiment_key" in options, artifacts=artifacts)
        self._options = options

    def find_open(self) -> Any:
        """The experiment that is running."""
        import comet_ml  # type: ignore[import-not-found, unused-ignore]

        return comet_ml.get_running_experiment()

    def adopt(self, found: Any, run: RunInfo) -> str:
        """Log to the running experiment."""
        self._run = found
        found.log_parameters(parameters(run.config))
        return str(found.get_key())

    def start(self, run: RunInfo, known: str | None) -> str:
        """Call `comet_ml.start`."""
        import comet_ml

        # "create": without it Comet takes an experiment that is running, which may be another trainer's
        own: dict[str, Any] = {"mode": "create"} if known is None else {"mode": "get", "experiment_key": known}
        return self.adopt(comet_ml.start(**(own | self._options)), run)

    def write(self, records: Sequence[Record]) -> None:
        """Log the values of each step."""
        for step, epoch, values in by_step(records):
            self._run.log_metrics(values, step=step, epoch=epoch)

    def log_image(self, name: str, image: Pixels, step: int) -> None:
        """Log an image."""
        self._run.log_image(image, name=name, step=step)

    def log_text(self, name: str, text: str, step: int) -> None:
        """Log a text; its metadata has the name."""
        self._run.log_text(text, step=step, metadata={"name": name})

    def log_table(self, name: str, table: Table, step: int) -> None:
        """Log a table as the file `NAME-STEP.csv`."""
        self._run.log_table(f"{name}-{step}.csv", [list(row) for row in table.rows], headers=list(table.columns))

    def log_artifact(self, name: str, path: Path, kind: str) -> None:
        """Upload a checkpoint or an export as a model, and any other file or folder as assets."""
        if kind != "file":
            self._run.log_model(name, str(path))
        elif path.is_dir():
            self._run.log_asset_folder(str(path), log_file_name=True, recursive=True)
        else:
            self._run.log_asset(str(path), file_name=name)

    def finish(self, run: Any, status: str, reason: str | None) -> None:
        """End the experiment; its "other" values have the status."""
        run.log_others({"status": status, "reason": reason or ""})
        run.end()
