"""Writers for Weights & Biases, MLflow and trackio."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextvars import Context
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

from trainstack._files import library_error, make_directories, read_small
from trainstack.checkpointing.filesystem import atomic_write
from trainstack.errors import MissingExtraError, annotate
from trainstack.trainer.core.logs import RunLogger, flatten
from trainstack.trainer.tracking.history import Record
from trainstack.trainer.tracking.writers.base import RunInfo, Writer


class Tracker(Writer):
    """Sends records to a run of a tracking service, and continues that run on resume.

    What identifies the run is kept in `log_dir/<extra>-run.json`; without that file, or where it cannot be
    understood, a resumed training begins a new run. A service cannot take points back: those of steps that a crash has
    made the training run again come twice.
    """

    slow = True
    package: ClassVar[str]
    extra: ClassVar[str]
    _run: Any = None

    def __init__(self) -> None:
        """Raises MissingExtraError without the package; it is imported when the run begins."""
        spec = importlib.util.find_spec(self.package)
        if spec is None or spec.origin is None:  # a folder of that name, such as wandb leaves behind, is no package
            raise MissingExtraError(f"the writer {self.extra!r}", self.package, self.extra)

    def open(self, run: RunInfo) -> None:
        """Begin a run, or go on with the one that the resumed training belongs to."""
        file = run.log_dir / f"{self.extra}-run.json"
        known = _read(file) if run.resume_step is not None else None
        try:
            run_name = self.start(run, known)
        except Exception as error:
            if known is not None:
                annotate(error, f"this would have gone on with run {known!r}; delete {file} to begin a new one")
            raise
        with library_error(file):
            make_directories(run.log_dir)
            atomic_write(file, f"{json.dumps({'run': run_name})}\n".encode())

    @abstractmethod
    def start(self, run: RunInfo, known: str | None) -> str:
        """Begin a run, or continue the run `known`; returns by what it will be known."""

    def close(self) -> None:
        """Finish the run: what is on its way is sent."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()


def by_step(records: Sequence[Record]) -> Iterator[tuple[int, int, dict[str, float]]]:
    """Step, epoch and values by name, in order; a metric recorded twice at a step has its last value there."""
    for (step, epoch), group in groupby(records, key=lambda record: (record.step, record.epoch)):
        yield step, epoch, {record.name: record.value for record in group}


def _read(file: Path) -> str | None:
    try:
        run = json.loads(read_small(file))["run"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        run = None
    if not isinstance(run, str):
        RunLogger().warning(f"{file} does not say which run to go on with: a new run begins there.")
        return None
    return run


# The server refuses more in one request, and longer values.
_METRICS_A_CALL, _PARAMS_A_CALL, _LONGEST_PARAM = 1000, 100, 6000
_REFUSED = re.compile(r"[^\w\-. :/]", re.ASCII)


class MlflowWriter(Tracker):
    """Logs to an MLflow server; arguments and plan are the run's parameters, by dotted names.

    A character that MLflow does not take in a name becomes `_`.

    Args:
        tracking_uri: of the server; by default what MLflow's own settings say, such as MLFLOW_TRACKING_URI.
        experiment: its name, made where there is none; by default MLFLOW_EXPERIMENT_NAME, or "Default".
        run_name: of a new run.
    """

    package = extra = "mlflow"

    def __init__(
        self, tracking_uri: str | None = None, experiment: str | None = None, run_name: str | None = None
    ) -> None:
        super().__init__()
        self._uri, self._run_name = tracking_uri, run_name
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        self._client: Any = None
        self._run_id = ""

    def start(self, run: RunInfo, known: str | None) -> str:
        """Make a run, or set the one before to running again; parameters are those it began with."""
        from mlflow import MlflowClient  # type: ignore[import-not-found, unused-ignore]
        from mlflow.entities import Param  # type: ignore[import-not-found, unused-ignore]

        client = MlflowClient(self._uri)
        if known is not None:
            client.update_run(known, status="RUNNING")
            self._run_id = known
        else:
            experiment = client.get_experiment_by_name(self._experiment)
            place = client.create_experiment(self._experiment) if experiment is None else experiment.experiment_id
            self._run_id = client.create_run(place, run_name=self._run_name).info.run_id
            texts = ((k, v if isinstance(v, str) else json.dumps(v)) for k, v in flatten(run.config))
            params = [Param(_REFUSED.sub("_", name), text[:_LONGEST_PARAM]) for name, text in texts]
            for first in range(0, len(params), _PARAMS_A_CALL):
                client.log_batch(self._run_id, params=params[first : first + _PARAMS_A_CALL])
        self._client = client
        return self._run_id

    def write(self, records: Sequence[Record]) -> None:
        """Log all records, in as few calls as the server allows."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_REFUSED.sub("_", r.name), r.value, now, r.step) for r in records]
        for first in range(0, len(metrics), _METRICS_A_CALL):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + _METRICS_A_CALL])

    def close(self) -> None:
        """Set the run to finished."""
        client, self._client = self._client, None
        if client is not None:
            client.set_terminated(self._run_id)


class TrackioWriter(Tracker):
    """Logs to trackio, by default in a database on this machine; arguments and plan are the run's config.

    Args:
        project: the name of trackio's project.
        options: of `trackio.init`, such as `name`, `group`, `space_id`. trackio's environment variables hold, such as
            TRACKIO_DIR and TRACKIO_SPACE_ID.
    """

    package = extra = "trackio"

    def __init__(self, project: str = "trainstack", **options: Any) -> None:
        super().__init__()
        self._project, self._options = project, options

    def start(self, run: RunInfo, known: str | None) -> str:
        """Call `trackio.init`; trackio knows a run by its name."""
        import trackio  # type: ignore[import-not-found, unused-ignore]

        own: dict[str, Any] = {"config": dict(run.config), "embed": False} | self._options
        if known is not None:
            own |= {"name": known, "resume": "must"}
        # In a new context, since trackio ends the run that is current in this one, which may be another trainer's.
        self._run = Context().run(trackio.init, self._project, **own)
        return str(self._run.name)

    def write(self, records: Sequence[Record]) -> None:
        """Log one point a step."""
        for step, epoch, values in by_step(records):
            self._run.log({"epoch": epoch, **values}, step=step)


class WandbWriter(Tracker):
    """Logs to Weights & Biases, over `global_step`; arguments and plan are the run's config.

    Args:
        options: of `wandb.init`, such as `project`, `entity`, `name`, `tags`, `mode="offline"`. What is left out
            comes from wandb's environment variables, such as WANDB_PROJECT and WANDB_MODE.
    """

    package = extra = "wandb"

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options

    def start(self, run: RunInfo, known: str | None) -> str:
        """Call `wandb.init`."""
        import wandb  # type: ignore[import-not-found, unused-ignore]

        own: dict[str, Any] = {"config": dict(run.config), "dir": str(run.log_dir), "reinit": "create_new"}
        if known is not None:
            own |= {"id": known, "resume": "allow", "allow_val_change": True}
        make_directories(run.log_dir)
        self._run = wandb.init(**(own | self._options))
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step")
        return str(self._run.id)

    def write(self, records: Sequence[Record]) -> None:
        """Log one point a step."""
        for step, epoch, values in by_step(records):
            self._run.log({"global_step": step, "epoch": epoch, **values})
