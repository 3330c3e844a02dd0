"""Comet offline: a new experiment with media and a model, a crash, a resume, and a running experiment."""

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import comet_ml

from tools.clients.trackers.common import run
from trainstack import CometWriter


def messages(folder: Path) -> list[dict[str, Any]]:
    """All messages in the archives of the offline experiments in `folder`."""
    found = []
    for path in sorted(folder.glob("*.zip")):
        with zipfile.ZipFile(path) as archive:
            found += [json.loads(line) for line in archive.read("messages.json").splitlines()]
    return [message.get("payload", message) for message in found]


def offline(folder: Path) -> dict[str, Any]:
    """Options of `comet_ml.start` for an experiment in `folder`."""
    return {"online": False, "experiment_config": comet_ml.ExperimentConfig(offline_directory=str(folder))}


def texts(folder: Path) -> bytes:
    """The content of the archives without the messages."""
    found = b""
    for path in sorted(folder.glob("*.zip")):
        with zipfile.ZipFile(path) as archive:
            found += b"".join(archive.read(name) for name in archive.namelist())
    return found


def metrics(found: list[dict[str, Any]], name: str) -> list[int]:
    """The steps of a metric."""
    return sorted(one["metric"]["step"] for one in found if (one.get("metric") or {}).get("metricName") == name)


def main(folder: Path) -> None:
    """Train, crash, resume, and train in a running experiment."""
    run(folder / "run-a", CometWriter(project_name="lines", artifacts="last", **offline(folder / "a")))
    found = messages(folder / "a")
    assert metrics(found, "train/loss") == list(range(1, 9))
    text = json.dumps(found)
    assert "media/ramp" in text
    assert "media/table-8.csv" in text
    assert b"after step 8" in texts(folder / "a")
    assert '"arguments.train_batch_size"' in text
    assert '"module.width"' in text
    assert "MANIFEST.json" in text  # of the checkpoint

    run(folder / "run-b", CometWriter(**offline(folder / "b")), crash=RuntimeError("crash"))
    assert '"failed"' in json.dumps(messages(folder / "b"))
    first = json.loads((folder / "run-b" / "comet-run.json").read_text())
    run(folder / "run-b", CometWriter(**offline(folder / "b")), resume="auto")
    assert json.loads((folder / "run-b" / "comet-run.json").read_text()) == first
    assert set(metrics(messages(folder / "b"), "train/loss")) == set(range(1, 9))

    mine = comet_ml.start(project_name="mine", **offline(folder / "c"))
    run(folder / "run-c", "comet")
    assert comet_ml.get_running_experiment() is mine
    mine.end()
    assert len(list((folder / "c").glob("*.zip"))) == 1
    assert metrics(messages(folder / "c"), "train/loss") == list(range(1, 9))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
