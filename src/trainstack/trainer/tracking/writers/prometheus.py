"""The writer for Prometheus."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from trainstack._files import make_directories
from trainstack.errors import ConfigurationError
from trainstack.trainer.tracking.history import Record
from trainstack.trainer.tracking.writers.base import RunInfo
from trainstack.trainer.tracking.writers.tracker import Tracker


class PrometheusWriter(Tracker):
    """Sets gauges of Prometheus to the newest values, and writes or pushes them at each log point.

    `trainstack_metric` has the label `metric` with the name, `trainstack_global_step` and `trainstack_epoch` tell how
    far the run is, `trainstack_run_info` has the run's folder and backend, and `trainstack_run_ended` the status.

    Args:
        textfile: for the textfile collector of the node exporter, replaced as a whole at each log point; by default
            `metrics.prom` in the folder of the run's logs.
        gateway: the address of a Pushgateway, such as "localhost:9091", instead of a file.
        job: the name of the job there.
        registry: a `CollectorRegistry` to which the gauges are added, such as one that `start_http_server` serves;
            by default a new one.
    """

    package: ClassVar[str] = "prometheus_client"
    extra: ClassVar[str] = "prometheus"

    def __init__(
        self,
        textfile: str | Path | None = None,
        *,
        gateway: str | None = None,
        job: str = "trainstack",
        registry: Any = None,
    ) -> None:
        super().__init__()
        if textfile is not None and gateway is not None:
            raise ConfigurationError(f"textfile={str(textfile)!r} and gateway={gateway!r}: write one of them.")
        self._file = None if textfile is None else Path(textfile)
        self._gateway, self._job, self._registry = gateway, job, registry

    def start(self, run: RunInfo, known: str | None) -> str:
        """Make the gauges; a resumed run makes the same."""
        from prometheus_client import CollectorRegistry, Gauge  # type: ignore[import-not-found, unused-ignore]

        self._run = registry = CollectorRegistry() if self._registry is None else self._registry
        self._file = self._file or run.log_dir / "metrics.prom"
        self._metric = Gauge("trainstack_metric", "newest value of a metric", ["metric"], registry=registry)
        self._step = Gauge("trainstack_global_step", "global steps of the newest record", registry=registry)
        self._epoch = Gauge("trainstack_epoch", "epoch of the newest record, from 0", registry=registry)
        self._ended = Gauge("trainstack_run_ended", "1 once the run has ended so", ["status"], registry=registry)
        info = Gauge("trainstack_run_info", "1, with facts of the run", ["folder", "backend"], registry=registry)
        info.labels(folder=str(run.log_dir), backend=str(run.config.get("backend", ""))).set(1)
        self._gauges = (self._metric, self._step, self._epoch, self._ended, info)
        return ""

    def write(self, records: Sequence[Record]) -> None:
        """Set the gauges, and write or push them."""
        for record in records:
            self._metric.labels(metric=record.name).set(record.value)
            self._step.set(record.step)
            self._epoch.set(record.epoch)
        self._publish()

    def _publish(self) -> None:
        from prometheus_client import push_to_gateway, write_to_textfile

        if self._gateway is not None:
            push_to_gateway(self._gateway, job=self._job, registry=self._run)
        elif self._file is not None:
            make_directories(self._file.parent)
            write_to_textfile(str(self._file), self._run)

    def close(self) -> None:
        """Publish the status, and take the gauges out of the registry."""
        if self._run is not None:
            self._ended.labels(status=self._status[0]).set(1)
            self._publish()
            for gauge in self._gauges:
                self._run.unregister(gauge)
        self._run = None
