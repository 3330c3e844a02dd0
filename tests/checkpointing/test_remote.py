"""Checkpoints in object stores: conditional writes, half uploads, damage, exports and commands, on `memory://`."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import trainstack as ts
from tests.checkpointing.support import make_checkpoint, mark_of
from tests.helpers.remote import check_all_intact, fail_writes, listing, places
from trainstack._files import remote_address
from trainstack.checkpointing import fetch, manifest, upload_export
from trainstack.checkpointing.lease import Lease
from trainstack.checkpointing.remote.entries import key_of, upload_folder
from trainstack.checkpointing.remote.leases import RemoteLeases
from trainstack.checkpointing.remote.store import ObjectStore
from trainstack.cli.main import main

RUN = "memory://bucket/run"


@pytest.fixture(autouse=True)
def empty_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    yield
    memory.store.clear()


def put_checkpoint(folder: Path, mark: int, address: str = RUN) -> str:
    """Upload a checkpoint of step `mark`; its key."""
    path = ts.checkpointing.write_checkpoint(make_checkpoint(mark, mark), folder / str(mark), f"checkpoint-{mark:09d}")
    data = (path / manifest.FILE_NAME).read_bytes()
    # the sequence of each folder begins at 1, so the newest is told by the time; here only one is newest
    key = key_of(f"checkpoints/{path.name}", data)
    upload_folder(ObjectStore(address), path, key, data)
    return key


# --- the store -----------------------------------------------------------------------------------------------


def test_of_many_that_create_an_object_one_succeeds() -> None:
    store, won = ObjectStore(RUN), list[int]()

    def create(number: int) -> None:
        if store.put_new("one", str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.read("one") == str(won[0]).encode()
    assert store.put_new("one", store.read("one"))  # the same request again, whose answer was lost


def test_any_error_for_an_existing_object_means_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    store, create = ObjectStore(RUN), type(fsspec.filesystem("memory")).pipe_file

    def refuse(self: Any, path: str, value: bytes, mode: str = "overwrite") -> None:
        if mode == "create" and (self.exists(path) or value == b"no connection"):
            raise RuntimeError("status 412")
        create(self, path, value, mode)

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "pipe_file", refuse)
    assert store.put_new("one", b"1")
    assert not store.put_new("one", b"2")
    with pytest.raises(OSError, match="cannot be written: RuntimeError: status 412"):
        store.put_new("two", b"no connection")


def test_a_missing_package_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gcsfs" else found(name))
    with pytest.raises(ts.MissingExtraError, match=r"gs://.*gcsfs.*trainstack\[gcs\]"):
        fetch("gs://bucket/run")


@pytest.mark.parametrize(
    "address", ["hf://repo/model", "http://host/run", "s3://", "s3://bucket/../run", "s3://b//run"]
)
def test_unusable_addresses_are_refused(address: str) -> None:
    with pytest.raises(ts.ConfigurationError, match=r"Write a local path|write the bucket and the folder"):
        remote_address("output_dir", address)


def test_a_store_that_ignores_the_condition_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def overwrite(self: ObjectStore, key: str, data: bytes) -> bool:
        self.put(key, data)
        return True

    monkeypatch.setattr(ObjectStore, "put_new", overwrite)
    with pytest.raises(ts.CheckpointError, match="ignores the condition"):
        Lease.acquire([RemoteLeases(ObjectStore(RUN))])


def test_one_process_owns_an_address_until_it_is_silent() -> None:
    leases = RemoteLeases(ObjectStore(RUN))
    first = Lease.acquire([leases], timeout_s=0.3)
    with pytest.raises(ts.LeaseError, match=rf"{RUN} is in use by another run: process"):
        Lease.acquire([leases], timeout_s=0.3)
    first.release()
    second = Lease.acquire([leases], timeout_s=0.3)
    assert second.counter == 2
    assert ObjectStore(RUN).list().keys() == {".lease/000000002.json"}

    second._ended.set()  # it no longer renews, as if its process were stopped
    second._thread.join()
    third = Lease.acquire([leases], timeout_s=0.3)
    assert third.counter == 3
    with pytest.raises(ts.LeaseError):
        second.verify()
    third.release()


# --- checkpoints ---------------------------------------------------------------------------------------------


def test_an_upload_that_ends_anywhere_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_checkpoint(tmp_path, 1)
    for allowed in range(100):
        left, patched = [allowed], pytest.MonkeyPatch()

        def fails(name: str, args: tuple[Any, ...], left: list[int] = left) -> bool:
            left[0] -= 1
            return left[0] < 0

        fail_writes(patched, fails)
        try:
            put_checkpoint(tmp_path, 2)
        except OSError:
            whole = False
        else:
            whole = True
        patched.undo()
        assert check_all_intact(RUN, tmp_path / f"after-{allowed}") == 1 + whole
        if whole:
            break
    assert allowed > 3
    assert places(RUN) == ["checkpoint-000000001", "checkpoint-000000002"]


def test_a_damaged_checkpoint_is_skipped_unless_it_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    older, newer = put_checkpoint(tmp_path, 1), put_checkpoint(tmp_path, 2)
    keys = [key for info, key in sorted((listing(RUN).entries[key].info.created, key) for key in (older, newer))]
    store, newest = ObjectStore(RUN), fetch(RUN, tmp_path / "whole").name
    damaged = next(key for key in keys if newest in key)
    whole = store.read(f"{damaged}/model.safetensors")
    store.put(f"{damaged}/model.safetensors", whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ts.CheckpointDamagedError, match=f"{RUN}/{damaged}"):
        fetch(f"{RUN}/{damaged}", tmp_path / "named")
    assert fetch(RUN, tmp_path / "any").name != newest
    assert "skipping a damaged checkpoint" in caplog.text


def test_full_names_short_names_and_pointers_find_a_checkpoint(tmp_path: Path) -> None:
    key = put_checkpoint(tmp_path, 7)
    pointer = {"format": "trainstack-pointer", "file_prefix": "checkpoint", "checkpoint": "another"}
    ObjectStore(RUN).put("checkpoints/last", json.dumps(pointer).encode())
    for address in (key, "checkpoints/checkpoint-000000007", "checkpoints/last", "checkpoints", ""):
        found = fetch(f"{RUN}/{address}".rstrip("/"))
        assert found.name == "checkpoint-000000007"
        assert mark_of(ts.checkpointing.read_checkpoint(found)) == 7
    with pytest.raises(ts.CheckpointNotFoundError, match="does not exist"):
        fetch(f"{RUN}/checkpoints/checkpoint-000000008")


def test_an_unsafe_key_is_never_written_to_the_disk(tmp_path: Path) -> None:
    key = put_checkpoint(tmp_path, 1)
    for name in ("a\\b", ".hidden", "another.txt"):
        ObjectStore(RUN).put(f"{key}/{name}", b"x")
    found = fetch(f"{RUN}/{key}", tmp_path / "into")
    known = manifest.read(found / manifest.FILE_NAME).files.keys() | {manifest.FILE_NAME}
    assert {path.name for path in found.iterdir()} == known


# --- exports and commands ------------------------------------------------------------------------------------


def test_an_export_is_not_replaced_unasked(tmp_path: Path) -> None:
    one = ts.export_model({"w": torch.ones(2)}, tmp_path / "one")
    other = ts.export_model({"w": torch.zeros(2)}, tmp_path / "other")
    address = "memory://bucket/model"
    upload_export(one, address, overwrite=False)
    upload_export(one, address, overwrite=False)
    assert {"model.safetensors", "README.md", "MANIFEST.json"} <= ObjectStore(address).list().keys()
    with pytest.raises(ts.CheckpointError, match="an export of another state, which is not replaced"):
        upload_export(other, address, overwrite=False)
    upload_export(other, address, overwrite=True)
    assert torch.equal(ts.read_model(fetch(address))["w"], torch.zeros(2))
    with pytest.raises(ts.CheckpointError, match="has other files"):
        upload_export(one, "memory://bucket", overwrite=True)


def test_the_commands_read_addresses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = put_checkpoint(tmp_path, 3)
    assert main(["checkpoints", "ls", RUN]) == 0
    assert "sizes agree" in capsys.readouterr().out
    assert main(["checkpoints", "ls", "--verify", "--json", f"{RUN}/checkpoints"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"][0]["problem"] is None
    assert main(["checkpoints", "verify", RUN]) == 0
    assert main(["checkpoints", "show", f"{RUN}/checkpoints/checkpoint-000000003"]) == 0
    assert main(["checkpoints", "diff", RUN, f"{RUN}/{key}"]) == 0
    store = ObjectStore(RUN)
    store.put(f"{key}/state.json", store.read(f"{key}/state.json").replace(b"3", b"4", 1))
    capsys.readouterr()
    assert main(["checkpoints", "verify", RUN]) == 1
    assert f"{RUN}/{key}" in capsys.readouterr().out
    assert main(["checkpoints", "ls", "memory://bucket/none"]) == 2
    assert "memory://bucket/none" in capsys.readouterr().err


def test_a_signature_and_its_files_are_copied_with_an_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also files that no manifest lists, such as the config.json of an export."""
    pytest.importorskip("cryptography", reason="signatures need pip install trainstack[sign]")
    public = ts.checkpointing.make_key(tmp_path / "key")
    export = ts.export_model({"weight": torch.ones(2)}, tmp_path / "export")
    (export / "config.json").write_text("{}")
    ts.checkpointing.sign_checkpoint(export, tmp_path / "key")
    upload_export(export, "memory://bucket/export", overwrite=False)

    assert main(["checkpoints", "verify", "memory://bucket/export", "--signature", str(public)]) == 0
    copy = fetch("memory://bucket/export", tmp_path / "copy")
    assert ts.checkpointing.verify_signature(copy, public).files.keys() >= {"config.json", "README.md"}
    assert main(["checkpoints", "ls", "memory://bucket"]) == 0
    assert " signed " in capsys.readouterr().out

    fsspec.filesystem("memory").pipe("/bucket/export/config.json", b"[]")
    assert main(["checkpoints", "verify", "memory://bucket/export", "--signature", str(public)]) == 1
