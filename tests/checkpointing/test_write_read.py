"""One checkpoint directory: its files, and the states that are read from it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpointing.support import make_checkpoint, mark_of, same
from trainstack.checkpointing import (
    Checkpoint,
    filesystem,
    list_checkpoints,
    manifest,
    read_checkpoint,
    read_model,
    verify_checkpoint,
    write_checkpoint,
    write_model,
)
from trainstack.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    UnsupportedStateError,
)


@pytest.mark.spec("PMT-12")
@pytest.mark.parametrize("mapped", [False, True])
def test_all_states_come_back(tmp_path: Path, mapped: bool) -> None:
    saved = make_checkpoint(4, step=17)
    saved.callback_states = {
        "wide": torch.tensor([1 + 2j], dtype=torch.complex128),
        "odd": b"x",
        "empty": torch.ones(0),
    }
    path = write_checkpoint(saved, tmp_path, "checkpoint-17")
    found = read_checkpoint(path, mapped=mapped)
    for field in Checkpoint.__dataclass_fields__:
        assert same(getattr(found, field), getattr(saved, field)), field


@pytest.mark.spec("F109")
def test_a_tensor_shared_between_states_is_stored_once(tmp_path: Path) -> None:
    weight = torch.ones(1000)
    path = write_checkpoint(
        Checkpoint(module_interface_state={"w": weight}, trainer_state={"w": weight}), tmp_path, "a"
    )
    assert not (path / "state.safetensors").exists()
    found = read_checkpoint(path)
    assert found.module_interface_state is not None
    assert found.trainer_state is not None
    assert found.module_interface_state["w"] is found.trainer_state["w"]


def test_the_manifest_can_be_read_by_a_person(tmp_path: Path) -> None:
    path = write_checkpoint(make_checkpoint(1, step=3), tmp_path, "a")
    body = json.loads((path / "MANIFEST.json").read_text())
    assert body["format_version"] == 2
    assert (body["kind"], body["sequence"], body["name"], body["global_step"]) == ("checkpoint", 1, "a", 3)
    assert body["plan"] == {"train_batch_size": 8}
    assert body["created"].endswith("+00:00")
    assert body["versions"].keys() == {"trainstack", "torch", "numpy", "python"}
    assert body["files"].keys() == {"model.safetensors", "state.safetensors", "state.json", "index.json"}
    assert body["hash"] == "xxh3_128"
    assert sorted(child.name for child in path.iterdir()) == sorted([*body["files"], "MANIFEST.json"])


def test_views_that_overlap_come_back_apart(tmp_path: Path) -> None:
    weight = torch.arange(4.0).reshape(2, 2)
    path = write_model({"whole": weight, "row": weight[0], "turned": weight.T}, tmp_path, "a")
    for mapped in (False, True):
        found = read_model(path, mapped=mapped)
        found["whole"].zero_()
        assert torch.equal(found["row"], weight[0])
        assert torch.equal(found["turned"], weight.T)


def test_an_empty_checkpoint_is_empty() -> None:
    assert Checkpoint().is_empty
    assert Checkpoint(global_step=3).is_empty
    assert not Checkpoint(trainer_state={}).is_empty


def test_state_that_cannot_be_stored_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedStateError, match=r"trainer_backend_state\.sp contains a object"):
        write_checkpoint(Checkpoint(trainer_backend_state={"sp": object()}), tmp_path / "new", "a")
    with pytest.raises(UnsupportedStateError, match="plan contains a tensor or array at 'x'"):
        write_checkpoint(Checkpoint(plan={"x": torch.ones(1)}), tmp_path / "new", "a")
    assert not (tmp_path / "new").exists()


def test_listing_reads_manifests_only(tmp_path: Path) -> None:
    write_checkpoint(make_checkpoint(1, step=9), tmp_path, "b")
    write_model({"w": torch.ones(4)}, tmp_path, "a")
    (tmp_path / "b" / "model.safetensors").unlink()
    (tmp_path / "other").mkdir()
    found = list_checkpoints(tmp_path)
    assert [(info.name, info.kind, info.sequence, info.global_step) for info in found] == [
        ("b", "checkpoint", 1, 9),
        ("a", "model", 2, None),
    ]
    assert found[1].size > 16
    with pytest.raises(CheckpointNotFoundError):
        list_checkpoints(tmp_path / "absent")


@pytest.mark.spec("PMT-13")
def test_an_export_is_a_model_and_not_a_checkpoint(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    path = write_model(model.state_dict(), tmp_path, "export")
    assert same(read_model(path), model.state_dict())
    assert verify_checkpoint(path).kind == "model"
    with pytest.raises(CheckpointMismatchError, match="model export"):
        read_checkpoint(path)
    whole = write_checkpoint(Checkpoint(module_interface_state=model.state_dict()), tmp_path, "whole")
    assert same(read_model(whole), model.state_dict())


def test_a_model_is_read_without_the_prefix_of_its_names(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    path = write_model({"model.weight": layer.weight, "model.bias": layer.bias, "rate": torch.ones(1)}, tmp_path, "net")
    assert list(read_model(path, strip_prefix="model.")) == ["weight", "bias", "rate"]
    with pytest.raises(
        CheckpointMismatchError, match=r"strip_prefix='net\.': no name in .*net begins with it; there is"
    ):
        read_model(path, strip_prefix="net.")


def test_a_newer_format_is_refused_with_the_advice_to_upgrade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT_VERSION", 99)
        path = write_checkpoint(make_checkpoint(), tmp_path, "a")
    for use in (read_checkpoint, verify_checkpoint):
        with pytest.raises(CheckpointMismatchError, match=r"format version 99.*Upgrade trainstack"):
            use(path)


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "a\\b", "../a"])
def test_names_that_leave_the_directory_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot name a checkpoint"):
        write_checkpoint(make_checkpoint(), tmp_path, name)


def test_a_folder_other_than_a_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="is not replaced"):
        write_checkpoint(make_checkpoint(), tmp_path, "a")
    assert (tmp_path / "a" / "thesis.tex").exists()


def test_too_little_space_is_an_error_before_any_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "free_bytes", lambda path: 10)
    with pytest.raises(CheckpointError, match="10 bytes are free"):
        write_checkpoint(make_checkpoint(), tmp_path, "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.spec("F116")
def test_pickles_are_never_read(tmp_path: Path) -> None:
    fired = tmp_path / "fired"
    import pickle

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return (Path.touch, (fired,))

    bomb = pickle.dumps(Bomb())
    (tmp_path / "model.pt").write_bytes(bomb)
    with pytest.raises(CheckpointMismatchError, match=r"single file.*Pickle files .* are never read"):
        read_checkpoint(tmp_path / "model.pt")
    for index, file in enumerate(("state.json", "state.safetensors", "model.safetensors", "MANIFEST.json")):
        path = write_checkpoint(make_checkpoint(), tmp_path, f"a{index}")
        (path / file).write_bytes(bomb)
        with pytest.raises(CheckpointDamagedError, match=file):
            read_checkpoint(path)
    assert not fired.exists()
    source = "".join(
        Path(module.__file__).read_text()
        for name, module in sys.modules.items()
        if name.startswith("trainstack.checkpointing") and module.__file__
    )
    assert "import pickle" not in source
    assert "torch.save(" not in source


def test_a_place_without_checkpoint_is_not_found(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointNotFoundError):
            read_checkpoint(path)


def test_states_are_those_of_the_moment_of_saving(tmp_path: Path) -> None:
    saved = make_checkpoint(2)
    path = write_checkpoint(saved, tmp_path, "a")
    assert saved.module_interface_state is not None
    saved.module_interface_state["encoder.weight"].add_(1)
    assert mark_of(read_checkpoint(path)) == 2


def test_empty_tensors_in_any_order_can_be_read(tmp_path: Path) -> None:
    state = {name: torch.empty(0, dtype=torch.int64) for name in ("sizes", "steps", "epochs", "a")}

    path = write_checkpoint(Checkpoint(history_state={**state, "one": torch.ones(1)}), tmp_path, "one")

    assert set(read_checkpoint(path).history_state or {}) == {*state, "one"}
