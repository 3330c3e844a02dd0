"""Every file of a sharded checkpoint, damaged in five ways: it is named, and the checkpoint before it is used."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpointing.sharded_support import write_sharded
from tests.checkpointing.support import flip_bit, make_checkpoint, mark_of
from trainstack.checkpointing import (
    DefaultCheckpointer,
    DefaultCheckpointerArguments,
    list_checkpoints,
    read_checkpoint,
    verify_checkpoint,
)
from trainstack.checkpointing.checksums import FileRecord, digest
from trainstack.checkpointing.directory import read_manifest
from trainstack.checkpointing.manifest import Manifest, parse, render
from trainstack.checkpointing.sharded.stored_tensors import open_tensors
from trainstack.errors import CheckpointDamagedError

SIZE = 3


def checkpoint(mark: int) -> Any:
    """A checkpoint with rows for each rank, a state of each rank, and plain values."""
    made = make_checkpoint(mark, step=mark)
    made.rank_states = [{"noise": torch.full((2,), float(rank))} for rank in range(SIZE)]
    return made


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    for mark in (1, 2):
        write_sharded(checkpoint(mark), folder, f"checkpoint-{mark:09d}", SIZE)
    return folder


FILES = [
    "MANIFEST.json",
    "index.json",
    "state.json",
    *(f"{part}.rank-{rank:05d}-of-00003.safetensors" for part in ("model", "state") for rank in (1, 2, 3)),
    *(f"rank-{rank:05d}.{suffix}" for rank in range(SIZE) for suffix in ("json", "safetensors")),
]


def flip(path: Path) -> None:
    flip_bit(path, path.stat().st_size - 1, 3)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def swap(path: Path) -> None:
    """Put another rank's file in place of this one; of files that all ranks share, that of the checkpoint before."""
    kind = re.sub(r"rank-\d+", "rank-*", path.name)
    others = [other for other in sorted(path.parent.glob(kind)) if other.read_bytes() != path.read_bytes()]
    shutil.copy(others[0] if others else path.parent.with_name("checkpoint-000000001") / path.name, path)


WAYS: list[Callable[[Path], None]] = [flip, truncate, Path.unlink, extend, swap]


def test_the_list_of_files_is_that_of_a_checkpoint(original: Path) -> None:
    assert sorted(FILES) == sorted(path.name for path in (original / "checkpoint-000000002").iterdir())


@pytest.mark.parametrize("file", FILES)
def test_damage_is_named_and_the_newest_intact_one_is_used(
    original: Path, tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(original, tmp_path / "run")
    damaged = tmp_path / "run" / "checkpoint-000000002"
    before = (damaged / file).read_bytes()
    for way in WAYS:
        way(damaged / file)
        assert not (damaged / file).exists() or (damaged / file).read_bytes() != before
        expect_noticed(damaged, file, way, caplog)
        (damaged / file).write_bytes(before)
    verify_checkpoint(damaged)


def expect_noticed(damaged: Path, file: str, way: Callable[[Path], None], caplog: pytest.LogCaptureFixture) -> None:
    """Every way to read `damaged` names the file, and a resume uses the checkpoint before it."""
    caplog.clear()
    foreign = way is swap and file == "MANIFEST.json"  # it is intact, but lists tensors of another checkpoint
    for use in (verify_checkpoint, read_checkpoint):
        with pytest.raises(CheckpointDamagedError, match="damaged" if foreign else file):
            use(damaged)
    checkpointer = DefaultCheckpointer(DefaultCheckpointerArguments(save_dir=str(damaged.parent)))
    with caplog.at_level(logging.WARNING, "trainstack"):
        found = checkpointer.load("auto")
    assert mark_of(found) == 1
    assert foreign or ("checkpoint-000000002" in caplog.text and file in caplog.text)


def signed(content: Manifest, **changes: Any) -> bytes:
    """The bytes of a manifest with other values and a right hash of itself, which `render` would refuse to write."""
    body = json.loads(render(content))
    del body["manifest_xxh3_128"]
    body |= changes
    text = json.dumps(body, indent=1) + "\n"
    return text[:-3].encode() + f',\n "manifest_xxh3_128": "{digest(text.encode())}"\n}}\n'.encode()


@pytest.mark.parametrize(
    "name",
    [
        "model.rank-00004-of-00003.safetensors",
        "model.rank-00000-of-00003.safetensors",
        "model.safetensors",
        "model.rank-00001-of-00002.safetensors",
        "../model.rank-00001-of-00003.safetensors",
        "part-00000.json",
    ],
)
def test_manifests_with_names_of_no_part_are_refused(original: Path, name: str) -> None:
    content = read_manifest(original / "checkpoint-000000002")
    files = json.loads(render(content))["files"]
    files[name] = files["model.rank-00001-of-00003.safetensors"]
    with pytest.raises(CheckpointDamagedError, match=r"different numbers of files|is not a file"):
        parse(signed(content, files=files), Path("MANIFEST.json"))


def hostile(index: dict[str, Any], change: str) -> None:
    """Alter the entry of the rows of rank 2."""
    entry = index["files"]["model.rank-00002-of-00003.safetensors"]["tensors"]["encoder.weight"]
    match change:
        case "row twice":
            entry["first"] = 0
        case "row twice, with its chunks":  # all hashes agree
            entry["first"], entry["chunks"] = 0, {"0:2": next(iter(entry["chunks"].values()))}
        case "row nowhere":
            entry["first"] = 2
        case "beyond the end":
            entry["first"] = 2**62
        case "negative":
            entry["first"] = -1
        case "other shape":
            entry["whole"] = [3, 3]
        case "huge shape":
            entry["whole"] = [2**62, 2]
        case "too many dimensions":
            entry["whole"] = [1] * 65
        case "no rows":
            del entry["whole"]
        case "no chunks":
            entry["chunks"] = {}
        case "other chunks":
            entry["chunks"] = {"0:4": next(iter(entry["chunks"].values()))}
        case "joined is absent":
            del index["joined"]
        case "joined is a list":
            index["joined"] = [1]
        case "joined too much":
            index["joined"]["encoder.weight"]["6:8"] = "0" * 32
        case "joined is not a hash":
            index["joined"]["encoder.weight"]["0:6"] = "zzz"
        case "joined is another hash":
            index["joined"]["encoder.weight"]["0:6"] = "0" * 32


@pytest.mark.parametrize(
    "change",
    [
        "row twice",
        "row twice, with its chunks",
        "row nowhere",
        "beyond the end",
        "negative",
        "other shape",
        "huge shape",
        "too many dimensions",
        "no rows",
        "no chunks",
        "other chunks",
        "joined is absent",
        "joined is a list",
        "joined too much",
        "joined is not a hash",
        "joined is another hash",
    ],
)
def test_an_index_with_right_hashes_and_wrong_rows_is_refused(original: Path, tmp_path: Path, change: str) -> None:
    path = tmp_path / "checkpoint-000000002"
    shutil.copytree(original / path.name, path)
    index = json.loads((path / "index.json").read_bytes())
    hostile(index, change)
    data = (json.dumps(index, separators=(",", ":")) + "\n").encode()
    (path / "index.json").write_bytes(data)
    content = read_manifest(path)
    files = json.loads(render(content))["files"]
    files["index.json"] = vars_of(FileRecord(size=len(data), hash=digest(data)))
    (path / "MANIFEST.json").write_bytes(signed(content, files=files))

    for use in (verify_checkpoint, read_checkpoint, open_tensors):
        with pytest.raises(CheckpointDamagedError, match=r"index\.json"):
            use(path)


def vars_of(record: FileRecord) -> dict[str, Any]:
    return {"size": record.size, "hash": record.hash}


def test_a_directory_that_was_never_committed_is_not_seen(original: Path, tmp_path: Path) -> None:
    """The files of all ranks are there, and the manifest is not."""
    shutil.copytree(original / "checkpoint-000000001", tmp_path / "checkpoint-000000001")
    shutil.copytree(original / "checkpoint-000000002", tmp_path / ".tmp-checkpoint-000000002-host-1-" / "inside")
    left = tmp_path / f".tmp-checkpoint-000000002-host-1-{'0' * 32}"
    shutil.copytree(original / "checkpoint-000000002", left)
    assert [info.name for info in list_checkpoints(tmp_path)] == ["checkpoint-000000001"]
