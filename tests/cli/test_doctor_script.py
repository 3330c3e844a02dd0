"""`trainstack doctor FILE.py` runs a script up to its training, or makes its module, and prints the findings."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import trainstack as ts
from trainstack.cli.check_script import script_in
from trainstack.cli.main import main

MODULE = """
import torch
import trainstack as ts
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
TRAIN, VAL = TensorDataset(x[:60], x[:60].sum(1, keepdim=True)), TensorDataset(x[60:], x[60:].sum(1, keepdim=True))

class Line(ts.SupervisedModule):
    def __init__(self, lr: float = 0.01):
        super().__init__(nn.Linear(4, 1), nn.MSELoss(), "sgd", TRAIN, VAL, optimizer_kwargs={"lr": lr})
"""
TRAINS = """
trainer = ts.Trainer(Line(), ts.TrainerArguments(train_batch_size=%s, output_dir="out"))
trainer.train()
open("after", "w").close()
"""

Write = Callable[[str, str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)

    def to_file(name: str, text: str) -> str:
        Path(name).write_text(dedent(text), encoding="utf-8")
        return name

    yield to_file
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def guarded(text: str) -> str:
    lines = text.strip().splitlines()
    return '\nif __name__ == "__main__":\n' + "".join(f"    {line}\n" for line in lines)


def diagnosed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def ids(found: dict[str, Any]) -> list[str]:
    return [finding["id"] for finding in found["findings"]]


def test_a_script_is_run_until_it_trains(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = diagnosed(capsys, write("script_a.py", MODULE + guarded(TRAINS % 8)))
    assert (code, ids(found), found["steps"], found["validated"], found["problems"]) == (0, [], 3, True, 0)
    assert {path.name for path in Path().iterdir()} == {"script_a.py"}


def test_the_arguments_of_the_script_are_used(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    script = MODULE + guarded("import sys\n" + TRAINS % "int(sys.argv[1])")
    file = write("script_b.py", script)
    for ignored, expected in ([], ["D109"]), (["--ignore", "D109"], []):
        assert main(["doctor", file, "--json", "--steps", "2", *ignored, "--", "1"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (ids(found), found["steps"]) == (expected, 2)


def test_a_file_that_trains_on_import_does_not_train(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    file = write("script_c.py", MODULE + TRAINS % 8)
    for target in (file, f"{file}:Line"):
        code, found = diagnosed(capsys, target)
        assert (code, ids(found)) == (0, ["D606"])
        (finding,) = found["findings"]
        assert Path(file).read_text().splitlines()[int(finding["place"].partition(":")[2]) - 1] == "trainer.train()"
    assert not Path("after").exists()
    assert not Path("out").exists()


def test_the_module_of_a_file_takes_the_options_of_train(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    file = write("script_d.py", MODULE)
    assert diagnosed(capsys, file, "--train_batch_size", "8")[0] == 0
    code, found = diagnosed(capsys, f"{file}:Line", "--train_batch_size", "8", "--module.lr", "1e6")
    assert (code, "D403" in ids(found)) == (1, True)
    assert ts.Trainer.train.__qualname__ == "Trainer.train"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["my.py"], "my.py"),
        (["--steps", "2", "my.py:Mine"], "my.py:Mine"),
        (["--device", "cuda:0", "my.py"], "my.py"),
        (["package.module:Mine", "--json"], "package.module:Mine"),
        (["--steps", "2", "package.module:Mine"], "package.module:Mine"),
        (["--json", "--device", "cuda:0", "package.module:Mine"], "package.module:Mine"),
        (["sp-bf16", "ddp"], None),
        ([], None),
    ],
)
def test_a_script_is_distinguished_from_backend_strings(words: list[str], expected: str | None) -> None:
    assert script_in(words) == expected


def test_the_text_has_check_place_and_remedy(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    file = write("script_e.py", MODULE.replace("keepdim=True", "keepdim=False"))
    assert main(["doctor", file, "--train_batch_size", "8"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("script_e.py: ")
    assert "D308 problem: " in text
    assert "  Give both the same shape: output.squeeze(1), or target.unsqueeze(1)." in text


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("x = 1", (), "script_f.py does not train, and has no ModuleInterface. Write script_f.py:NAME"),
        (MODULE, ("--ignore", "D999"), "--ignore D999: there is no such check."),
        (MODULE, ("--epochz", "1"), "--epochz"),
        (MODULE, ("--steps", "0"), "--steps 0: write a whole number, 1 or more."),
        (MODULE + TRAINS % 8, ("--epochs", "1"), "trains when it is imported, with its own arguments, so --epochs 1"),
        (MODULE + "raise KeyError('mine')", (), "KeyError: 'mine'"),
    ],
)
def test_a_script_that_cannot_be_checked_gets_a_reason(
    text: str, words: tuple[str, ...], said: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", write("script_f.py", text), *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("returned", ["TRAIN", "{'a': TRAIN}", "(Line(), [])"])
def test_another_object_than_a_module_is_refused(
    returned: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write("script_k.py", MODULE + f"def make():\n    return {returned}\n")
    assert main(["doctor", f"{file}:make"]) == 2
    shown = capsys.readouterr().err
    assert "Write an instance of a class derived from ModuleInterface." in shown
    assert shown.count("\n") == 1


def test_options_make_the_module_of_a_file_that_trains_on_import(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write("script_l.py", MODULE + TRAINS % 1)
    for options, expected in ((), ["D109", "D606"]), (("--train_batch_size", "8"), ["D606"]):
        assert ids(diagnosed(capsys, f"{file}:Line", *options)[1]) == expected


def test_the_json_of_a_script_that_prints_is_the_whole_output(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    file = write("script_m.py", MODULE + guarded("print('by the script')\n" + TRAINS % 8))
    assert main(["doctor", file, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["target"] == file
    assert err == "by the script\n"


@pytest.mark.parametrize("name", ["", ":Line"])
def test_a_traceback_begins_in_the_file(name: str, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    file = write("script_g.py", MODULE + "raise KeyError('mine')")
    assert main(["doctor", f"{file}{name}"]) == 2
    frames = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  File ")]
    assert len(frames) == 1
    assert "script_g.py" in frames[0]


def test_a_train_batch_size_of_one_is_reported_once(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    file = write("script_h.py", MODULE.replace("100", "1200").replace("60", "1100"))
    assert ids(diagnosed(capsys, f"{file}:Line")[1]) == ["D109"]


@pytest.mark.parametrize("guard", [guarded, str])
def test_a_script_that_imports_its_training_is_run(
    guard: Callable[[str], str], write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write("training_i.py", MODULE + "def main():\n" + guarded(TRAINS % 1).partition(":\n")[2])
    file = write("script_i.py", "from training_i import main\n" + guard("main()\n"))
    code, found = diagnosed(capsys, file)
    assert (code, ids(found)) == (0, ["D109"])


@pytest.mark.parametrize("reads", ["int(sys.argv[1])", "argparse.ArgumentParser().parse_args(['--no'])"])
def test_a_script_without_its_arguments_is_told_where_to_write_them(
    reads: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write("script_j.py", MODULE + guarded(f"import argparse, sys\n{reads}\n" + TRAINS % 8))
    assert main(["doctor", file]) == 2
    assert "after --: trainstack doctor script_j.py -- WORD ..." in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "nowhere.py"]) == 2
    assert "there is no file nowhere.py" in capsys.readouterr().err
