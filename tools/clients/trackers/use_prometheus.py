"""Prometheus: a textfile, a Pushgateway and a registry get the newest values and the status."""

import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tools.clients.trackers.common import losses, run
from trainstack import PrometheusWriter


def samples(text: str) -> dict[tuple[str, str], float]:
    """The values by name and first label."""
    families = text_string_to_metric_families(text)
    return {(one.name, next(iter(one.labels.values()), "")): one.value for each in families for one in each.samples}


class Gateway(BaseHTTPRequestHandler):
    """Stores pushed values like a Pushgateway."""

    pushed: ClassVar[list[tuple[str, str]]] = []

    def do_PUT(self) -> None:
        """Store a push."""
        self.pushed.append((self.path, self.rfile.read(int(self.headers["Content-Length"])).decode()))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Write no log."""


def main(folder: Path) -> None:
    """Write to a file, push, crash, and use a registry."""
    trainer = run(folder / "a", "prometheus")
    found = samples((folder / "a" / "metrics.prom").read_text())
    assert found["trainstack_metric", "train/loss"] == losses(trainer)[-1][1]
    assert found["trainstack_global_step", ""] == 8
    assert found["trainstack_run_ended", "finished"] == 1

    server = HTTPServer(("127.0.0.1", 0), Gateway)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    crash = RuntimeError("crash")
    run(folder / "b", PrometheusWriter(gateway=f"127.0.0.1:{server.server_port}", job="lines"), crash=crash)
    server.shutdown()
    path, text = Gateway.pushed[-1]
    assert path == "/metrics/job/lines"
    assert samples(text)["trainstack_run_ended", "failed"] == 1

    registry = CollectorRegistry()
    run(folder / "c", PrometheusWriter(registry=registry))
    run(folder / "d", PrometheusWriter(registry=registry))  # the gauges of the first run are removed
    assert samples(generate_latest(registry).decode()) == {}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
