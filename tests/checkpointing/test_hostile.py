"""Checkpoints that an attacker made: right hashes, wrong content, special files."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpointing.support import make_checkpoint
from tests.helpers.costs import cpu_s, least
from tests.helpers.patience import patience
from tools import hostile_checkpoints
from trainstack import warm_start
from trainstack.checkpointing import (
    list_checkpoints,
    manifest,
    read_checkpoint,
    regular_files,
    verify_checkpoint,
    write_checkpoint,
)
from trainstack.checkpointing.decoding import StateDecoder
from trainstack.checkpointing.tensorfile import read_unverified_tensors
from trainstack.errors import CheckpointDamagedError, CheckpointError

FILES = ("MANIFEST.json", "model.safetensors", "state.safetensors", "state.json", "index.json")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_checkpoint(make_checkpoint(1, step=1), tmp_path, "checkpoint-000000001")


def fifo(file: Path) -> None:
    os.mkfifo(file)


def bound_socket(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        os.chdir(file.parent)  # the address has at most 108 bytes
        made.bind(file.name)


def link_to(target: str) -> Callable[[Path], None]:
    return lambda file: file.symlink_to(target)


def folder(file: Path) -> None:
    file.mkdir()


def sparse(size: int) -> Callable[[Path], None]:
    def make(file: Path) -> None:
        with open(file, "wb") as handle:
            handle.truncate(size)

    return make


SPECIAL = {
    "fifo": fifo,
    "socket": bound_socket,
    "link to /dev/zero": link_to("/dev/zero"),
    "link to itself": link_to("state.json"),
    "link to a fifo": lambda file: (fifo(file.with_name("other")), file.symlink_to("other")),
    "folder": folder,
    "sparse 4 TiB": sparse(1 << 42),
    "sparse 6 GiB": sparse(6 << 30),
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
def test_a_special_file_is_damage_and_blocks_nothing(
    path: Path, file: str, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path)
    (path / file).unlink()
    make(path / file)
    began = time.monotonic()
    for use in (verify_checkpoint, read_checkpoint, lambda path: read_checkpoint(path, mapped=True)):
        with pytest.raises(CheckpointDamagedError, match=file):
            use(path)
    assert len(list_checkpoints(path.parent)) == (file != "MANIFEST.json")
    assert time.monotonic() - began < patience(2)


def safetensors_file(file: Path, size: int) -> None:
    """A sparse file whose header fits."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with open(file, "wb") as handle:
        handle.write(len(header).to_bytes(8, "little") + header)
        handle.truncate(8 + len(header) + size)


def test_a_file_larger_than_memory_is_refused_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors_file(tmp_path / "a.safetensors", 1 << 42)
    with pytest.raises(CheckpointDamagedError, match="refused before it is read"):
        read_unverified_tensors(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointDamagedError, match="refused before it is read"):
        warm_start(torch.nn.Linear(1, 1), tmp_path / "a.safetensors")
    safetensors_file(tmp_path / "b.safetensors", 1 << 20)
    assert read_unverified_tensors(tmp_path / "b.safetensors")["w"].numel() == 1 << 20
    monkeypatch.setattr(regular_files, "available_memory", lambda: 1 << 20)
    with pytest.raises(CheckpointDamagedError, match="refused before it is read"):
        read_unverified_tensors(tmp_path / "b.safetensors")


def test_a_wrong_header_length_is_damage(tmp_path: Path) -> None:
    for length in (0, 7, 1 << 20, 1 << 62, 2**64 - 1):
        (tmp_path / "a.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
        with pytest.raises(CheckpointDamagedError, match="header"):
            read_unverified_tensors(tmp_path / "a.safetensors")


def test_a_json_text_that_becomes_too_many_objects_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b'{"a": [' + b"{}," * 100_000 + b"{}]}"
    (path / "state.json").write_bytes(data)
    resign(path, {"state.json": data})
    read_checkpoint(path)
    monkeypatch.setattr(regular_files, "available_memory", lambda: 20_000_000)
    with pytest.raises(CheckpointDamagedError, match="refused before it is read"):
        read_checkpoint(path)


def resign(path: Path, contents: dict[str, bytes] | None = None, **changes: Any) -> None:
    """Write a manifest with right hashes."""
    body = json.loads((path / "MANIFEST.json").read_text())
    for name, data in (contents or {}).items():
        body["files"][name] = {"size": len(data), "hash": hostile_checkpoints.digest(data)}
    (path / "MANIFEST.json").write_bytes(hostile_checkpoints.sign({**body, **changes}))


WRONG_FIELDS: list[dict[str, Any]] = [
    *({"sequence": value} for value in ("1", -1, True, 1.0, 2**63, None, [], 10**400)),
    *({"name": value} for value in ({}, "", "a/b", "..", ".tmp", "a\0", 3, "a" * 256)),
    *({"created": value} for value in ("", "2026-01-01\x1b10:00:00+00:00", 5, "٢٠٢٦-01-01T10:00:00+00:00")),
    *({"files": value} for value in ([], {"../x": {"size": 1, "hash": "0" * 32}}, {"state.json": 3}, {}, None)),
    *({"versions": value} for value in ({"a": 1}, [], None)),
    *({"kind": value} for value in ("Checkpoint", None, ["checkpoint"], "begin")),
    *({"plan": value} for value in ([], 3, "x", {"$type": "nonsense"}, {"$type": "tensor", "name": "x"})),
    *({"metadata": value} for value in ([], {"$type": "int", "hex": "zz"}, {"a": "@list900"})),
    *({"global_step": value} for value in ("1", -1, 1.5, True)),
    *({"run_id": value} for value in (3, [], True)),
    *({"lease": value} for value in ("0", -1, None, True)),
    *({"root": value} for value in (None, "", "0" * 31, 3)),
    *({"hash": value} for value in (None, "md5", 3)),
    *({"format_version": value} for value in (0, -1, "2", None, True, 2.0)),
    {"format": "other"},
]


@pytest.mark.parametrize("changes", WRONG_FIELDS, ids=[str(number) for number in range(len(WRONG_FIELDS))])
def test_a_manifest_field_of_another_type_is_damage(path: Path, changes: dict[str, Any]) -> None:
    resign(path, **changes)
    for use in (verify_checkpoint, read_checkpoint):
        with pytest.raises(CheckpointDamagedError, match=r"MANIFEST\.json"):
            use(path)
    assert list_checkpoints(path.parent) == []


def test_a_root_of_other_tensors_is_damage(path: Path) -> None:
    resign(path, root="0" * 32)
    with pytest.raises(CheckpointDamagedError, match=r"has another root than MANIFEST\.json"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    "content", [b"[]", b"3", b"null", b'"x"', b"", b"\0", b"[" * 100_000, b'{"a":' * 100_000, b"{" + b'"a":0,' * 9]
)
@pytest.mark.parametrize("signed", [False, True])
def test_a_manifest_other_than_an_object_is_damage(path: Path, content: bytes, signed: bool) -> None:
    tail = b',\n "manifest_xxh3_128": "' + hostile_checkpoints.digest(content + b"\n}\n").encode() + b'"\n}\n'
    (path / "MANIFEST.json").write_bytes(content + tail if signed else content)
    with pytest.raises(CheckpointDamagedError, match=r"MANIFEST\.json"):
        manifest.read(path / "MANIFEST.json")
    assert list_checkpoints(path.parent) == []


def test_metrics_beyond_a_float_are_omitted(path: Path) -> None:
    huge = {"$type": "int", "hex": hex(10**400)}
    resign(path, metadata={"metrics": {"huge": huge, "loss": 1, "text": "x", "list": []}})
    (info,) = list_checkpoints(path.parent)
    assert info.metrics == {"loss": 1.0}


DECODED: list[Any] = [
    {"$type": "deque", "items": [], "maxlen": 2**70},
    {"$type": "deque", "items": [], "maxlen": -1},
    {"$type": "complex", "parts": [10**400, 0]},
    {"$type": "numpy", "dtype": "<f4", "base64": ""},
    {"$type": "numpy", "dtype": "<U0", "base64": ""},
    {"$type": "numpy", "dtype": "O", "base64": "AAAA"},
    {"$type": "numpy", "dtype": "(3,)f8,i4", "base64": "AAAA"},
    {"$type": "torch.dtype", "name": "_inductor"},
    {"$type": "torch.dtype", "name": "nn"},
    {"$type": "torch.dtype", "name": {}},
    {"$type": "torch.device", "name": "nowhere"},
    {"$type": "torch.device", "name": 0},
    {"$type": "torch.Size", "items": [2**70]},
    {"$type": "torch.Size", "items": "ab"},
    {"$type": "tuple", "items": "ab"},
    {"$type": "tuple"},
    {"$type": ["tuple"]},
    {"$type": "set", "items": [[]]},
    {"$type": "dict", "items": [[1, 2, 3]]},
    {"$type": "dict", "items": [[{}, 1]]},
    {"$type": "defaultdict", "factory": "os.system", "items": []},
    {"$type": "OrderedDict", "items": [], "versions": [1]},
    {"$type": "OrderedDict", "items": [], "versions": {"": 3}},
    {"$type": "tensor", "name": "absent"},
    {"$type": "tensor", "name": "t", "dtype": "complex128", "shape": [2**63, 0]},
    {"$type": "ndarray", "name": "t", "dtype": "<f4", "shape": [-1]},
    {"$type": "sparse tensor", "layout": "_inductor", "shape": [1], "parts": {}},
    {"$type": "sparse tensor", "layout": "strided", "shape": [1], "parts": {}},
    {"$type": "bytes", "base64": "&&"},
    {"$type": "float", "value": "one"},
    {"$type": "int", "hex": 5},
    {"$type": "int", "hex": "zz"},
]


@pytest.mark.parametrize("tree", DECODED, ids=[str(number) for number in range(len(DECODED))])
def test_a_wrong_tag_is_damage_and_imports_nothing(tree: Any) -> None:
    before = set(sys.modules)
    with pytest.raises(CheckpointDamagedError, match="cannot be decoded") as caught:
        StateDecoder({"t": torch.zeros(3)}).decode({"a": [tree]})
    assert len(str(caught.value)) < 1000
    assert set(sys.modules) == before


def colliding(kind: str) -> Iterator[Any]:
    """Keys with one hash."""
    for k in range(1, 20_000):
        if kind == "int":
            yield k * (2**61 - 1)
        elif kind == "complex":
            yield {"$type": "complex", "parts": [float(1_000_003 * k), float(-k)]}
        else:
            yield {"$type": "tuple", "items": [k * (2**61 - 1)]}


@pytest.mark.parametrize("kind", ["int", "complex", "tuple"])
@pytest.mark.parametrize("container", ["set", "frozenset", "dict", "Counter", "OrderedDict", "defaultdict"])
def test_keys_with_equal_hashes_are_refused_in_bounded_time(kind: str, container: str) -> None:
    keys = list(colliding(kind))
    items = keys if "set" in container else [[key, 0] for key in keys]

    def decode() -> None:
        with pytest.raises(CheckpointDamagedError, match="same hash"):
            StateDecoder({}).decode({"$type": container, "items": items, "factory": None})

    assert least(lambda: cpu_s(decode), 1.5) < 1.5


def test_keys_that_differ_are_many(tmp_path: Path) -> None:
    numbers = set(range(-5000, 5000)) | {2**61 - 1 + k for k in range(5000)}
    saved = make_checkpoint(1)
    saved.trainer_state = {"seen": numbers, "by": dict.fromkeys(numbers)}
    found = read_checkpoint(write_checkpoint(saved, tmp_path, "a")).trainer_state
    assert found == saved.trainer_state


def test_a_state_that_nests_too_deep_is_damage() -> None:
    tree: Any = 1
    for _ in range(300):
        tree = [tree]
    with pytest.raises(CheckpointDamagedError, match="nests deeper"):
        StateDecoder({}).decode(tree)


def test_no_case_of_the_campaign_is_a_fault(tmp_path: Path) -> None:
    for name, run, cases in (("d", hostile_checkpoints.damage, 60), ("h", hostile_checkpoints.hostile, 80)):
        (tmp_path / name).mkdir()
        report = run(cases, 1, tmp_path / name)
        assert not report.faults, str(report)
        assert report.answers["refused"] + report.answers["CheckpointDamagedError"] > cases


def test_the_campaign_finds_accepted_damages_and_unexpected_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostile_checkpoints, "verify_checkpoint", lambda path: None)
    assert hostile_checkpoints.damage(20, 0, tmp_path).faults

    def reading(path: Path) -> None:
        if path.name != "correct":
            (tmp_path / "written").write_text("x")
            raise KeyError

    monkeypatch.setattr(hostile_checkpoints, "verify_checkpoint", reading)
    (tmp_path / "h").mkdir()
    faults = hostile_checkpoints.hostile(1, 0, tmp_path / "h", commands=False).faults
    assert any("KeyError" in fault for fault in faults)
    assert any("open" in fault for fault in faults)


def test_a_damaged_entry_does_not_hide_others(path: Path) -> None:
    write_checkpoint(make_checkpoint(2, step=2), path.parent, "checkpoint-000000002")
    resign(path, sequence="7")
    assert [info.name for info in list_checkpoints(path.parent)] == ["checkpoint-000000002"]
    with pytest.raises(CheckpointError):
        read_checkpoint(path)
