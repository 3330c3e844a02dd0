"""The writer for ClearML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainstack.errors import ConfigurationError
from trainstack.trainer.tracking.history import Record
from trainstack.trainer.tracking.media import Pixels, Table
from trainstack.trainer.tracking.writers.base import RunInfo
from trainstack.trainer.tracking.writers.tracker import Artifacts, Tracker, parameters


class ClearmlWriter(Tracker):
    """Logs to ClearML; arguments, plan and hyperparameters are the task's parameters.

    A process has one ClearML task: one that `Task.init` has opened is used.

    Args:
        project_name: of a new task.
        task_name: of a new task.
        artifacts: see `Tracker`.
        options: of `Task.init`, such as `tags`, `output_uri`. ClearML's own settings hold, such as
            CLEARML_OFFLINE_MODE. Its hooks into frameworks are off unless `auto_connect_frameworks` asks for them.
    """

    package = extra = "clearml"

    def __init__(
        self,
        project_name: str = "trainstack",
        task_name: str = "train",
        *,
        artifacts: Artifacts = "none",
        **options: Any,
    ) -> None:
        if "own_run" in options:
            raise ConfigurationError("ClearML has one task in a process: leave own_run out and close the open task.")
        super().__init__(artifacts=artifacts)
        self._options = {"project_name": project_name, "task_name": task_name, **options}

    def find_open(self) -> Any:
        """The task of the process."""
        from clearml import Task  # type: ignore[import-not-found, unused-ignore]

        return Task.current_task()

    def adopt(self, found: Any, run: RunInfo) -> str:
        """Log to the open task."""
        self._run = found
        found.set_parameters({f"trainstack/{name}": value for name, value in parameters(run.config).items()})
        return str(found.id)

    def start(self, run: RunInfo, known: str | None) -> str:
        """Call `Task.init`."""
        from clearml import Task

        own: dict[str, Any] = {"auto_connect_frameworks": False, "auto_connect_arg_parser": False}
        own |= {"reuse_last_task_id": False} if known is None else {"continue_last_task": known}
        task = Task.init(**(own | self._options))
        if known is not None:
            task.set_initial_iteration(0)  # steps are counted over the whole run
        return self.adopt(task, run)

    def write(self, records: Sequence[Record]) -> None:
        """Report each value; "train/loss" is the series "loss" of the plot "train"."""
        logger = self._run.get_logger()
        for record in records:
            title, _, series = record.name.rpartition("/")
            logger.report_scalar(title or series, series, record.value, record.step)

    def log_image(self, name: str, image: Pixels, step: int) -> None:
        """Report an image."""
        self._run.get_logger().report_image(name, name, iteration=step, image=image)

    def log_text(self, name: str, text: str, step: int) -> None:
        """Report a text, on the console of the task."""
        self._run.get_logger().report_text(f"{name}, step {step}:\n{text}", print_console=False)

    def log_table(self, name: str, table: Table, step: int) -> None:
        """Report a table."""
        rows = [list(table.columns), *map(list, table.rows)]
        self._run.get_logger().report_table(name, name, iteration=step, table_plot=rows)

    def log_artifact(self, name: str, path: Path, kind: str) -> None:
        """Upload a file, or a folder as an archive."""
        self._run.upload_artifact(name, str(path), wait_on_upload=True)

    def finish(self, run: Any, status: str, reason: str | None) -> None:
        """Close the task as completed, stopped (by a signal) or failed."""
        run.flush(wait_for_uploads=True)
        if status == "failed":
            run.mark_failed(status_reason=reason, status_message=reason, force=True)
        elif status == "interrupted":
            run.mark_stopped(force=True, status_message=reason)
        run.close()
