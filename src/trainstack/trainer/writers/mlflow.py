"""Records as metrics of an MLflow run."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainstack.trainer.history import Record
from trainstack.trainer.writers.base import RunInfo
from trainstack.trainer.writers.tracker import Tracker

_METRICS_A_CALL = 1000
_PARAMS_A_CALL = 100
_LONGEST_PARAM = 6000
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
            params = [Param(_REFUSED.sub("_", name), value[:_LONGEST_PARAM]) for name, value in _flat(run.config)]
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


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """`a.b` for `{"a": {"b": ...}}`, each value as text."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)
