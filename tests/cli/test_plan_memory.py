"""`trainstack plan FILE.py:MODULE` prints the memory that a process needs, without building the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainstack.cli.main import main

SOURCE = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset
import trainstack as ts


class Large(ts.SupervisedModule):
    """Blocks of `width`."""

    def __init__(self, width: int = 100_000):
        blocks = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
        assert blocks[0].weight.is_meta
        data = TensorDataset(torch.ones(8, width), torch.ones(8, width))
        super().__init__(blocks, nn.MSELoss(), "adamw", data)


class Needs(Large):
    def get_optimizers_schedulers(self, steps, epochs):
        return torch.optim.SGD(self.parameters(), lr=1 / self.plan.total_steps), ()


def fails():
    raise ValueError("no such file")
'''


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("mine_for_memory.py").write_text(SOURCE)
    return "mine_for_memory.py:Large"


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_160_gigabytes_are_planned_for_any_number_of_processes(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    one = planned(capsys, target)["memory"]
    many = planned(capsys, target, "--backend", "fsdp", "--world", "64")["memory"]
    groups = planned(capsys, target, "--backend", "fsdp", "--world", "64", "--shards", "8")["memory"]

    assert one["parameters"] == one["gradients"] == 16 * 10**10
    assert one["optimizer"] == 32 * 10**10 + 4 * 4
    assert one["gathered"] == 0
    assert many["parameters"] == 4 * 4 * 1563 * 100_000  # rows of the first process
    assert groups["parameters"] == 2 * 10**10
    assert many["gathered"] == groups["gathered"] == 12 * 10**10


def test_the_rows_are_printed_with_the_plan(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [target, "--module.width", "1024", "--samples", "8", "--backend=fsdp", "--processes=2", "--activations"]
    assert main(["plan", *words, "--train_batch_size=8"]) == 0
    said = capsys.readouterr().out

    rows = {line[:20].strip(): line[20:].strip() for line in said.splitlines()}
    assert rows["steps"] == "1 per epoch, 1 in 1 epoch"
    assert rows["memory: parameters"] == "8 MiB"
    assert rows["memory: activations"] == "96 KiB"  # 4 samples: the inputs of 4 blocks and of the loss, the targets


def test_an_optimizer_that_reads_the_plan_needs_the_samples(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    needs = target.replace("Large", "Needs")

    assert "AttributeError" in planned(capsys, needs)["memory"]["unknown"]["optimizer"]
    assert planned(capsys, needs, "--samples", "8")["memory"]["optimizer"] == 0


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--shards", "2"], "write a number that divides the processes, and a backend that divides parameters"),
        (["--backend", "fsdp", "--world", "6", "--shards", "4"], "--shards 4 of --processes 6"),
        (["--shards", "0"], "--shards 0: write a whole number"),
    ],
)
def test_impossible_numbers_of_shards_are_refused(
    target: str, words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", target, *words]) == 2
    assert error in capsys.readouterr().err


def test_an_error_of_the_module_keeps_its_traceback(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", target.replace("Large", "fails")]) == 1
    assert "ValueError: no such file" in capsys.readouterr().err
