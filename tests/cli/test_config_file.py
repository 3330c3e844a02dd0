"""`config.yaml` in the folder of a run, and `trainstack schema`."""

import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import trainstack as ts
from trainstack._yaml import MAX_BYTES, parse_yaml, read_yaml
from trainstack.checkpointing import fetch, read_checkpoint
from trainstack.cli.main import main
from trainstack.trainer.run_files import RunFiles

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
    assert "not in this file" not in Path("two/config.yaml").read_text()
    again: Any = read_yaml("two/config.yaml")
    assert {**config, "output_dir": "two"} == again


@pytest.mark.parametrize("address", ["memory://bucket/one", "memory://bucket/runs/1"])
def test_a_run_at_an_address_starts_again_from_the_config_there(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    words = ["--module.lr", "0.05", "--epochs", "2", "--train_batch_size", "4", "--progress", "none"]
    assert main(["train", "own_config.py:Own", *words, "--output_dir", address]) == 0
    found: Any = parse_yaml(memory.cat(f"{address}/config.yaml").decode(), "config")
    assert (found["target"], found["output_dir"]) == ("own_config.py:Own", address)

    shutil.rmtree(tmp_path / "cache")
    assert main(["train", "--config", f"{address}/config.yaml", "--output_dir", "two"]) == 0
    again: Any = read_yaml("two/config.yaml")
    assert {**found, "output_dir": "two"} == again
    ends = [read_checkpoint(fetch(address)), read_checkpoint(next(Path("two/checkpoints").glob("checkpoint-0*4")))]
    one, other = (end.module_interface_state or {} for end in ends)
    assert one
    assert all(torch.equal(one[name], other[name]) for name in one)
    memory.store.clear()


@pytest.mark.parametrize("name", ["memory://bucket/none.yaml", "memory://none.yaml"])
def test_a_config_that_is_not_at_its_address_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config", name]) == 2
    assert f"there is no file '{name}' to read arguments from" in capsys.readouterr().err
    memory = fsspec.filesystem("memory")
    memory.pipe_file("memory://bucket/short.yaml", b"epochs: 3")
    assert ts.TrainerArguments.from_yaml("memory://bucket/short.yaml").epochs == 3
    memory.pipe_file("memory://bucket/long.yaml", b" " * (MAX_BYTES + 1))
    assert main(["train", "--config", "memory://bucket/long.yaml"]) == 2
    assert "cannot be read: it has more than" in capsys.readouterr().err


def test_values_that_only_code_sets_are_omitted_and_named(tmp_path: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(MODULE, namespace)
    args = {"output_dir": tmp_path / "run", "progress": "none", "writers": ["csv"], "log_level": "ERROR"}
    arguments = ts.TrainerArguments(**args, validate_every=lambda trainer: False)
    given: dict[str, Any] = {"callbacks": [ts.callbacks.LRMonitor, ts.callbacks.StepTimer()], "metrics": {}}
    ts.Trainer(namespace["Own"](), arguments, "sp-bf16", **given).train()
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert "omitted here: metrics, callbacks (LRMonitor, StepTimer), validate_every." in text
    assert "backend: sp-bf16\n" in text
    assert "trainstack train FILE.py:MODULE --config" in text
    assert "The arguments of the module are not in this file" in text
    assert ts.TrainerArguments.from_yaml(tmp_path / "run" / "config.yaml").writers == ("csv",)


def test_the_monitor_is_in_one_place_and_can_be_changed() -> None:
    words = ["train", "own_config.py:Own", "--progress", "none", "--monitor"]
    assert main([*words, "train/loss_epoch", "--output_dir", "one"]) == 0
    config: Any = read_yaml("one/config.yaml")
    assert config["monitor"] == "train/loss_epoch"
    assert not {"monitor", "mode"} & set(config["checkpointer_args"])
    other = ["--monitor_mode", "max", "--config", "one/config.yaml", "--output_dir", "two"]
    assert main([*words, "train/loss_epoch", *other]) == 0
    assert main(["train", "--config", "one/config.yaml", "--output_dir", "three"]) == 0
    again: Any = read_yaml("three/config.yaml")
    assert {**config, "output_dir": "three"} == again


@pytest.mark.parametrize(
    ("name", "value", "is_left_out"),
    [
        ("resume", "...", False),
        ("output_dir", "---", False),
        ("max_time", "01:00:00", False),
        ("log_every", 10**20, True),
    ],
)
def test_every_value_that_is_written_is_read_again(tmp_path: Path, name: str, value: Any, is_left_out: bool) -> None:
    args = ts.TrainerArguments(**{name: value})
    RunFiles(tmp_path, tmp_path, ts.DefaultCheckpointer(ts.DefaultCheckpointerArguments())).write_config(args, {}, [])
    read = ts.TrainerArguments.from_yaml(tmp_path / "config.yaml")
    assert (f"omitted here: {name}." in (tmp_path / "config.yaml").read_text()) is is_left_out
    assert (read == args) is not is_left_out


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
