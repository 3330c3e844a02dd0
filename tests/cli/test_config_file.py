"""`config.yaml` beside a run, and `trainstack schema`."""

import json
from pathlib import Path
from typing import Any

import pytest

import trainstack as ts
from trainstack._yaml import read_yaml
from trainstack.cli.main import main

MODULE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts


class Own(ts.SupervisedModule):
    def __init__(self, lr: float = 0.1, width: int = 3):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
        model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))
        data = TensorDataset(inputs, inputs[:, :1])
        super().__init__(model, nn.MSELoss(), "sgd", data, optimizer_kwargs={"lr": lr})
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_config.py").write_text(MODULE)


def test_a_run_starts_again_from_its_config() -> None:
    words = ["--module.lr", "0.05", "--epochs", "2", "--train_batch_size", "4", "--progress", "none"]
    assert main(["train", "own_config.py:Own", *words, "--output_dir", "one"]) == 0
    config: Any = read_yaml("one/config.yaml")
    assert config["target"] == "own_config.py:Own"
    assert config["module"] == {"lr": 0.05, "width": 3}
    assert main(["train", "--config", "one/config.yaml", "--output_dir", "two"]) == 0
    values = [ts.read_history(folder).get_latest_metric("train/loss_epoch") for folder in ("one", "two")]
    assert values[0] == values[1]
    again: Any = read_yaml("two/config.yaml")
    assert {**config, "output_dir": "two"} == again


def test_values_that_only_code_sets_are_left_out_and_named(tmp_path: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(MODULE, namespace)
    args = {"output_dir": tmp_path / "run", "progress": "none", "writers": ["csv"], "log_level": "ERROR"}
    ts.Trainer(namespace["Own"](), ts.TrainerArguments(**args, validate_every=lambda trainer: False)).train()
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert "left out here: validate_every." in text
    assert "trainstack train FILE.py:MODULE --config" in text
    assert ts.TrainerArguments.from_yaml(tmp_path / "run" / "config.yaml").writers == ("csv",)


def test_a_file_of_the_user_is_kept(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("epochs: 1\n")
    words = ["train", "own_config.py:Own", "--config", "run/config.yaml", "--output_dir", "run", "--progress", "none"]
    assert main(words) == 0
    assert main([*words, "--overwrite", "true"]) == 0
    assert (tmp_path / "run" / "config.yaml").read_text() == "epochs: 1\n"


def test_without_a_target_the_message_says_where_to_write_it(capsys: pytest.CaptureFixture[str]) -> None:
    Path("plain.yaml").write_text("epochs: 1\n")
    assert main(["train", "--config", "plain.yaml"]) == 2
    assert "as its key target" in capsys.readouterr().err


def test_the_schema_of_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert {"target", "module", "epochs"} <= set(schema["properties"])
