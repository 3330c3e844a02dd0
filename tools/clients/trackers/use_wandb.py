"""wandb offline: a new run with media and artifacts, a crash, a resume, and the run of a sweep."""

import os
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import wandb
from wandb.proto import wandb_internal_pb2

from tools.clients.trackers.common import run
from trainstack import WandbWriter


def records(folder: Path) -> list[wandb_internal_pb2.Record]:
    """All records in the files of the offline runs below `folder`; the process of wandb writes them with a delay."""
    files, patience = sorted(folder.rglob("*.wandb")), time.monotonic() + 60
    while True:
        found = [wandb_internal_pb2.Record.FromString(data) for path in files for data in chunks(path.read_bytes())]
        if len(exit_codes(found)) >= len(files) or time.monotonic() > patience:
            return found
        time.sleep(0.2)


def chunks(content: bytes) -> Iterator[bytes]:
    """The records in a file of LevelDB's log format after a header of 7 bytes. The package of wandb has no reader."""
    block, place, record = 32768, 7, b""
    while place + 7 <= len(content):
        left = block - place % block
        if left < 7:
            place += left
            continue
        size, kind = struct.unpack_from("<HB", content, place + 4)
        record += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            yield record
            record = b""


def logged(found: list[wandb_internal_pb2.Record]) -> dict[str, list[str]]:
    """The logged values by name, as JSON."""
    values: dict[str, list[str]] = {}
    for record in found:
        for item in record.history.item:
            values.setdefault(item.key or "/".join(item.nested_key), []).append(item.value_json)
    return values


def exit_codes(found: list[wandb_internal_pb2.Record]) -> list[int]:
    """The exit status of each run."""
    return [record.exit.exit_code for record in found if record.HasField("exit")]


def main(folder: Path) -> None:
    """Train, crash, resume, and train in an open run."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    run(folder / "a", WandbWriter(project="lines", artifacts="last"))
    found = records(folder / "a")
    values = logged(found)
    assert len(values["train/loss"]) == 8
    kinds = {name: set(values[f"media/{name}/_type"]) for name in ("ramp", "note", "table")}
    assert kinds == {"ramp": {'"image-file"'}, "note": {'"html-file"'}, "table": {'"table-file"'}}
    config = [update.key for record in found if record.HasField("run") for update in record.run.config.update]
    assert {"arguments", "plan", "module"} <= set(config)
    assert "model" in {record.artifact.type for record in found}
    assert exit_codes(found) == [0]

    run(folder / "b", "wandb", crash=RuntimeError("crash"))
    assert exit_codes(records(folder / "b")) == [1]
    run(folder / "b", "wandb", resume="auto")
    found = records(folder / "b")
    assert len({record.run.run_id for record in found if record.HasField("run")}) == 1
    assert sorted(exit_codes(found)) == [0, 1]

    with wandb.init(dir=folder, project="sweep", mode="offline") as mine:
        run(folder / "c", "wandb")
        assert wandb.run is mine
        assert mine.config["arguments"]["train_batch_size"] == 8
    assert not list((folder / "c").rglob("*.wandb"))
    assert len(logged(records(folder / "wandb"))["train/loss"]) == 8


if __name__ == "__main__":
    main(Path(sys.argv[1]))
