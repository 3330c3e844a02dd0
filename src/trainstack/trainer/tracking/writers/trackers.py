"""Writers for Weights & Biases, MLflow and trackio."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import time
from collections.abc import Sequence
from contextvars import Context
from html import escape
from pathlib import Path
from typing import Any

from trainstack._files import make_directories
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.tracking.history import Record
from trainstack.trainer.tracking.media import Pixels, Table
from trainstack.trainer.tracking.writers.base import RunInfo
from trainstack.trainer.tracking.writers.tracker import Artifacts, Tracker, by_step, parameters

# The server refuses more in one request, and longer values.
_METRICS_A_CALL, _PARAMS_A_CALL, _LONGEST_PARAM = 1000, 100, 6000
_REFUSED = re.compile(r"[^\w\-. :/]", re.ASCII)
_REFUSED_IN_FILES = re.compile(r"[^\w\-./]", re.ASCII)


def _key_of(name: str, keys: dict[str, str]) -> str:
    """`name` in the characters that MLflow takes. `keys` has the names so far; no two get the same key."""
    if name not in keys:
        key, taken, number = _REFUSED.sub("_", name), set(keys.values()), 2
        base = key
        while key in taken:
            key, number = f"{base}_{number}", number + 1
        keys[name] = key
    return keys[name]


class MlflowWriter(Tracker):
    """Logs to an MLflow server; arguments, plan and hyperparameters are the run's parameters, by dotted names.

    Within `with mlflow.start_run():` it logs to that run, unless `tracking_uri`, `experiment` or `run_name` is given. A
    character that MLflow does not take in a name becomes `_`. If two names become equal, the second one ends in `_2`.

    Args:
        tracking_uri: of the server; by default that of MLflow's settings, such as MLFLOW_TRACKING_URI.
        experiment: its name, made where there is none; by default MLFLOW_EXPERIMENT_NAME, or "Default".
        run_name: of a new run.
        own_run: see `Tracker`.
        artifacts: see `Tracker`.
    """

    package = extra = "mlflow"

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        run_name: str | None = None,
        *,
        own_run: bool = False,
        artifacts: Artifacts = "none",
    ) -> None:
        is_own = own_run or any(given is not None for given in (tracking_uri, experiment, run_name))
        super().__init__(own_run=is_own, artifacts=artifacts)
        self._uri, self._run_name = tracking_uri, run_name
        self._keys: dict[str, str] = {}
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")

    def find_open(self) -> Any:
        """The id of MLflow's active run."""
        import mlflow  # type: ignore[import-not-found, unused-ignore]

        active = mlflow.active_run()
        return None if active is None else active.info.run_id

    def adopt(self, found: Any, run: RunInfo) -> str:
        """Log to the active run; a parameter that it has already stays."""
        from mlflow import MlflowClient

        self._run, self._run_id = MlflowClient(), str(found)
        self._log_params(run, known=self._run.get_run(found).data.params)
        return self._run_id

    def start(self, run: RunInfo, known: str | None) -> str:
        """Make a run, or set the one before to running again; parameters are those it began with."""
        from mlflow import MlflowClient

        self._run = client = MlflowClient(self._uri)
        if known is not None:
            client.update_run(known, status="RUNNING")
            self._run_id = known
        else:
            experiment = client.get_experiment_by_name(self._experiment)
            place = client.create_experiment(self._experiment) if experiment is None else experiment.experiment_id
            self._run_id = client.create_run(place, run_name=self._run_name).info.run_id
            self._log_params(run)
        return self._run_id

    def _log_params(self, run: RunInfo, known: Any = ()) -> None:
        from mlflow.entities import Param  # type: ignore[import-not-found, unused-ignore]

        values = parameters(run.config)
        keys = dict[str, str]()
        texts = {
            _key_of(name, keys): value if isinstance(value, str) else json.dumps(value)
            for name, value in values.items()
        }
        params = [Param(name, text[:_LONGEST_PARAM]) for name, text in texts.items() if name not in known]
        for first in range(0, len(params), _PARAMS_A_CALL):
            self._run.log_batch(self._run_id, params=params[first : first + _PARAMS_A_CALL])

    def write(self, records: Sequence[Record]) -> None:
        """Log all records, in as few calls as the server allows."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_key_of(r.name, self._keys), r.value, now, r.step) for r in records]
        for first in range(0, len(metrics), _METRICS_A_CALL):
            self._run.log_batch(self._run_id, metrics=metrics[first : first + _METRICS_A_CALL])

    def log_image(self, name: str, image: Pixels, step: int) -> None:
        """Log an image, for MLflow's grid of images by step."""
        self._run.log_image(self._run_id, image, key=_REFUSED_IN_FILES.sub("_", name), step=step, synchronous=True)

    def log_text(self, name: str, text: str, step: int) -> None:
        """Log a text as the file `texts/NAME/STEP.txt`."""
        self._run.log_text(self._run_id, text, f"texts/{_REFUSED_IN_FILES.sub('_', name)}/{step}.txt")

    def log_table(self, name: str, table: Table, step: int) -> None:
        """Log a table as `tables/NAME/STEP.json`; without pandas MLflow shows it as a file only."""
        file = f"tables/{_REFUSED_IN_FILES.sub('_', name)}/{step}.json"
        if importlib.util.find_spec("pandas") is None:
            self._run.log_dict(self._run_id, {"columns": table.columns, "data": table.rows}, file)
        else:
            self._run.log_table(self._run_id, table.to_dict(), file)

    def log_artifact(self, name: str, path: Path, kind: str) -> None:
        """Upload a file, or a folder with its name."""
        if path.is_dir():
            self._run.log_artifacts(self._run_id, str(path), _REFUSED_IN_FILES.sub("_", name))
        else:
            self._run.log_artifact(self._run_id, str(path))

    def finish(self, run: Any, status: str, reason: str | None) -> None:
        """Set the run to FINISHED, KILLED (by a signal) or FAILED; a tag has the reason."""
        if reason is not None:
            run.set_tag(self._run_id, "trainstack.reason", reason[:_LONGEST_PARAM])
        run.set_terminated(self._run_id, {"interrupted": "KILLED", "failed": "FAILED"}.get(status, "FINISHED"))


class TrackioWriter(Tracker):
    """Logs to trackio, by default in a database on this machine; arguments and plan are the run's config.

    A run that `trackio.init` has opened is used.

    Args:
        project: the name of trackio's project.
        own_run: see `Tracker`.
        artifacts: see `Tracker`.
        options: of `trackio.init`, such as `name`, `group`, `space_id`. trackio's environment variables hold, such as
            TRACKIO_DIR and TRACKIO_SPACE_ID.
    """

    package = extra = "trackio"

    def __init__(
        self, project: str = "trainstack", *, own_run: bool = False, artifacts: Artifacts = "none", **options: Any
    ) -> None:
        super().__init__(own_run=own_run or "name" in options, artifacts=artifacts)
        self._project, self._options = project, options

    def find_open(self) -> Any:
        """The current run of `trackio.init`."""
        # trackio 0.43: a package without a public function for it
        current = getattr(importlib.import_module("trackio"), "context_vars", None)
        return None if current is None else current.current_run.get()

    def adopt(self, found: Any, run: RunInfo) -> str:
        """Log to the open run, and add to its config."""
        self._run = found
        found.config.update({name: value for name, value in run.config.items() if name not in found.config})
        return str(found.name)

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

    def log_image(self, name: str, image: Pixels, step: int) -> None:
        """Log a `trackio.Image`."""
        import trackio

        self._run.log({name: trackio.Image(image)}, step=step)

    def log_text(self, name: str, text: str, step: int) -> None:
        """Log a `trackio.Markdown`."""
        import trackio

        self._run.log({name: trackio.Markdown(text)}, step=step)

    def log_table(self, name: str, table: Table, step: int) -> None:
        """Log a `trackio.Table`."""
        import trackio

        rows = [list(row) for row in table.rows]
        self._run.log({name: trackio.Table(columns=list(table.columns), data=rows)}, step=step)

    def log_artifact(self, name: str, path: Path, kind: str) -> None:
        """Upload a version of an artifact."""
        self._run.log_artifact(str(path), name=_REFUSED_IN_FILES.sub("_", f"{self._run.name}-{name}"), type=kind)

    def finish(self, run: Any, status: str, reason: str | None) -> None:
        """Finish the run; trackio has no status, so one that failed or was interrupted leaves an alert."""
        if self.has_failed:
            import trackio

            run.alert(f"run {status}", text=reason or "", level=trackio.AlertLevel.ERROR)
        run.finish()


class WandbWriter(Tracker):
    """Logs to Weights & Biases, over `global_step`; arguments and plan are the run's config.

    A run that `wandb.init` has opened, such as that of a sweep's agent, is used.

    Args:
        own_run: see `Tracker`.
        artifacts: see `Tracker`.
        options: of `wandb.init`, such as `project`, `entity`, `name`, `tags`, `mode="offline"`. Omitted options
            come from wandb's environment variables, such as WANDB_PROJECT and WANDB_MODE. They do not change a run
            that is open already.
    """

    package = extra = "wandb"

    def __init__(self, *, own_run: bool = False, artifacts: Artifacts = "none", **options: Any) -> None:
        super().__init__(own_run=own_run or "id" in options, artifacts=artifacts)
        self._options = options

    def find_open(self) -> Any:
        """The run of the process."""
        import wandb  # type: ignore[import-not-found, unused-ignore]

        return getattr(wandb, "run", None)

    def adopt(self, found: Any, run: RunInfo) -> str:
        """Log to the open run, and add to its config."""
        if self._options:
            RunLogger().warning(
                f"wandb: the run {found.id} is open and takes the records, so {', '.join(self._options)} of the writer "
                "have no effect. Give them to wandb.init, or write own_run=True."
            )
        self._run = found
        found.config.update(dict(run.config), allow_val_change=True)
        self._define_axis()
        return str(found.id)

    def start(self, run: RunInfo, known: str | None) -> str:
        """Call `wandb.init`."""
        import wandb

        own: dict[str, Any] = {"config": dict(run.config), "dir": str(run.log_dir), "reinit": "create_new"}
        if known is not None:
            own |= {"id": known, "resume": "allow", "allow_val_change": True}
        make_directories(run.log_dir)
        self._run = wandb.init(**(own | self._options))
        self._define_axis()
        return str(self._run.id)

    def _define_axis(self) -> None:
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step")

    def write(self, records: Sequence[Record]) -> None:
        """Log one point a step."""
        for step, epoch, values in by_step(records):
            self._run.log({"global_step": step, "epoch": epoch, **values})

    def log_image(self, name: str, image: Pixels, step: int) -> None:
        """Log a `wandb.Image`."""
        import wandb

        self._run.log({"global_step": step, name: wandb.Image(image)})

    def log_text(self, name: str, text: str, step: int) -> None:
        """Log a `wandb.Html` with the text as it is."""
        import wandb

        self._run.log({"global_step": step, name: wandb.Html(f"<pre>{escape(text)}</pre>")})

    def log_table(self, name: str, table: Table, step: int) -> None:
        """Log a `wandb.Table`."""
        import wandb

        rows = [list(row) for row in table.rows]
        content = wandb.Table(columns=list(table.columns), data=rows, allow_mixed_types=True)
        self._run.log({"global_step": step, name: content})

    def log_artifact(self, name: str, path: Path, kind: str) -> None:
        """Log a version of an artifact; checkpoints and models have wandb's type "model"."""
        import wandb

        label = _REFUSED_IN_FILES.sub("_", f"{name}-{self._run.id}").replace("/", "_")
        artifact = wandb.Artifact(label, type="file" if kind == "file" else "model", metadata={"kind": kind})
        (artifact.add_dir if path.is_dir() else artifact.add_file)(str(path))
        self._run.log_artifact(artifact)

    def finish(self, run: Any, status: str, reason: str | None) -> None:
        """Finish the run with the exit code 1 if it has failed or was interrupted; then wandb marks it as such."""
        if reason is not None:
            run.summary["trainstack_reason"] = reason
        if status == "interrupted":
            run.mark_preempting()
        run.finish(exit_code=int(self.has_failed))
