"""Files of `trainstack predict`: one value for each sample, readable as documented, and never replaced."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.scripts import run_python
from trainstack.cli.main import main

FILE = """
import os
import signal
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainstack import SupervisedModule
from trainstack.cli.main import main

X = torch.arange(7.0).unsqueeze(1)
KINDS = {
    "plain": lambda y: y,
    "wide": lambda y: y.repeat(1, 1000),
    "listed": lambda y: [y, 2 * y],
    "nested": lambda y: {"p": [y, {"q": y}, ["a"] * len(y)], "t": 0.5},
    "shapes": lambda y: [{"box": torch.ones(int(one) + 1)} for one in y],
    "transposed": lambda y: {"p": y.expand(-1, 2).T},
    "few": lambda y: [0.1, 0.2],
    "number": lambda y: 0.5,
    "keys": lambda y: {0: y, "0": 2 * y},
    "inner": lambda y: {"p": [{0: 1, "0": 2}] * len(y)},
    "slash": lambda y: {"a/b": y, "a": {"b": 2 * y}},
    "loader": lambda y: {"loader": y},
    "arrays": lambda y: {"p": y.numpy(), "n": np.float64(0.5)},
    "object": lambda y: {"p": y, "o": object()},
    "function": lambda y: {"p": y, "o": lambda: 0},
    "complex": lambda y: {"p": torch.complex(y, y)},
    "small": lambda y: {"file": y.to(torch.float8_e4m3fn)},
}


class Line(SupervisedModule):
    def __init__(self, kind: str = "plain", other: str = "", stops: bool = False):
        super().__init__(nn.Linear(1, 1), nn.MSELoss(), "sgd", test_dataset=TensorDataset(X))
        self.kind, self.other, self.stops = kind, other, stops

    def predict_step(self, global_step, batch, device):
        if self.other:
            other, self.other = self.other, ""
            assert main(["predict", "my.py:Line", "--output", other, "--val_batch_size", "7", "--quiet"]) == 0
        if self.stops:
            assert [one.name for one in Path().glob(".out.*")], "nothing to delete"
            os.kill(os.getpid(), signal.SIGTERM)
        return KINDS[self.kind](batch[0])


def two():
    return {"a": TensorDataset(X[:3]), "b": DataLoader(TensorDataset(X[3:5]), batch_size=2)}


def one(): return [[X[:1], X[:1]]]


def nothing(): return TensorDataset(X[:0])


def none(): return None


def sized(number): return TensorDataset(X[:number])
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my", raising=False)


def predict(kind: str, output: str, *options: str) -> int:
    return main(["predict", "my.py:Line", "--module.kind", kind, "--output", output, "--val_batch_size", "5", *options])


def outputs() -> list[str]:
    return sorted(name for name in os.listdir() if name not in ("my.py", "__pycache__"))


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("listed", lambda x: {"output": [[x], [2 * x]]}),
        ("nested", lambda x: {"p": [[x], {"q": [x]}, "a"], "t": 0.5}),
        ("shapes", lambda x: {"output": {"box": [1.0] * (int(x) + 1)}}),
        ("arrays", lambda x: {"p": [x], "n": 0.5}),
    ],
)
def test_each_line_has_the_structure_of_one_sample(kind: str, line: Any) -> None:
    assert predict(kind, "out.jsonl") == 0  # of 5 and 2 samples: in the second batch, "listed" could be split both ways
    rows = [json.loads(text) for text in Path("out.jsonl").read_text().splitlines()]
    assert rows == [line(float(x)) for x in range(7)]


@pytest.mark.parametrize(
    ("kind", "output", "options", "message"),
    [
        ("listed", "out.jsonl", ["--val_batch_size", "2"], "items and their rows may both be the samples"),
        ("transposed", "out.jsonl", [], "outputs['p'] of shape (2, 5) for a batch of 5 samples"),
        ("few", "out.jsonl", [], "outputs, a list of 2 items, for a batch of 5 samples"),
        ("number", "out.jsonl", [], "outputs without a tensor or list for a batch of 5 samples"),
        ("few", "out.jsonl", ["--data", "my.py:one"], "for a batch of unknown samples"),
        ("shapes", "out.pt", [], "write --output FILE.jsonl on the command line"),
        ("keys", "out.npz", [], "several arrays with the name '0' in the file"),
        ("slash", "out.npz", [], "several arrays with the name 'a/b' in the file"),
        ("keys", "out.jsonl", [], "several keys of outputs with the name '0' in the file"),
        ("inner", "out.jsonl", [], "several keys of outputs['p'] with the name '0' in the file"),
        ("loader", "out.jsonl", ["--data", "my.py:two"], "several values with the name 'loader' in the file"),
        ("object", "out.pt", [], "object of the class object, which torch.load(file) does not read"),
        ("function", "out.pt", [], "returned an object, which torch.load(file) does not read"),
        ("object", "out.jsonl", [], "outputs['o'] with an object of the class object, and JSON has no such"),
        ("complex", "out.jsonl", [], "outputs['p'] with an object of the class complex, and JSON has no such"),
        ("plain", "out.pt", ["--data", "my.py:none"], "--data my.py:none gave None instead of data."),
        ("plain", "out.pt", ["--data", "my.py:Line"], "returned Line under 'default'. Return a DataLoader, a dict of "),
        ("plain", "out.pt", ["--data", "my.py:sized"], "--data my.py:sized: the function is called without arguments"),
    ],
)
def test_predictions_that_do_not_fit_are_refused(
    kind: str, output: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(kind, output, *options) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "or None" not in shown
    assert shown.count("\n") == 1
    assert outputs() == []


def test_files_can_be_read_as_documented() -> None:
    assert predict("arrays", "out.pt") == predict("small", "out.npz") == 0
    found = torch.load("out.pt")
    assert torch.equal(torch.cat(found["p"]), torch.arange(7.0).unsqueeze(1))
    assert found["n"] == [0.5, 0.5]
    with np.load("out.npz") as arrays:
        assert arrays.files == ["file"]
        assert arrays["file"].dtype == np.float32
        assert arrays["file"].tolist() == [[float(x)] for x in range(7)]


@pytest.mark.parametrize("end", ["pt", "npz", "jsonl"])
def test_a_file_that_appears_is_not_replaced(end: str, capsys: pytest.CaptureFixture[str]) -> None:
    output = f"out.{end}"
    assert (
        predict("keys" if end == "pt" else "listed", output, "--module.other", output) == 2
    )  # "other" is written first
    shown = capsys.readouterr().err
    assert f"--output {output}: the file has appeared since predict began" in shown
    hidden, kept = outputs()
    assert kept == output
    assert f"The predictions are in {hidden}: give this file another name." in shown
    if end == "jsonl":
        files = [
            [json.loads(line)["output"] for line in Path(name).read_text().splitlines()] for name in (kept, hidden)
        ]
        assert files == [[[x] for x in range(7)], [[[x], [2 * x]] for x in range(7)]]
    elif end == "npz":
        assert [np.load(name).files for name in (kept, hidden)] == [["output"], ["0", "1"]]
    else:
        assert [type(torch.load(name)) for name in (kept, hidden)] == [torch.Tensor, dict]


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "size"), [("plain", 500), ("wide", 2000)])  # when the file is closed, or before
def test_a_full_disk_is_an_error_of_one_line(kind: str, size: int) -> None:
    words = ["predict", "my.py:Line", "--module.kind", kind, "--output", "out.pt"]
    limit = f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, resource.RLIM_INFINITY))"
    ended = run_python("-c", f"{limit}; from trainstack.cli.main import main; sys.exit(main({words}))")
    assert (ended.returncode, ended.stderr) == (2, "trainstack: [Errno 27] File too large\n")
    assert outputs() == []


@pytest.mark.processes
def test_a_signal_leaves_no_file() -> None:
    words = ["predict", "my.py:Line", "--module.stops", "--output", "out.jsonl"]
    ended = run_python("-c", f"from trainstack.cli.main import main; main({words})")
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    assert outputs() == []


def test_empty_data_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    for end in ("pt", "npz", "jsonl"):
        assert predict("plain", f"out.{end}", "--data", "my.py:nothing") == 0
        assert "gave no batch at all" in caplog.text
        caplog.clear()


def test_a_batch_of_unknown_samples_has_the_rows_of_its_tensors() -> None:
    assert predict("plain", "out.jsonl", "--data", "my.py:one") == 0
    assert Path("out.jsonl").read_text() == '{"output": [0.0]}\n'


def test_a_file_that_the_module_imports_may_have_the_data() -> None:
    Path("my_model.py").write_text("import my_data\nfrom my import Line as Base\n\nclass Line(Base):\n    pass\n")
    Path("my_data.py").write_text("from my import two as made\n\ndef two():\n    return made()\n")
    try:
        assert main(["predict", "my_model.py:Line", "--data", "my_data.py:two", "--output", "out.npz"]) == 0
    finally:
        for name in ("my_model", "my_data"):
            sys.modules.pop(name, None)
    assert np.load("out.npz").files == ["a", "b"]
