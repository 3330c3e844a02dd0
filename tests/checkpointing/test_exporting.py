"""A model export has a README, and plain PyTorch reads it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import trainstack as ts
from tests.checkpointing.support import make_checkpoint
from tests.helpers.modules import Classifier, train
from trainstack.errors import CheckpointError


def code_of(readme: str) -> str:
    """The first block of Python on the page."""
    found = re.search(r"```python\n(.*?)```", readme, re.S)
    assert found is not None
    return found.group(1)


def load_by_the_readme(export: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the code of README.md in its folder; returns its text."""
    text = (export / "README.md").read_text(encoding="utf-8")
    monkeypatch.chdir(export)
    exec(code_of(text), {"model": model})
    return text


@pytest.mark.spec("PMT-13", "HZ-34", "FN-43")
def test_a_trainers_export_describes_itself_and_how_to_load_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Classifier(validate=True)
    trainer = train(module, tmp_path, epochs=2)
    trainer.export(tmp_path / "deep" / "export")
    other = Classifier(seed=9)
    text = load_by_the_readme(tmp_path / "deep" / "export", other, monkeypatch)

    for name, tensor in module.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    for row in ("| module | Classifier |", "| backend | sp |", "| global_batch | 8 |", "| global steps | 12 |"):
        assert row in text
    assert "| val/loss | " in text
    assert f"| torch | {torch.__version__} |" in text


def test_the_final_export_of_a_training_has_a_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Classifier()
    train(module, tmp_path, checkpointer_args=ts.DefaultCheckpointerArguments())
    other = Classifier(seed=9)
    load_by_the_readme(next(tmp_path.glob("checkpoints/checkpoint-model-*")), other, monkeypatch)

    assert torch.equal(other.net[0].weight, module.net[0].weight)


def test_tied_weights_are_loaded_by_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.out.weight = self.into.weight

    model, other = Tied(), Tied()
    ts.export_model(model, tmp_path / "tied")
    load_by_the_readme(tmp_path / "tied", other, monkeypatch)

    assert torch.equal(other.out.weight, model.into.weight)


def test_a_state_beyond_tensors_needs_read_model(tmp_path: Path) -> None:
    state = {"weight": torch.ones(2), "vocabulary": ["a", "b"]}
    text = (ts.export_model(state, tmp_path / "words") / "README.md").read_text(encoding="utf-8")

    assert "load_file" not in text
    assert 'read_model(".")' in text
    assert ts.read_model(tmp_path / "words")["vocabulary"] == ["a", "b"]


def test_the_readme_is_the_users_to_edit(tmp_path: Path) -> None:
    export = ts.export_model(nn.Linear(2, 2), tmp_path / "model")
    (export / "README.md").write_text("mine", encoding="utf-8")

    assert ts.verify_checkpoint(export).kind == "model"


def test_an_export_of_another_state_is_not_overwritten(tmp_path: Path) -> None:
    path = ts.export_model({"w": torch.tensor(1.0)}, tmp_path / "model")
    for name in ("README.md", "tokenizer.json"):
        (path / name).write_text("mine")
    with pytest.raises(CheckpointError, match=r"an export of another state.*Use another path, or write overwrite=True"):
        ts.export_model({"w": torch.tensor(2.0)}, path)
    ts.export_model({"w": torch.tensor(1.0)}, path)
    assert [(path / name).read_text() for name in ("README.md", "tokenizer.json")] == ["mine", "mine"]

    (path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="overwrite=True"):
        ts.export_model({"w": torch.tensor(1.0)}, path)


def test_a_trainer_does_not_replace_the_export_of_another_run(tmp_path: Path) -> None:
    for seed, folder in ((1, "a"), (2, "b")):
        trainer = train(Classifier(seed=seed), tmp_path / folder)
        if seed == 1:
            trainer.export(tmp_path / "model")
    before = ts.read_model(tmp_path / "model")["net.0.bias"]
    with pytest.raises(CheckpointError, match="not replaced"):
        trainer.export(tmp_path / "model")
    assert torch.equal(ts.read_model(tmp_path / "model")["net.0.bias"], before)
    trainer.export(tmp_path / "model", overwrite=True)
    assert not torch.equal(ts.read_model(tmp_path / "model")["net.0.bias"], before)


def test_an_export_overwrites_an_export_and_nothing_else(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        ts.export_model({"w": torch.tensor(value)}, tmp_path / "model", overwrite=True)
    assert ts.read_model(tmp_path / "model")["w"] == 2.0

    checkpoint = ts.write_checkpoint(make_checkpoint(1), tmp_path, "checkpoint-1")
    with pytest.raises(CheckpointError, match="is a checkpoint, which an export does not replace"):
        ts.export_model(nn.Linear(1, 1), checkpoint)
    (tmp_path / "notes").mkdir()
    with pytest.raises(
        CheckpointError, match=r"is not a checkpoint, so it is not replaced\. Move it away, or use another path"
    ):
        ts.export_model(nn.Linear(1, 1), tmp_path / "notes")
    with pytest.raises(ts.ConfigurationError, match=r"got a list\. Pass a module or a state dict"):
        ts.export_model([1], tmp_path / "list")  # type: ignore[arg-type]
