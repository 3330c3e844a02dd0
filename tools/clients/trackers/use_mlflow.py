"""An MLflow server on sqlite gets metrics, parameters, images, texts, tables, artifacts and the status of each run."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import mlflow
from mlflow import MlflowClient

from tools.clients.trackers.common import close, losses, run
from trainstack import MlflowWriter


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """`mlflow server` on a free port; yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    with open(folder / "server.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        address, patience = f"http://127.0.0.1:{port}", time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            if process.poll() is not None or time.monotonic() > patience:
                raise RuntimeError((folder / "server.log").read_text())
            time.sleep(0.3)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(folder: Path) -> None:
    """Train, crash, interrupt, resume, and train in an open run."""
    with server(folder) as address:
        mlflow.set_tracking_uri(address)
        client = MlflowClient()

        def newest() -> mlflow.entities.Run:
            (experiment,) = client.search_experiments(filter_string="name = 'lines'")
            return client.search_runs([experiment.experiment_id], max_results=1)[0]

        trainer = run(folder / "a", MlflowWriter(experiment="lines", artifacts="last"))
        made = newest()
        run_id = made.info.run_id
        history = client.get_metric_history(run_id, "train/loss")
        assert close([(metric.step, metric.value) for metric in history], losses(trainer))
        assert made.data.params["arguments.train_batch_size"] == "8"
        assert made.data.params["module.width"] == "1"
        assert made.info.status == "FINISHED"
        assert mlflow.artifacts.load_text(f"runs:/{run_id}/texts/media/note/8.txt") == "after step 8"
        mlflow.set_experiment("lines")
        assert list(mlflow.load_table("tables/media/table/8.json", run_ids=[run_id])["step"]) == [8]
        assert len([file for file in client.list_artifacts(run_id, "images") if file.path.endswith(".png")]) == 2
        uploaded = {file.path for file in client.list_artifacts(run_id, "checkpoint")}
        assert "checkpoint/MANIFEST.json" in uploaded, uploaded
        assert {file.path for file in client.list_artifacts(run_id, "model")}

        run(folder / "b", MlflowWriter(experiment="lines"), crash=RuntimeError("crash"))
        crashed = newest()
        assert crashed.info.status == "FAILED"
        assert crashed.data.tags["trainstack.reason"] == "RuntimeError: crash"
        run(folder / "b", MlflowWriter(experiment="lines"), crash=KeyboardInterrupt(), resume="auto")
        assert client.get_run(crashed.info.run_id).info.status == "KILLED"
        run(folder / "b", MlflowWriter(experiment="lines"), resume="auto")
        assert newest().info.run_id == crashed.info.run_id
        assert newest().info.status == "FINISHED"

        mlflow.set_experiment("mine")
        with mlflow.start_run() as active:
            run(folder / "c", "mlflow")
            run(folder / "d", "mlflow", train_batch_size=16)  # it has the parameters of the first run
            assert mlflow.active_run().info.run_id == active.info.run_id
        ended = client.get_run(active.info.run_id)
        assert ended.info.status == "FINISHED"
        assert "train/loss" in ended.data.metrics
        assert ended.data.params["arguments.train_batch_size"] == "8"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
