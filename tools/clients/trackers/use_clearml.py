"""ClearML offline: a new task with media and an artifact, a crash, and an open task."""

import json
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

os.environ |= {"CLEARML_OFFLINE_MODE": "1", "CLEARML_VCS_REPO_URL": "none"}  # no search for a repository

from clearml import Task

from tools.clients.trackers.common import run
from trainstack import ClearmlWriter


def files(folder: Path) -> tuple[dict[str, Any], str, list[str]]:
    """The content of the offline session of a run: the task, all reported events, and names of files."""
    task_id = json.loads((folder / "clearml-run.json").read_text())["run"]
    (path,) = Path(os.environ["CLEARML_CACHE_DIR"]).rglob(f"*{task_id}.zip")
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        events = b"".join(archive.read(name) for name in names if name.endswith(".jsonl")).decode()
        return json.loads(archive.read("task.json")), events, names


def main(folder: Path) -> None:
    """Train, crash, and train in an open task. Only a server has the status of a task, and resumes one."""
    run(folder / "a", ClearmlWriter("lines", artifacts="last"))
    assert Task.current_task() is None
    task, events, names = files(folder / "a")
    losses = [line for line in events.split("}") if '"metric": "train"' in line and '"variant": "loss"' in line]
    assert len(losses) == 8
    assert "after step 8" in events
    assert "media/table" in events
    parameters = task["hyperparams"]["trainstack"]
    assert parameters["arguments.train_batch_size"]["value"] == "8"
    assert parameters["module.width"]["value"] == "1"
    assert len([name for name in names if "ramp" in name]) == 2
    assert len([name for name in names if "/artifacts/" in name]) == 2

    run(folder / "b", "clearml", crash=RuntimeError("crash"))
    assert Task.current_task() is None

    mine = Task.init("mine", "open", auto_connect_frameworks=False)
    run(folder / "c", "clearml")
    assert Task.current_task() is mine
    mine.close()
    assert '"variant": "loss"' in files(folder / "c")[1]


if __name__ == "__main__":
    os.environ["CLEARML_CACHE_DIR"] = sys.argv[1]
    main(Path(sys.argv[1]))
