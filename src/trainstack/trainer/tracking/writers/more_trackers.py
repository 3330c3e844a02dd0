"""Writers for Aim, ClearML, Comet and DVCLive."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

from trainstack.errors import ConfigurationError
from trainstack.trainer.tracking.history import Record
from trainstack.trainer.tracking.media import Pixels, Table
from trainstack.trainer.tracking.writers.base import RunInfo
from trainstack.trainer.tracking.writers.tracker import Artifacts, Tracker, by_step, parameters


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
            raise ConfigurationError("ClearML has one task in a process: remove own_run and close the open task.")
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
        # clearml 2.1: waits for a thread that looks at the repository by processes it forks. While other threads work,
        # such a process may wait for ever for a lock, and with it `close`. ClearML gives up after 300 s. An analysis
        # that failed leaves a task without a script.
        with suppress(AttributeError):
            task.get_requirements()
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


_STARTED: WeakSet[Any] = WeakSet()
"""The experiments that writers have begun."""


class CometWriter(Tracker):
    """Logs to Comet; arguments, plan and hyperparameters are the experiment's parameters.

    An experiment that is running in the process is used.

    Args:
        own_run: see `Tracker`.
        artifacts: see `Tracker`.
        options: of `comet_ml.start`, such as `project_name`, `online=False`, `experiment_config`. Omitted options
            come from Comet's environment variables, such as COMET_API_KEY and COMET_START_ONLINE.
    """

    package: ClassVar[str] = "comet_ml"
    extra: ClassVar[str] = "comet"

    def __init__(self, *, own_run: bool = False, artifacts: Artifacts = "none", **options: Any) -> None:
        super().__init__(own_run=own_run or "experiment_key" in options, artifacts=artifacts)
        self._options = options

    def find_open(self) -> Any:
        """The experiment that is running."""
        import comet_ml  # type: ignore[import-not-found, unused-ignore]

        found = comet_ml.get_running_experiment()  # also one that has ended, or that another trainer has begun
        return found if found is not None and found.alive and found not in _STARTED else None

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
        experiment = comet_ml.start(**(own | self._options))
        _STARTED.add(experiment)
        return self.adopt(experiment, run)

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
        """Make a `Live`, which continues in the folder `known`."""
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
