"""`trainstack explain`, `plan` and `doctor`, which do not train a module of the user."""

from __future__ import annotations

import json
import re

import pytest
import torch

import trainstack as ts
from tools.pages import ROOT
from trainstack.cli.main import main


def test_explain_prints_the_text_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "sp-bf16"]) == 0
    assert capsys.readouterr().out.strip() == ts.explain("sp-bf16").strip()
    assert main(["explain", "amp-ddp"]) == 2
    assert "Write 'ddp-amp'." in capsys.readouterr().err


def test_plan_prints_the_arithmetic_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--samples", "1000", "--train_batch_size", "64", "--gpu_batch_size_limit", "8", "--processes", "4"]
    assert main(["plan", *sizes, "--epochs", "3"]) == 0
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        "batch 64 samples = 4 processes x 2 micro-batches x 8",
        "steps 16 per epoch (40 samples in the last), 48 in 3 epochs",
        "validations after each epoch",
        "checkpoints at the end of each epoch; the last after step 48",
    ]
    assert main(["plan", *sizes, "--drop_last", "--max_train_steps_per_epoch", "9", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["samples_per_epoch"], plan["steps_per_epoch"], plan["total_steps"]) == (960, 9, 9)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--samples", "0"], "--samples 0: write a whole number, 1 or more"),
        (["--samples", "9", "--processes", "0"], "--processes 0"),
        (["--samples", "9", "--epochs", "-1"], "--epochs -1: write a whole number, 0 or more."),
        (["--samples", "9", "--train_batch_size", "6", "--processes", "4"], "cannot be divided among 4 processes"),
    ],
)
def test_an_impossible_plan_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["plan", *words]) == 2
    assert message in capsys.readouterr().err


def test_unknown_options_get_their_corrections(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--samples", "9", "--epohs=3", "--jsn", "more"]) == 2
    assert capsys.readouterr().err == (
        "trainstack: unrecognized arguments: --epohs=3 --jsn more. Did you mean --epochs and --json? "
        "(see trainstack plan --help)\n"
    )


@pytest.mark.processes
def test_doctor_tries_each_backend_string(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "sp", "ddp-bf16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["backends"] == {"sp": None, "ddp-bf16": None}
    assert found["extras"]["tensorboard"]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    assert set(found["extras"]) == set(re.findall(r"^(\w+) = \[", table, re.MULTILINE)) - {"docs", "dev", "release"}
    assert found["threads"] == torch.get_num_threads()
    assert found["devices"][0] == "cpu"


def test_doctor_names_the_fault_of_a_string(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: object, global_step: int, batch: object, device: object) -> None:
        raise RuntimeError("no kernel\nfor that")

    monkeypatch.setattr(ts.SupervisedModule, "train_step", broken)
    assert main(["doctor", "sp", "sp-bf16"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("sp")] == [
        "sp       NO: no kernel for that",
        "sp-bf16  NO: no kernel for that",
    ]
    after_devices = lines[next(number for number, line in enumerate(lines) if line.startswith("devices: ")) + 1 :]
    assert after_devices[0] == ""
    assert after_devices[1].startswith("extra ")
    assert main(["doctor", "amp-sp"]) == 2
    assert "Write 'sp-amp'." in capsys.readouterr().err
