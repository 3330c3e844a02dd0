"""Faults of arguments, files and variables are reported in one line that names the given value, with exit code 2."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

import trainstack as ts
from trainstack._yaml import parse_yaml, read_yaml
from trainstack.cli.main import main

FILE = """
import os
import torch
from subprocess import call
from torch import nn
from torch.utils.data import TensorDataset
from trainstack import SupervisedModule
x = 3

def module(size: int = 2, names: list[str] = (), net: nn.Module | None = None, free=None):
    data = torch.ones(8, 2)
    return SupervisedModule(nn.Linear(2, 1), nn.MSELoss(), "sgd", TensorDataset(data, data[:, :1]))

def needs(net: nn.Module):
    return net
"""


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my.py").write_text(FILE)
    (tmp_path / "file").write_text("")
    (tmp_path / "latin.yaml").write_bytes("output_dir: r\xe9sum\xe9\n".encode("latin-1"))
    (tmp_path / "key.yaml").write_text("epoch: 3\n")
    (tmp_path / "broken.yaml").write_text("epochs: 3\nwriters: [csv\n")
    (tmp_path / "many.yaml").write_text("epochs: many\ncheckpointer_args: {keep_last: few}\n")
    (tmp_path / "nested.yaml").write_text("checkpointer_args: {keep_lst: 3}\n")
    (tmp_path / "delta.yaml").write_text("backend: sp-dp\ndifferential_privacy_args: {noise_multiplier: 1.0}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my", raising=False)


TRAIN = ["train", "my.py:module"]
ROWS = [
    # Found by the trainer or the system, without a frame of the user's file
    ([*TRAIN, "--writers", "[csv, nothing]"], "writers: no writer is called 'nothing'."),
    ([*TRAIN, "--device", "cuda:9"], "device='cuda:9'"),
    ([*TRAIN, "--device", "toaster"], "--device toaster: torch has no such device"),
    ([*TRAIN, "--backend", "ddp"], "no launcher has started this one"),
    ([*TRAIN, "--resume", "nowhere"], "nowhere"),
    ([*TRAIN, "--output_dir", "file"], "file"),
    ([*TRAIN, "--output_dir", "/proc/x"], "/proc/x"),
    ([*TRAIN, "--config", "latin.yaml"], "'latin.yaml' is not text in UTF-8 (byte 13). Save it in UTF-8."),
    ([*TRAIN, "--seed", "99999999999999999999999"], "--seed 99999999999999999999999: write a whole number, from 0 to"),
    # Found by the parser
    ([*TRAIN, "--epochs", "many"], "--epochs many: write a whole number, 0 or more."),
    ([*TRAIN, "--epochs", "1.5"], "--epochs 1.5: write a whole number"),
    ([*TRAIN, "--progress", "bar"], "--progress bar: write auto, rich, plain, notebook, none or null."),
    ([*TRAIN, "--compile", "maybe"], "--compile maybe: write True, False, 'units' or a dict"),
    ([*TRAIN, "--max_grad_norm", "nan"], "write a number above 0"),
    ([*TRAIN, "--clip_grads", "2"], "--clip_grads 2: write true or false."),
    (
        [*TRAIN, "--checkpointer_args.keep_last", "few"],
        "--checkpointer_args.keep_last few: write a whole number or null.",
    ),
    (
        [*TRAIN, "--checkpointer_args.keep_last", "0"],
        "--checkpointer_args.keep_last 0: it is not a whole number above 0",
    ),
    ([*TRAIN, "--config", "key.yaml"], "key.yaml has no argument 'epoch'. Write epochs."),
    (
        [*TRAIN, "--config", "nested.yaml"],
        "nested.yaml: checkpointer_args has no argument 'keep_lst'. Write keep_last.",
    ),
    ([*TRAIN, "--config", "broken.yaml"], "broken.yaml, line 3, column 1: this is not valid YAML"),
    ([*TRAIN, "--config", "many.yaml"], "many.yaml: epochs: many: write a whole number, 0 or more."),
    ([*TRAIN, "--config", "delta.yaml"], "delta is missing"),
    ([*TRAIN, "--config", "."], "'.' cannot be read: it is a directory, not a regular file."),
    ([*TRAIN, "--config", "/dev/null"], "'/dev/null' cannot be read: it is a device, not a regular file."),
    ([*TRAIN, "--module.size", "x"], "--module.size x: write a whole number."),
    ([*TRAIN, "--module.net", "torch.nn.Linear"], "--module.net torch.nn.Linear: this takes an object"),
    (["train", "my.py:needs"], "my.py:needs has to be given 'net', an object, which no option makes. Write a function"),
    (["train", "my.py:x"], "my.py:x: x is an int, not a class or a function."),
    (["train", "my.py:os"], "os is a module, not a class or a function"),
    (["train", "my.py:call"], "the function call is that of the module subprocess. Name one that is defined there."),
    (["train", "my.py:nn.Linear"], "no class or function is called 'nn.Linear'"),
    (["train", "os:system"], "system is a builtin_function_or_method"),
    (["train", "shutil:rmtree"], "the function rmtree is that of the module shutil."),
    (["trian"], "there is no command 'trian'. Did you mean 'train'?"),
    (["plan", "--sampels", "100"], "unrecognized arguments: --sampels 100. Did you mean --samples?"),
    (["plan", "--sam", "100"], "unrecognized arguments: --sam 100"),
    (["plan"], "the following arguments are required: --samples"),
    (["checkpoints", "ls", ".", "--verfy"], "Did you mean --verify?"),
    (["replay", "run", "my.py:module", "--workers", "-1"], "--workers -1: write a number, 0 or more."),
    (["replay", "run", "my.py:module", "--tolerance", "nan"], "--tolerance nan: write a number, 0 or more."),
    (["replay", "run", "my.py:module", "--interval=-1"], "--interval -1.0: write a number, 0 or more."),
]
PRIVACY = ["privacy", "epsilon", "--noise-multiplier", "1", "--delta", "1e-5"]
ROWS += [
    ([*PRIVACY, "--sample-rate", "0.1", "--epochs", "-1"], "--epochs -1: write a whole number, 0 or more."),
    ([*PRIVACY, "--sample-rate", "0.1", "--batch-size", "8", "--dataset-size", "99", "--epochs", "1"], "Remove one."),
]


@pytest.mark.parametrize(
    ("words", "line"), ROWS, ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else ""
)
def test_one_line_and_exit_code_2(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr()
    assert line in said.err
    assert said.err.startswith("trainstack: ")
    assert said.err.count("\n") == 1
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("TRAINSTACK_EPOCH", "3", "there is no variable TRAINSTACK_EPOCH. Did you mean TRAINSTACK_EPOCHS?"),
        ("TRAINSTACK_epochs", "3", "there is no variable TRAINSTACK_epochs."),
        ("trainstack_epochs", "3", "there is no variable trainstack_epochs."),
        ("TRAINSTACK_CHECKPOINTER_ARGS__KEEP", "3", "Did you mean TRAINSTACK_CHECKPOINTER_ARGS__KEEP_"),
        ("TRAINSTACK_CHECKPOINTER_ARGS_KEEP_LAST", "3", "Did you mean TRAINSTACK_CHECKPOINTER_ARGS__KEEP_LAST?"),
        ("TRAINSTACK_EPOCHS", "many", "TRAINSTACK_EPOCHS=many: write a whole number, 0 or more."),
        ("TRAINSTACK_EPOCHS", "", "TRAINSTACK_EPOCHS=: write a whole number, 0 or more."),
        ("TRAINSTACK_MODULE__SIZE", "x", "TRAINSTACK_MODULE__SIZE=x: write a whole number."),
        ("TRAINSTACK_CONFIG", "none.yaml", "there is no file 'none.yaml'"),
    ],
)
def test_a_wrong_variable_is_refused(
    name: str, value: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    assert main(TRAIN) == 2
    assert line in capsys.readouterr().err


def test_values_of_the_right_kind_are_accepted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINSTACK_FAST_PATHS", "1")
    words = ["--epochs", "1e3", "--writers", "csv", "--clip-grads", "0", "--max-steps", "1e4", "--monitor", "null"]
    more = [
        "--rank_zero_timeout_s",
        "inf",
        "--output-dir",
        "2024",
        "--module.names",
        "[a, b]",
        "--module.free",
        "{a: 1}",
    ]
    assert main([*TRAIN, *words, *more, "--print-config"]) == 0
    found = yaml.safe_load(capsys.readouterr().out)
    names = ("epochs", "writers", "clip_grads", "max_steps", "monitor", "rank_zero_timeout_s", "output_dir")
    assert [found[name] for name in names] == [1000, ["csv"], False, 10_000, None, float("inf"), "2024"]
    assert found["module"] == {"size": 2, "names": ["a", "b"], "net": None, "free": {"a": 1}}


class TestPlan:
    def test_every_field_of_the_plan_is_an_option(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["--samples", "100", "--per_device_train_batch_size", "4", "--processes", "2", "--max_steps", "7"]
        more = ["--validate-every", "3", "--gpu_batch_size_limit", "2", "--checkpointer_args.every_n_steps", "0.5"]
        assert main(["plan", *words, *more]) == 0
        lines = capsys.readouterr().out
        assert "8 samples = 2 processes x 2 micro-batches x 2" in lines
        assert "7 in 1 epoch" in lines
        assert "after each 3 steps" in lines
        assert "and after each 4 steps; the last after step 7" in lines

    def test_a_file_and_variables_count(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "run.yaml").write_text("train_batch_size: 10\nepochs: 2\nvalidate_every: -2\nmodule: {size: 3}\n")
        monkeypatch.setenv("TRAINSTACK_EPOCHS", "4")
        assert main(["plan", "--samples", "100", "--config", "run.yaml"]) == 0
        shown = capsys.readouterr().out
        assert "40 in 4 epochs" in shown
        assert "after each 2 epochs" in shown

    def test_both_spellings_of_an_option_are_accepted(self, capsys: pytest.CaptureFixture[str]) -> None:
        ways = ["--noise-multiplier", "--sample-rate"], ["--noise_multiplier", "--sample_rate"]
        for noise, rate in ways:
            assert main(["privacy", "epsilon", noise, "2", f"{rate}=0.1", "--steps", "0", "--delta", "1e-5"]) == 0
        assert main(["plan", "--samples", "8", "--train-batch-size=2", "--drop-last"]) == 0
        assert "4 in 1 epoch" in capsys.readouterr().out

    def test_plan_refuses_the_same_arguments_as_training(self, capsys: pytest.CaptureFixture[str]) -> None:
        for words, line in (
            (["--samples", "10", "--train_batch_size", "64", "--drop_last"], "leaves no global step"),
            (["--samples", "9", "--train_batch_size", "6", "--processes", "4"], "cannot be divided among 4 processes"),
            (["--samples", "9", "--max_steps", "0"], "--max_steps 0: write a whole number of global steps"),
            (["--samples", "9", "--epochs", "0"], "epochs=0: there is nothing to train"),
        ):
            assert main(["plan", *words]) == 2
            assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: &a [x]\nb: [*a, *a]", "line 1: a: the anchor or alias 'a' is refused"),
        ("<<: {a: 1}", "the merge '<<' is refused"),
        ("a: 1\nb: 2\na: 3", "line 3: the key 'a' comes twice"),
        ("a: {b: {c: 1, c: 2}}", "a.b: the key 'c' comes twice"),
        ("a: " + "9" * 10_000, "is beyond 64 bits"),
        ("a: 1e999", "is too large for a float"),
        ("a: " + "[" * 30 + "]" * 30, "it is nested more than 16 deep"),
        ("a: " + "{b: " * 30 + "}" * 30, "it is nested more than 16 deep"),
        ("[" + "1," * 30_000 + "]", "there are more than 20000 values"),
        ("a: " + "x" * 20_000, "a text of 20000 characters is too long"),
        ("x" * 300_000, "300000 characters are too long"),
        ("a: !!python/object/apply:os.system [ls]", "a: the tag"),
        ("a: !!str 5", "a: the tag"),
        ("!!python/name:os.system a: 1", "a key is not plain text"),
        ("? [1, 2]\n: 3", "a key is not plain text"),
        ('a: "\\0"', "has a character that no path or name may have"),
        ('a: "\\ud800"', "has a character that no path or name may have"),
        ("a: 1\n---\na: 2", "a second document begins here"),
        ("a: \x07", "this is not valid YAML"),
        ("a:\t1", "line 1, column 3: this is not valid YAML"),
        ("%YAML 9.9\n---\n", "this is not valid YAML"),
    ],
)
def test_expensive_yaml_is_refused_with_its_line(text: str, line: str) -> None:
    with pytest.raises(ts.ConfigurationError) as refused:
        parse_yaml(text, "run.yaml")
    assert str(refused.value).startswith("run.yaml")
    assert line in str(refused.value)
    assert len(str(refused.value)) < 400


def test_plain_scalars_have_the_expected_types() -> None:
    wide = "\uff11\uff12"  # digits of Unicode that are not digits of YAML
    numbers = "1, -2, 0x1F, 1_000, 1e-3, .5, 1., .inf, -.INF"
    text = f"[{numbers}, yes, off, null, ~, 010, 1:00:00, 2001-01-01, '1', =, '<<', {wide}, 1__0, 1_]"
    infinity = float("inf")
    expected = [1, -2, 31, 1000, 1e-3, 0.5, 1.0, infinity, -infinity, True, False, None, None]
    assert parse_yaml(text, "x") == [*expected, "010", "1:00:00", "2001-01-01", "1", "=", "<<", wide, "1__0", "1_"]
    assert parse_yaml("on: {1: a}", "x") == {"on": {"1": "a"}}
    assert str(parse_yaml(".nan", "x")) == "nan"


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "large.yaml", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ts.ConfigurationError, match="has more than 262,144 bytes"):
        read_yaml(tmp_path / "large.yaml")


def test_a_registered_name_is_the_only_way_to_an_object(tmp_path: Path) -> None:
    with pytest.raises(ts.ConfigurationError, match="no writer is called 'mine'"):
        ts.TrainerArguments(writers=["mine"])
    ts.register_writer("mine", lambda folder: ts.CsvWriter(folder / "mine.csv"))
    try:
        (tmp_path / "run.yaml").write_text("writers: [mine]\n")
        assert ts.TrainerArguments.from_yaml(tmp_path / "run.yaml").writers == ("mine",)
        with pytest.raises(ts.ConfigurationError, match="'mine' is taken"):
            ts.register_writer("mine", lambda folder: ts.StdoutWriter())
        with pytest.raises(ts.ConfigurationError, match="is taken"):
            ts.register_writer("csv", lambda folder: ts.StdoutWriter())
        with pytest.raises(ts.ConfigurationError, match="is not a function"):
            ts.register_writer("other", "os.system")  # type: ignore[arg-type]
    finally:
        ts.unregister_writer("mine")
