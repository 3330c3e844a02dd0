"""The files of a checkpoint of format version 2: index, root, files of ranks, manifest."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.checkpointing.support import flip_bit, make_checkpoint, same
from trainstack.checkpointing import (
    Checkpoint,
    DefaultCheckpointer,
    DefaultCheckpointerArguments,
    Lease,
    filesystem,
    manifest,
    read_checkpoint,
    read_model,
    verify_checkpoint,
    write_checkpoint,
    write_model,
)
from trainstack.checkpointing.checksums import CHUNK_BYTES, digest
from trainstack.checkpointing.format import check_shape
from trainstack.checkpointing.verification import rank_count, read_back
from trainstack.checkpointing.writing import Payload, commit, pack
from trainstack.errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError, ConfigurationError

ELEMENTS = CHUNK_BYTES // 4


def index_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "index.json").read_text())


def test_the_index_lists_chunk_hashes_by_name_and_range(tmp_path: Path) -> None:
    weight = torch.arange(2.0 * ELEMENTS + 3)
    path = write_model({"w": weight, "b": torch.ones(2, dtype=torch.float64), "none": torch.ones(0, 2)}, tmp_path, "a")
    index = index_of(path)
    assert (index["hash"], index["chunk_bytes"]) == ("xxh3_128", 4 << 20)
    tensors = index["files"]["model.safetensors"]["tensors"]
    data = weight.numpy().tobytes()
    assert tensors["w"] == {
        "dtype": "F32",
        "shape": [2 * ELEMENTS + 3],
        "chunks": {
            f"0:{ELEMENTS}": digest(data[:CHUNK_BYTES]),
            f"{ELEMENTS}:{2 * ELEMENTS}": digest(data[CHUNK_BYTES : 2 * CHUNK_BYTES]),
            f"{2 * ELEMENTS}:{2 * ELEMENTS + 3}": digest(data[2 * CHUNK_BYTES :]),
        },
    }
    assert list(tensors) == ["b", "w", "none"]
    assert tensors["none"]["chunks"] == {"0:0": digest(b"")}


def test_hashes_of_tensor_files_and_root_are_as_documented(tmp_path: Path) -> None:
    path = write_checkpoint(make_checkpoint(1), tmp_path, "a")
    body, index = json.loads((path / "MANIFEST.json").read_text()), index_of(path)
    leaves = []
    for file, entry in index["files"].items():
        hashes = [value for tensor in entry["tensors"].values() for value in tensor["chunks"].values()]
        assert body["files"][file]["hash"] == digest("\n".join([entry["header"], *hashes]).encode())
        length = int.from_bytes((path / file).read_bytes()[:8], "little")
        assert entry["header"] == digest((path / file).read_bytes()[: 8 + length])
        for name, tensor in entry["tensors"].items():
            for place, value in tensor["chunks"].items():
                leaves.append((name, json.dumps([name, tensor["dtype"], tensor["shape"], place, value])))
    assert body["root"] == digest("\n".join(line for _, line in sorted(leaves)).encode())
    for file in ("state.json", "index.json"):
        assert body["files"][file]["hash"] == digest((path / file).read_bytes())


def test_the_root_depends_on_content_and_not_on_order(tmp_path: Path) -> None:
    def root(**tensors: torch.Tensor) -> str | None:
        path = write_model(tensors, tmp_path, "a")
        return manifest.read(path / "MANIFEST.json").root

    one, two = torch.arange(4.0), torch.ones(2, 3)
    assert root(a=one, b=two) == root(b=two, a=one)
    others = [root(a=one, c=two), root(a=one, b=two.T), root(a=one + 1, b=two), root(a=one), root(a=one.int(), b=two)]
    assert len({root(a=one, b=two), *others}) == 6


@pytest.mark.parametrize("element", [0, ELEMENTS - 1, ELEMENTS, 2 * ELEMENTS + 2])
def test_a_flipped_bit_is_named_by_tensor_and_range(tmp_path: Path, element: int) -> None:
    path = write_model({"w": torch.zeros(2 * ELEMENTS + 3), "v": torch.ones(1)}, tmp_path, "a")
    start = int.from_bytes((path / "model.safetensors").read_bytes()[:8], "little") + 8
    flip_bit(path / "model.safetensors", start + 4 * element)
    first = element // ELEMENTS * ELEMENTS
    end = min(first + ELEMENTS, 2 * ELEMENTS + 3)
    named = f"model.safetensors.*'w', elements {first} to {end} of"
    for use in (verify_checkpoint, read_model, lambda path: read_model(path, mapped=True)):
        with pytest.raises(CheckpointDamagedError, match=named):
            use(path)
    assert re.search(named, read_back(path) or "")


def test_each_rank_has_separate_files(tmp_path: Path) -> None:
    shared = torch.arange(3.0)
    ranks = [{"generator": shared, "n": 1}, {"generator": shared + 1}, {"plain": [1, (2,)]}]
    saved = replace(make_checkpoint(1), rank_states=ranks, run_id="abc")
    saved.trainer_state["same"] = shared  # type: ignore[index]
    path = write_checkpoint(saved, tmp_path, "a")
    names = {f"rank-0000{rank}.json" for rank in range(3)} | {"rank-00000.safetensors", "rank-00001.safetensors"}
    assert {file.name for file in path.glob("rank-*")} == names
    for mapped in (False, True):
        found = read_checkpoint(path, mapped=mapped)
        assert found.rank_states is not None
        assert all(same(one, other) for one, other in zip(found.rank_states, ranks, strict=True))
        assert found.run_id == "abc"
    (path / "rank-00001.safetensors").unlink()
    for use in (verify_checkpoint, read_checkpoint):
        with pytest.raises(CheckpointDamagedError, match=r"rank-00001\.safetensors is missing"):
            use(path)


@pytest.mark.parametrize("ranks", [None, [], [{}], [{}, {}]])
def test_the_number_of_ranks_comes_back(tmp_path: Path, ranks: list[dict[str, Any]] | None) -> None:
    path = write_checkpoint(replace(make_checkpoint(1), rank_states=ranks), tmp_path, "a")
    verify_checkpoint(path)
    assert read_checkpoint(path).rank_states == ranks


@pytest.mark.parametrize(
    ("count", "files"),
    [
        (None, ["rank-00000.json"]),
        (None, ["rank-00000.safetensors"]),
        (1, []),
        (2, ["rank-00000.json"]),
        (1, ["rank-00001.json"]),
        (1, ["rank-00000.json", "rank-00001.safetensors"]),
        (True, ["rank-00000.json"]),
    ],
)
def test_rank_files_must_agree_with_the_state_tree(count: Any, files: list[str]) -> None:
    content: Any = SimpleNamespace(files=dict.fromkeys(files))
    with pytest.raises(CheckpointDamagedError, match="the manifest lists the states of"):
        rank_count(Path("a"), content, {"rank_states": count})


def test_equal_names_in_module_and_rank_states_are_distinguished(tmp_path: Path) -> None:
    saved = Checkpoint(
        module_interface_state={"rank_states.0.x": torch.zeros(2), "rng_state": torch.ones(1)},
        rng_state={"y": torch.zeros(1)},
        rank_states=[{"x": torch.ones(3)}],
    )
    found = read_checkpoint(write_checkpoint(saved, tmp_path, "a"))
    assert same(found.module_interface_state, saved.module_interface_state)
    assert found.rank_states is not None
    assert same(found.rank_states[0], {"x": torch.ones(3)})


def test_the_weights_of_a_checkpoint_load_without_its_other_files(tmp_path: Path) -> None:
    path = write_checkpoint(make_checkpoint(3), tmp_path, "a")
    (path / "state.safetensors").unlink()
    assert torch.equal(read_model(path)["encoder.weight"], torch.full((3, 2), 3.0))
    with pytest.raises(CheckpointDamagedError, match=r"state\.safetensors is missing"):
        read_checkpoint(path)


def test_the_manifest_has_run_id_and_lease(tmp_path: Path) -> None:
    payload = pack(replace(make_checkpoint(1), run_id="r1"))
    lease = Lease.acquire([tmp_path])
    try:
        content = manifest.read(commit(payload, tmp_path, "a", lease=lease) / "MANIFEST.json")
        assert (content.run_id, content.lease, content.kind) == ("r1", lease.counter, "checkpoint")
    finally:
        lease.release()


def test_a_begin_entry_has_a_manifest_alone(tmp_path: Path) -> None:
    payload = Payload(kind="begin", parts={}, texts={}, global_step=None, plan=None, metadata=None, run_id="r1")
    path = commit(payload, tmp_path, "begin-1")
    assert [file.name for file in path.iterdir()] == ["MANIFEST.json"]
    content = manifest.read(path / "MANIFEST.json")
    assert (content.kind, content.run_id, content.files, content.root) == ("begin", "r1", {}, None)
    verify_checkpoint(path)
    for use in (read_checkpoint, read_model):
        with pytest.raises(CheckpointMismatchError, match="has no state"):
            use(path)


def test_room_for_tensors_and_one_mebibyte_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make_checkpoint(1)
    weight = torch.zeros(1000)
    tensors.module_interface_state = {"w": weight}
    monkeypatch.setattr(filesystem, "free_bytes", lambda path: weight.nbytes + (1 << 20) - 1)
    with pytest.raises(CheckpointError, match="bytes are free"):
        write_checkpoint(tensors, tmp_path, "a")
    monkeypatch.setattr(filesystem, "free_bytes", lambda path: pack(tensors).size)
    write_checkpoint(tensors, tmp_path, "a")


def test_a_manifest_too_large_to_read_is_not_written(tmp_path: Path) -> None:
    for metadata in ({"x": "a" * (17 << 20)}, {"x": [0] * 600_000}):
        with pytest.raises(CheckpointError, match="Put large values into a state"):
            write_checkpoint(Checkpoint(metadata=metadata), tmp_path, "a")
        assert not (tmp_path / "a").exists()


def test_a_checkpoint_is_read_back_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_checkpoint(make_checkpoint(1), tmp_path, "a")
    dropped: list[str] = []
    advise = os.posix_fadvise

    def note(descriptor: int, *rest: int) -> None:
        dropped.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        advise(descriptor, *rest)

    monkeypatch.setattr(os, "posix_fadvise", note)
    os.mkfifo(path / "fifo")  # without a writer
    assert read_back(path) is None
    assert sorted(dropped) == sorted(file.name for file in path.iterdir() if file.is_file())
    flip_bit(path / "state.json", 5)
    assert "state.json is damaged" in (read_back(path) or "")
    (path / "state.json").unlink()
    assert "state.json is missing" in (read_back(path) or "")
    shutil.rmtree(path)
    assert "No such file" in (read_back(path) or "")


def test_a_folder_of_pickles_is_refused_with_a_correction(tmp_path: Path) -> None:
    trace = tmp_path / "trace"

    class Bad:
        def __reduce__(self) -> Any:
            return trace.touch, ()

    path = write_checkpoint(make_checkpoint(1), tmp_path, "checkpoint-000000001")
    torch.save(Bad(), path / "extra.pt")
    verify_checkpoint(path)
    read_checkpoint(path)  # files that the manifest does not list are ignored
    for name in ("model.pt", "model.PTH", "pytorch_model.bin", "last.ckpt"):
        folder = tmp_path / f"folder {name}"
        folder.mkdir()
        torch.save(Bad(), folder / name)
        for use in (read_checkpoint, read_model, DefaultCheckpointer(DefaultCheckpointerArguments()).load):
            with pytest.raises(CheckpointError, match=rf"load_torch_weights\('.*{name}'\)"):
                use(folder)
    assert not trace.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"module_interface_state": [1]},
        {"trainer_state": "x"},
        {"rank_states": [[1]]},
        {"plan": [1]},
        {"metadata": 3},
        {"history_state": {"t": torch.zeros([1] * 65)}},
        {"global_step": -1},
        {"run_id": 3},
    ],
    ids=str,
)
def test_values_that_could_not_be_read_back_are_not_written(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        write_checkpoint(replace(make_checkpoint(1), **changes), tmp_path, "a")
    assert not list(tmp_path.iterdir())


def test_a_shape_has_at_most_64_lengths() -> None:
    assert check_shape([1] * 64) == 1
    for shape in ([1] * 65, 3, (2, 2)):
        with pytest.raises(ValueError, match="the shape is not a list of at most 64 lengths"):
            check_shape(shape)


@pytest.mark.parametrize("name", ["x" * 300, "loop", "file/inner", "nul\0"])
def test_an_unusable_path_raises_an_error_of_the_library(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    for use in (verify_checkpoint, read_checkpoint, read_model):
        with pytest.raises(ConfigurationError if "\0" in name else CheckpointError):
            use(tmp_path / name)


def test_tensors_without_elements_may_have_names_in_any_order(tmp_path: Path) -> None:
    state = {name: torch.zeros(0, len(name)) for name in ("z", "y", "xx", "a")} | {"b": torch.ones(2)}
    path = write_model({**state, "0": torch.ones(1), "c": torch.zeros(0)}, tmp_path, "a")
    verify_checkpoint(path)
    for mapped in (False, True):
        assert same(read_model(path, mapped=mapped)["xx"], state["xx"])
