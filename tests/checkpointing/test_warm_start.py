"""Weights from elsewhere: fitting ones are loaded, the others are reported."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import trainstack as ts
from trainstack.checkpointing import list_checkpoints
from trainstack.errors import CheckpointDamagedError, CheckpointMismatchError, CheckpointNotFoundError


class Net(nn.Module):
    """A body and a head of `classes`."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, classes)


class TestWarmStart:
    @pytest.mark.spec("HZ-05")
    def test_another_head_stays_as_it_was_built(self) -> None:
        source, model = Net(3), Net(5)
        head = model.head.weight.clone()
        weights = {**source.state_dict(), "extra": torch.ones(1)}
        del weights["body.bias"]
        report = ts.warm_start(model, weights)

        assert torch.equal(model.body.weight, source.body.weight)
        assert torch.equal(model.head.weight, head)
        assert report.loaded == ("body.weight",)
        assert report.missing == ("body.bias",)
        assert report.unexpected == ("extra",)
        assert report.mismatched == {
            "head.weight": "float32 [3, 4] there, float32 [5, 4] in the model",
            "head.bias": "float32 [3] there, float32 [5] in the model",
        }
        assert str(report) == (
            "loaded 1 tensor from the given tensors; 1 missing there keep their initial values: body.bias; 1 there are "
            "not in the model: extra; 2 do not fit and keep their initial values: head.weight (float32 [3, 4] "
            "there, float32 [5, 4] in the model), head.bias (float32 [3] there, float32 [5] in the model)"
        )

    def test_fitting_weights_are_all_loaded(self) -> None:
        source, model = Net(), Net()
        report = ts.warm_start(model, source.state_dict(), strict=True)

        assert report.is_complete
        assert str(report) == "loaded 4 tensors from the given tensors"

    def test_strict_refuses_and_changes_nothing(self) -> None:
        model = Net(5)
        before = model.body.weight.clone()

        with pytest.raises(CheckpointMismatchError, match=r"does not fit Net completely.*head\.weight"):
            ts.warm_start(model, Net(3).state_dict(), strict=True)
        assert torch.equal(model.body.weight, before)

    def test_an_error_names_fitting_parts_if_no_weight_fits(self) -> None:
        class Pair(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.student, self.teacher = Net(), Net()

        with pytest.raises(
            CheckpointMismatchError,
            match=r"it has body.weight.*has student\.body.*'student', 'teacher' equally.*module\.student, ",
        ):
            ts.warm_start(Pair(), Net().state_dict())
        with pytest.raises(CheckpointMismatchError, match=r"it has a; the model has .*rename"):
            ts.warm_start(Net(), {"a": torch.ones(1)})
        with pytest.raises(CheckpointMismatchError, match="it has no tensors"):
            ts.warm_start(Net(), {"note": "text"})

    def test_another_precision_fits_and_another_kind_of_number_does_not(self) -> None:
        model = Net()
        ts.warm_start(model, Net().double().state_dict(), strict=True)
        assert model.body.weight.dtype == torch.float32

        with pytest.raises(CheckpointMismatchError, match="nothing in"):
            ts.warm_start(nn.Linear(1, 1, bias=False), {"weight": torch.ones(1, 1, dtype=torch.int64)})

    def test_nested_states_are_named_by_dots(self) -> None:
        source, model = Net(), Net()
        nested = {"body": source.body.state_dict(), "head": source.head.state_dict(), "epoch": 3}

        assert ts.warm_start(model, nested).is_complete
        assert torch.equal(model.head.bias, source.head.bias)

    def test_checkpoints_exports_and_safetensors_files_are_loaded(self, tmp_path: Path) -> None:
        source = Net()
        save_file(source.state_dict(), str(tmp_path / "plain.safetensors"))
        checkpoint = ts.Checkpoint(module_interface_state=source.state_dict(), trainer_state={"a": 1})
        for path in (
            tmp_path / "plain.safetensors",
            ts.export_model(source, tmp_path / "export"),
            ts.write_checkpoint(checkpoint, tmp_path, "checkpoint-1"),
        ):
            model = Net()
            assert ts.warm_start(model, path, strict=True).source == str(path)
            assert torch.equal(model.head.weight, source.head.weight)

    @pytest.mark.parametrize(("pointer", "value"), [("last", 2.0), ("best", 1.0)])
    def test_the_checkpoint_of_a_pointer_is_loaded(self, pointer: str, value: float, tmp_path: Path) -> None:
        saver = ts.DefaultCheckpointer(ts.DefaultCheckpointerArguments(save_dir=str(tmp_path)))
        for step, loss in ((1, 0.1), (2, 0.2)):
            state = {"weight": torch.full((1, 1), float(step))}
            metrics = {"metrics": {"val/loss": loss}}
            saver.save(ts.Checkpoint(module_interface_state=state, global_step=step, metadata=metrics), step)
        model = nn.Linear(1, 1, bias=False)
        report = ts.warm_start(model, tmp_path / pointer)

        assert model.weight.item() == value
        assert report.source == str(tmp_path / f"checkpoint-00000000{int(value)}")
        for info in list_checkpoints(tmp_path):
            shutil.rmtree(info.path)
        with pytest.raises(CheckpointNotFoundError, match=f"{pointer} points to .*there is none"):
            ts.warm_start(model, tmp_path / pointer)

    def test_a_tensor_file_named_best_is_loaded(self, tmp_path: Path) -> None:
        source = Net()
        save_file(source.state_dict(), str(tmp_path / "best"))
        assert ts.warm_start(Net(), tmp_path / "best", strict=True).is_complete

    def test_a_folder_of_checkpoints_is_answered_with_one_to_name(self, tmp_path: Path) -> None:
        path = ts.write_checkpoint(ts.Checkpoint(), tmp_path / "run" / "checkpoints", "checkpoint-1")
        for folder in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
            with pytest.raises(
                CheckpointNotFoundError, match=f"is not a checkpoint.*Name one of those in it, such as {path}"
            ):
                ts.warm_start(Net(), folder)

    def test_unreadable_files_are_errors(self, tmp_path: Path) -> None:
        (tmp_path / "text.safetensors").write_text("no tensors at all, only words")
        with pytest.raises(CheckpointDamagedError, match=r"text.safetensors cannot be read as safetensors"):
            ts.warm_start(Net(), tmp_path / "text.safetensors")
        with pytest.raises(CheckpointNotFoundError, match=r"does not exist\. Name a checkpoint, an export, a folder"):
            ts.warm_start(Net(), tmp_path / "nowhere")
        (tmp_path / "text.safetensors").unlink()
        with pytest.raises(CheckpointNotFoundError, match="is not a checkpoint"):
            ts.warm_start(Net(), tmp_path)


class TestForeignWeights:
    @pytest.mark.parametrize(
        "wrap",
        [
            lambda state: state,
            lambda state: {"state_dict": state, "epoch": 3, "optimizer_states": [{"lr": 0.1}]},
            lambda state: {"model": state, "args": {"lr": 0.1}},
            lambda state: {"module": {"model_state_dict": state}},
            lambda state: {"module_interface_state": state, "trainer_state": {"last_epoch": 3}},
            lambda state: {f"module.{name}": tensor for name, tensor in state.items()},
            lambda state: {"model": {f"module._orig_mod.{name}": tensor for name, tensor in state.items()}},
        ],
    )
    def test_usual_nestings_and_wrappers_are_seen_through(self, wrap: Any, tmp_path: Path) -> None:
        source, model = Net(), Net()
        torch.save(wrap(source.state_dict()), tmp_path / "weights.pt")
        report = ts.warm_start(model, ts.load_torch_weights(tmp_path / "weights.pt"))

        assert report.is_complete
        assert torch.equal(model.body.weight, source.body.weight)

    def test_an_ambiguous_prefix_is_removed_only_on_request(self, tmp_path: Path) -> None:
        torch.save({f"model.{name}": tensor for name, tensor in Net().state_dict().items()}, tmp_path / "weights.pt")

        assert "model.body.weight" in ts.load_torch_weights(tmp_path / "weights.pt")
        assert "body.weight" in ts.load_torch_weights(tmp_path / "weights.pt", strip_prefix="model.")
        with pytest.raises(CheckpointMismatchError, match=r"no name in .* begins with it; there is 'model\.body"):
            ts.load_torch_weights(tmp_path / "weights.pt", strip_prefix="net.")

    def test_files_without_weights_are_refused(self, tmp_path: Path) -> None:
        for content, message in (
            ({"epoch": 3}, r"a dict with the keys \['epoch'\], in which there is no state dict"),
            ([torch.ones(1)], "contains a list, in which there is no state dict"),
        ):
            torch.save(content, tmp_path / "weights.pt")
            with pytest.raises(CheckpointMismatchError, match=message):
                ts.load_torch_weights(tmp_path / "weights.pt")
        with pytest.raises(CheckpointNotFoundError, match="is not a file"):
            ts.load_torch_weights(tmp_path)

    def test_a_whole_pickled_model_is_refused(self, tmp_path: Path) -> None:
        torch.save(Net(), tmp_path / "model.pt")
        with pytest.raises(CheckpointMismatchError, match=r"was not read: .*refused it.*only model\.state_dict\(\)"):
            ts.load_torch_weights(tmp_path / "model.pt")


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight


def test_two_values_for_one_tensor_are_reported() -> None:
    model = Shared()
    report = ts.warm_start(model, {"embedding.weight": torch.ones(4, 3), "head.weight": torch.full((4, 3), 2.0)})
    assert report.loaded == ("embedding.weight",)
    assert "another value there than embedding.weight" in report.mismatched["head.weight"]
    assert (model.embedding.weight == 1).all()
    same = ts.warm_start(Shared(), dict.fromkeys(("embedding.weight", "head.weight"), torch.full((4, 3), torch.nan)))
    assert same.is_complete


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (torch.tensor([1.0, 1e300], dtype=torch.float64), torch.float32),
        (torch.tensor([1.0, 1e5]), torch.float16),
        (torch.tensor([1.0, 1e5], dtype=torch.bfloat16), torch.float16),
        (torch.tensor([1, 300]), torch.int8),
    ],
)
def test_values_that_the_model_does_not_hold_are_not_loaded(given: torch.Tensor, dtype: torch.dtype) -> None:
    model = nn.Module()
    model.register_buffer("values", torch.zeros(2, dtype=dtype))
    model.register_buffer("others", torch.zeros(1))
    report = ts.warm_start(model, {"values": given, "others": torch.tensor([torch.inf], dtype=torch.float64)})
    assert report.loaded == ("others",)  # inf is a value that the source has
    assert "cannot hold" in report.mismatched["values"]
    assert (model.get_buffer("values") == 0).all()
    assert ts.warm_start(model, {"values": given[:1].expand(2)}).mismatched == {}
