"""Special files in the folder of a run: a training does not wait for them, and raises only errors of the library."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import trainstack as ts
from tests.helpers.modules import Classifier, numbers
from trainstack import _files
from trainstack.checkpointing.checksums import digest
from trainstack.cli.main import main
from trainstack.trainer import run_record
from trainstack.trainer.run_record import RunRecord, read_record
from trainstack.trainer.tracking.writers.tensorboard import event_files

pytestmark = pytest.mark.timeout(120)  # a read of a FIFO would wait forever

LOGS: dict[str, Any] = {"writers": ["csv", "tensorboard"], "report": True}
SAVING = ts.DefaultCheckpointerArguments()


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(path))  # the path of a socket is short


ODD: dict[str, Callable[[Path], None]] = {
    "FIFO": os.mkfifo,
    "socket": make_socket,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
    "sparse": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40),
}
EVENTS = "tensorboard/events.out.tfevents.1700000000.000000000.1"
NAMES = ("run.json", ".run.json.tmp", ".run-record.json.tmp", ".metrics.csv.tmp", "checkpoints/.tmp-last", EVENTS)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def put(kind: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    ODD[kind](path)


def go(folder: str | Path | None = "run", **changes: Any) -> ts.Trainer:
    given = {"train_batch_size": 8, "log_every": 1, "progress": "none", "checkpointer_args": SAVING}
    trainer = ts.Trainer(Classifier(numbers(8)), ts.TrainerArguments(output_dir=folder, **{**given, **LOGS, **changes}))
    trainer.train()
    return trainer


@pytest.mark.parametrize("kind", [kind for kind in ODD if kind != "sparse"])
def test_special_files_block_neither_a_start_nor_a_resume(kind: str) -> None:
    for name in NAMES:
        put(kind, Path("run", name))
    go()
    for name in NAMES:
        put(kind, Path("run", name))
    assert go(resume=True, epochs=2).global_steps_finished == 2
    assert len(ts.read_history("run").records("train/loss")) == 2


@pytest.mark.parametrize("kind", ODD)
def test_one_unreadable_record_does_not_block_other_runs(kind: str) -> None:
    put(kind, Path("runs/x/run-record.json"))
    for resume in (False, "auto"):
        assert go(None, resume=resume, writers=["csv"], report=False).global_steps_finished == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("order", "x"), ("order", float("inf")), ("order", -1), ("number", 1.5), ("finished", "no"), ("script", ["x"])],
)
def test_a_record_with_a_wrong_type_is_not_used(field: str, value: Any, tmp_path: Path) -> None:
    body = {"format": run_record._FORMAT, **asdict(RunRecord(script="s", module="m", order=3)), field: value}
    data = run_record._dump({**body, run_record._SELF_HASH: digest(run_record._dump(body))})
    (tmp_path / run_record.FILE_NAME).write_bytes(data)
    assert read_record(tmp_path) is None


@pytest.mark.parametrize("kind", ["FIFO", "endless", "sparse"])
def test_commands_and_arguments_refuse_special_files(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    go()
    for name in ("run/run.json", "run/checkpoints/mine", "weights.safetensors", "metrics.csv"):
        put(kind, Path(name))
    assert main(["interrupted", "run"]) == 2
    assert "run.json is not the file of a run" in capsys.readouterr().err
    for words in (["show", "run/checkpoints/mine"], ["diff", "run/checkpoints/mine", "run/checkpoints/last"]):
        assert main(["checkpoints", *words]) == 2
    for changes in ({"resume": "run/checkpoints/mine"}, {"init_weights_from": "weights.safetensors"}):
        with pytest.raises(ts.CheckpointError):
            go("other", **changes)
    with pytest.raises(ts.ConfigurationError):
        ts.read_history("metrics.csv")


@pytest.mark.parametrize("kind", ["FIFO", "endless"])
def test_a_log_that_is_a_special_file_is_refused(kind: str) -> None:
    put(kind, Path("run/metrics.csv"))
    with pytest.raises(ts.ConfigurationError, match="Remove or rename it, or write another output_dir"):
        go()


def _length(size: int) -> bytes:
    from tensorboard.summary.writer.record_writer import masked_crc32c

    data = struct.pack("<Q", size)
    return data + struct.pack("<I", masked_crc32c(data))


def _event(body: bytes) -> bytes:
    from tensorboard.summary.writer.record_writer import masked_crc32c

    return _length(len(body)) + body + struct.pack("<I", masked_crc32c(body))


@pytest.mark.parametrize("evil", ["_length(2**64 - 1)", "_length(2**40)", "_event(bytes([255]) * 20)"])
def test_an_event_file_with_invalid_content_is_rewritten(evil: str) -> None:
    go()
    (path,) = event_files(Path("run/tensorboard"))
    path.write_bytes(eval(evil))
    go(resume=True, epochs=2)
    assert len(event_files(Path("run/tensorboard"))) == 1
    assert event_files(Path("run/tensorboard"))[0].stat().st_size > 100


def make_folder(path: Path) -> None:
    path.mkdir(parents=True)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("run/run-record.json", make_folder),
        ("run/checkpoints", lambda path: path.symlink_to("checkpoints")),
        ("run/tensorboard", lambda path: path.write_bytes(b"")),
        ("runs", lambda path: path.symlink_to("runs")),
    ],
)
def test_an_occupied_name_raises_an_error_of_the_library(name: str, make: Callable[[Path], None]) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    make(Path(name))
    with pytest.raises(ts.CheckpointError, match=Path(name).name):
        go("run" if name != "runs" else None)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_an_unreadable_folder_does_not_count_as_empty(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    go()
    scandir = os.scandir

    def refuse(path: Any = ".") -> Any:
        if str(path).endswith("checkpoints"):
            raise OSError(code, os.strerror(code), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ts.CheckpointError, match=r"checkpoints.* cannot be (listed|owned)"):
        go(resume="auto", epochs=2)


@pytest.mark.parametrize("name", ["run-record.json", "metrics.csv"])
def test_a_full_disk_raises_an_error_of_the_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def refuse(source: Any, target: Any) -> None:
        if str(target).endswith(name):
            raise OSError(errno.ENOSPC, "No space left on device", target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(Path, "replace", refuse)  # Python 3.10 keeps the function that `os` had at its import
    with pytest.raises(ts.CheckpointError, match=r"No space left on device.*Free space"):
        go()


def test_a_path_with_a_nul_character_is_refused() -> None:
    with pytest.raises(ts.ConfigurationError, match=r"output_dir='a\\x00b' has a NUL character"):
        ts.TrainerArguments(output_dir="a\0b")


def test_a_folder_named_as_a_temporary_file_is_ignored(tmp_path: Path) -> None:
    make_folder(tmp_path / ".a.tmp" / "inner")
    _files.atomic_write(tmp_path / "a", b"x")
    assert (tmp_path / "a").read_bytes() == b"x"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.tmp", "a"]


@pytest.mark.parametrize("first", [b"", b'{"name": "a'])
def test_a_row_above_the_maximum_length_is_refused(first: bytes, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(first)
    os.truncate(file, 1 << 40)
    with pytest.raises(ts.ConfigurationError, match=r"has a row of 1,048,576 bytes or more|was not written by"):
        ts.read_history(file)
