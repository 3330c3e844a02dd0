"""`trainstack validate`, `test` and `predict` on runs, checkpoints and exports."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainstack as ts
from trainstack.cli.main import main

FILE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainstack import SupervisedModule

X = torch.linspace(-1, 1, 12).unsqueeze(1)
VAL = TensorDataset(X[:5], 2 * X[:5])
TEST = TensorDataset(X[5:], 2 * X[5:])


class Line(SupervisedModule):
    def __init__(self, hidden: int = 4, fails: bool = False, rate: float = 0.05):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(1, hidden), nn.Linear(hidden, 1))
        data = TensorDataset(X, 2 * X)
        super().__init__(net, nn.MSELoss(), "sgd", data, VAL, test_dataset=TEST, optimizer_kwargs={"lr": rate})
        self.fails = fails

    def val_step(self, global_step, batch, device):
        if self.fails:
            raise RuntimeError("in the step of the user")
        return super().val_step(global_step, batch, device)


class Named(Line):
    def predict_step(self, global_step, batch, device):
        y = self.model(batch[0])
        return {"y": y, "names": [f"sample {value:.0f}" for value in 100 * batch[0][:, 0]], "batch": len(y)}


class Halved(Line):
    def predict_step(self, global_step, batch, device):
        return self.model(batch[0]), self.model(batch[0])[:1]


class Loud(Line):
    def val_step(self, global_step, batch, device):
        print("in the step")
        return super().val_step(global_step, batch, device)


class Empty(Line):
    def get_test_dataloaders(self, sampler, batch_size):
        return DataLoader(TensorDataset(X[:0], X[:0]), batch_size=batch_size)


class Bare(SupervisedModule):
    def __init__(self):
        super().__init__(nn.Linear(1, 1), nn.MSELoss(), "sgd", TensorDataset(X, 2 * X))


def more():
    return TensorDataset(X[:3])


def two():
    return {"a": TensorDataset(X[:3]), "b": DataLoader(TensorDataset(X[3:5]), batch_size=2)}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `my.py` and a run of it in `run`, whose first epoch is the best."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "my.py").write_text(FILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        words = ["--epochs", "3", "--train_batch_size", "4", "--val_batch_size", "2", "--progress", "none"]
        words += ["--writers", "csv", "--module.hidden", "3", "--module.rate", "0.4", "--max_grad_norm", "1000"]
        assert main(["train", "my.py:Line", *words, "--output_dir", "run"]) == 0
        sys.modules.pop("my")
    history = ts.read_history(folder / "run")
    losses = history.get_metric_values("val/loss")
    assert losses[0] == min(losses) < losses[-1]
    return folder


@pytest.fixture(autouse=True)
def _here(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my", raising=False)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def model_of(path: str) -> torch.nn.Module:
    net = torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.Linear(3, 1))
    net.load_state_dict(ts.read_model(path, strip_prefix="model."))
    return net.eval().requires_grad_(False)


def loss_of(path: str, part: slice) -> float:
    x = torch.linspace(-1, 1, 12).unsqueeze(1)[part]
    return float(torch.nn.functional.mse_loss(model_of(path)(x), 2 * x))


def files(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(one): (one.stat().st_size, one.stat().st_mtime_ns) for one in folder.rglob("*") if one.is_file()}


def export() -> str:
    return str(next(Path("run/checkpoints").glob("checkpoint-model-*")))


@pytest.mark.parametrize(
    ("path", "options", "weights", "step"),
    [
        ("run", (), "last", 9),
        ("run", ("--resume", "best"), "best", 3),
        ("run/checkpoints/best", (), "best", 3),
        ("run/checkpoints/last", (), "last", 9),
        ("run/checkpoints/checkpoint-000000009", (), "last", 9),
        ("EXPORT", (), "last", 9),
        (None, ("--resume", "run/checkpoints/best", "--config", "run/config.yaml", "--output_dir", "run"), "best", 3),
    ],
)
def test_each_path_gives_the_metrics_of_its_weights(
    path: str | None, options: tuple[str, ...], weights: str, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(Path("run"))
    for command, stage, part in (("validate", "val", slice(5)), ("test", "test", slice(5, None))):
        given = [] if path is None else [export() if path == "EXPORT" else path]
        found = answer(capsys, command, "my.py:Line", *given, *options)
        assert found["metrics"] == {f"{stage}/loss": pytest.approx(loss_of(f"run/checkpoints/{weights}", part))}
        assert (found["format"], found["global_step"]) == (1, step)
        assert found["weights"] == (given[0] if given else "run/checkpoints/best")
    assert files(Path("run")) == before


def test_the_screen_has_the_weights_and_the_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "my.py:Line", "run"]) == 0
    value = loss_of("run/checkpoints/last", slice(5))
    assert capsys.readouterr().out == f"weights   run, global step 9\nval/loss  {value:.6g}\n"


def test_a_module_may_have_its_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "my.py:Line", "--val_batch_size", "5"]) == 0
    assert capsys.readouterr().out.startswith("weights   those that the module was made with\nval/loss  ")
    assert answer(capsys, "validate", "my.py:Line")["weights"] is None
    assert not Path("runs").exists()


def test_the_arguments_of_the_run_are_defaults_and_its_processes_are_not_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Path("run/config.yaml")
    text = config.read_text()
    try:
        several = text.replace("backend: auto\n", "backend: ddp-bf16\n")
        config.write_text(several.replace("backend_options: {}\n", "backend_options: {ddp: {timeout_s: 60.0}}\n"))
        assert "ddp-bf16" in config.read_text()
        assert "timeout_s: 60.0" in config.read_text()
        rounded = answer(capsys, "validate", "my.py:Line", "run")["metrics"]["val/loss"]
        config.write_text(text.replace("backend: auto\n", "backend: 3\n"))
        assert main(["validate", "my.py:Line", "run"]) == 2
        assert "run/config.yaml: backend: 3: write text" in capsys.readouterr().err
    finally:
        config.write_text(text)
    exact = loss_of("run/checkpoints/last", slice(5))
    assert 0 < abs(rounded - exact) < 0.05 * exact
    assert main(["validate", "my.py:Line", "run", "--module.hidden", "5"]) == 2
    assert "the checkpoint does not fit Line" in capsys.readouterr().err


def test_options_for_the_begin_of_the_training_have_no_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    assert (
        main(["train", "my.py:Line", "--overwrite", "true", "--epochs", "1", "--progress", "none", "--output_dir", run])
        == 0
    )
    before = files(Path(run))
    capsys.readouterr()
    assert answer(capsys, "validate", "my.py:Line", run)["global_step"] > 0
    assert files(Path(run)) == before


@pytest.fixture(scope="module")
def limited(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The limited run `runs/of` in another folder, which began with the weights of `run`."""
    folder = tmp_path_factory.mktemp("limited")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        words = ["--epochs", "4", "--train_batch_size", "4", "--val_batch_size", "2", "--progress", "none"]
        words += ["--module.hidden", "3", "--overfit_batches", "1", "--max_val_steps_per_epoch", "1"]
        words += ["--checkpointer_args.save_dir", "runs/of/saved", "--checkpointer_args.delete_existing_checkpoints"]
        words += ["--checkpointer_args.load_dir", str(trained / "run" / "checkpoints"), "--resume_mode", "weights"]
        assert main(["train", str(trained / "my.py:Line"), *words, "--output_dir", "runs/of"]) == 0
        sys.modules.pop("my")
    return folder / "runs" / "of"


def test_arguments_for_the_training_leave_data_and_weights_of_an_evaluation(
    limited: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = limited / "saved"
    before = files(limited)
    for path in (limited, next(saved.glob("checkpoint-model-*"))):
        found = answer(capsys, "validate", "my.py:Line", str(path))
        assert found["metrics"] == {"val/loss": pytest.approx(loss_of(str(saved / "last"), slice(5)))}
        assert found["global_step"] == 4
    assert files(limited) == before


def test_a_run_without_a_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copytree("run", tmp_path / "run", ignore=lambda folder, names: {"checkpoints"} & set(names))
    for resume in ("last", "best", "auto"):
        assert main(["validate", "my.py:Line", str(copy), "--resume", resume]) == 2
        said = f"the run {copy} has no checkpoint in {copy}/checkpoints. Name another run, a checkpoint or an export."
        assert capsys.readouterr().err == f"trainstack: {said}\n"


@pytest.mark.parametrize(
    ("options", "weights", "step"),
    [
        (("--init_weights_from", "EXPORT"), "EXPORT", 9),
        (("--output_dir", "run", "--resume", "last"), "{here}/run/checkpoints/checkpoint-000000009", 9),
        (("--resume_mode", "weights", "--resume", "run/checkpoints/best"), "run/checkpoints/best", 3),
        (("--checkpointer_args.load_dir", "run/checkpoints"), "{here}/run/checkpoints/checkpoint-000000009", 9),
        (("--output_dir", "new", "--resume", "auto"), None, 0),
    ],
)
def test_the_loaded_weights_and_their_step_are_named(
    options: tuple[str, ...], weights: str | None, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [export() if word == "EXPORT" else word for word in options]
    found = answer(capsys, "validate", "my.py:Line", "--module.hidden", "3", *given)
    named = None if weights is None else weights.replace("EXPORT", export()).format(here=Path.cwd())
    assert (found["weights"], found["global_step"]) == (named, step)


def test_the_json_is_the_whole_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "my.py:Loud", "run", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["weights"] == "run"
    assert set(err.splitlines()) == {"in the step"}
    assert main(["validate", "my.py:Line", "run", "--module.fails", "--json"]) == 1
    out, err = capsys.readouterr()
    said = json.loads(err)
    assert (out, said["error"], said["class"]) == ("", "RuntimeError: in the step of the user", "RuntimeError")
    assert any('my.py", line' in line for line in said["traceback"])


def test_predictions_are_written_in_three_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = model_of("run/checkpoints/best")(torch.linspace(-1, 1, 12).unsqueeze(1)[5:]).detach()
    for end in ("pt", "npz", "jsonl"):
        output = str(tmp_path / f"out.{end}")
        found = answer(capsys, "predict", "my.py:Line", "run", "--resume", "best", "--output", output)
        assert found["written"] == output
        assert found.get("samples") == (7 if end == "jsonl" else None)
    tensor = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.allclose(tensor, expected)
    assert np.array_equal(np.load(tmp_path / "out.npz")["output"], tensor.numpy())
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["output"] for row in rows] == tensor.tolist()
    assert sorted(os.listdir(tmp_path)) == ["out.jsonl", "out.npz", "out.pt"]


def test_each_line_has_the_values_of_one_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.jsonl"
    assert answer(capsys, "predict", "my.py:Named", "run", "--data", "val", "--output", str(output))["samples"] == 5
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["names"] for row in rows] == ["sample -100", "sample -82", "sample -64", "sample -45", "sample -27"]
    assert [row["batch"] for row in rows] == [2, 2, 2, 2, 1]


def test_a_function_gives_other_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.linspace(-1, 1, 12).unsqueeze(1)
    net = model_of("run/checkpoints/last")
    words = ["predict", "my.py:Line", "run", "--output"]
    answer(capsys, *words, str(tmp_path / "more.pt"), "--data", "my.py:more")
    assert torch.allclose(torch.load(tmp_path / "more.pt"), net(x[:3]))
    answer(capsys, *words, str(tmp_path / "two.npz"), "--data=my.py:two")
    arrays = np.load(tmp_path / "two.npz")
    assert {name: arrays[name].shape for name in arrays} == {"a": (3, 1), "b": (2, 1)}
    answer(capsys, *words, str(tmp_path / "two.jsonl"), "--data=my.py:two")
    rows = [json.loads(line) for line in (tmp_path / "two.jsonl").read_text().splitlines()]
    assert [row["loader"] for row in rows] == ["a", "a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["validate"], "trainstack validate needs the module before any option. Write FILE.py:NAME"),
        (["test", "my.py:Line", "nowhere"], "nowhere does not exist. Name the directory of a checkpoint."),
        (["test", "my.py:Line", "."], "is not a checkpoint: it has no MANIFEST.json"),
        (["validate", "my.py:Line", "run/checkpoints/best", "--resume", "last"], "Remove one of them."),
        (["validate", "my.py:Line", "run", "--init_weights_from", "run/checkpoints/best"], "Remove one of them."),
        (
            ["validate", "my.py:Line", "run", "--resume", "run"],
            "run names the weights, and so does resume: run. Remove one of them.",
        ),
        (
            ["validate", "my.py:Line", "run", "--checkpointer_args.load_dir", "no"],
            "checkpointer_args.load_dir: no. Remove one of them.",
        ),
        (["predict", "my.py:Line", "run", "--fast_dev_run", "1"], "fast_dev_run: 1 is for trainings"),
        (["validate", "my.py:Line", "run", "--overfit_batches", "1"], "overfit_batches: 1 is for trainings"),
        (["test", "my.py:Empty", "run"], "batch_size), with at least one batch, and return the loss"),
        (["validate", "my.py:Bare"], "Bare has recorded no metric of validate. Define get_val_dataloaders("),
        (["test", "my.py:Bare"], "Bare has no test data. Define get_test_dataloaders(sampler, batch_size)."),
        (
            ["predict", "my.py:Bare"],
            "Bare has no test data. Define get_test_dataloaders(self, sampler, batch_size), or",
        ),
        (["predict", "my.py:Line", "run", "--output", "my.py"], "the end of the name selects the format. Write one of"),
        (["predict", "my.py:Line", "run", "--output", "old.pt"], "the file exists, and is not replaced."),
        (["predict", "my.py:Line", "run", "--output", "no/out.pt"], "there is no folder no. Make it"),
        (["predict", "my.py:Line", "run", "--data", "tset"], "--data tset: write test, val, or FILE.py:NAME"),
        (["predict", "my.py:Line", "run", "--data", "my.py:less"], "my.py:less: no class or function is called 'less'"),
        (
            ["predict", "my.py:Halved", "run", "--output", "half.jsonl"],
            "outputs[1] of shape (1, 1) for a batch of 2 samples",
        ),
        (["predict", "my.py:Named", "run", "--output", "named.npz"], "Write --output FILE.pt or FILE.jsonl."),
        (["validate", "my.py:Line", "run", "--epoch", "3"], "Did you mean --epochs?"),
        (["validate", "my.py:Line", "run", "--config", "no.yaml"], "there is no file 'no.yaml'"),
    ],
)
def test_a_wrong_word_is_answered_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("old.pt").touch()
    before = set(os.listdir())
    assert main(words) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert message in shown.err
    assert set(os.listdir()) == before


def test_an_error_of_the_users_step_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "my.py:Line", "run", "--module.fails"]) == 1
    shown = capsys.readouterr().err
    assert "RuntimeError: in the step of the user" in shown
    assert 'my.py", line' in shown


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_the_help_names_the_weights_and_the_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "my.py:Line", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "PATH is the folder of a run" in " ".join(shown.split())
    assert "--val_batch_size" in shown
    assert "--module.hidden" in shown
    assert "--epochs" not in shown
