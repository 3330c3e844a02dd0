"""`trainstack doctor --determinism` finds the first value that differs, and the code that may be its cause."""

from __future__ import annotations

import datetime
import json
import logging
import os
import random
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import nondeterminism
from tests.helpers.modules import arguments
from trainstack.cli import determinism
from trainstack.cli.main import main
from trainstack.trainer import seed_everything
from trainstack.verifying.determinism.step_trace import Entry, first_difference, trace_steps
from trainstack.verifying.determinism.user_sources import SourceWatch
from trainstack.verifying.determinism.watch import measure_cost, watch_steps

FILE = Path(nondeterminism.__file__)


def qualified(kind: str, name: str) -> str:
    """The name of a method in a report; Python 3.10 knows that of the function only."""
    return f"{kind}.{name}" if sys.version_info >= (3, 11) else name


def trace(name: str, directory: Path) -> list[Entry]:
    seed_everything(0)
    return trace_steps(getattr(nondeterminism, name)(), arguments(directory), 3)


@pytest.mark.parametrize(
    ("name", "step", "quantity", "where"),
    [
        ("Clock", 1, "loss", ""),
        ("Activation", 2, "forward", "net.2"),
        ("Backward", 1, "backward", "net.0.weight"),
        ("Data", 1, "data", ""),
        ("Start", 0, "weights at the start", "net.3.weight"),
        ("Hook", 2, "weights between steps", "net.0.bias"),
        ("Optimizer", 1, "optimizer", "net.0.weight"),
    ],
)
def test_the_first_difference_has_its_step_and_quantity(
    tmp_path: Path, name: str, step: int, quantity: str, where: str
) -> None:
    found = first_difference(trace(name, tmp_path), trace(name, tmp_path))

    assert found is not None
    assert (found.step, found.quantity, found.name) == (step, quantity, where)


def test_deterministic_steps_have_the_same_trace(tmp_path: Path) -> None:
    one, other = trace("Good", tmp_path), trace("Good", tmp_path)

    assert first_difference(one, other) is None
    assert first_difference(one, other[:-1]) == one[-1]
    assert {entry.step for entry in one if entry.quantity == "optimizer"} == {1, 2, 3}
    assert [entry.name for entry in one if entry.quantity == "forward"][:5] == [*(f"net.{i}" for i in range(4)), "net"]


def test_calls_without_a_seed_are_found_in_user_code() -> None:
    with SourceWatch() as watch:
        time.time(), time.perf_counter_ns()
        datetime.datetime.now()
        os.urandom(1), uuid.uuid4(), random.SystemRandom().random()
        np.random.default_rng(), random.Random(), torch.Generator().seed()
        np.random.default_rng(1), random.Random(1), torch.Generator().manual_seed(1), random.random()
        logging.getLogger("tests").warning("a line with its time")

    called = sorted(source.called.partition(" (")[2].rstrip(")") or source.called for source in watch.found)
    assert called == [
        "datetime.now",
        *["os.urandom"] * 2,  # on two lines
        "random.Random without a seed",
        "time.perf_counter_ns",
        "time.time",
        "torch.Generator.seed",
    ]
    assert all(f"{Path(__file__).name}:" in source.place for source in watch.found)


def test_operators_are_found_with_their_setting(tmp_path: Path) -> None:
    sources, operators = watch_steps(nondeterminism.Scatters, arguments(tmp_path), 1)

    assert not sources
    found = {one.name: one for one in operators}
    assert set(found) == {"scatter_add", "cumsum"}
    assert found["scatter_add"].setting == "TrainerArguments(deterministic=True)"
    assert "no deterministic version" in found["cumsum"].setting
    assert all(one.where == "CUDA" and qualified("Scatters", "train_step") in one.place for one in operators)


def test_the_cost_of_deterministic_operations_is_a_ratio(tmp_path: Path) -> None:
    assert 0 < measure_cost(nondeterminism.Good, arguments(tmp_path), 2) < float("inf")


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run the parts in this process instead of new ones."""

    def ask(target: str, options: Any, part: str, hash_seed: int) -> Any:
        answer = tmp_path / "answer.json"
        assert main(["doctor", "--determinism", target, *options, "--part", part, "--answer", str(answer)]) == 0
        return json.loads(answer.read_text())

    monkeypatch.setattr(determinism, "_ask", ask)


OPTIONS = ["--train_batch_size", "8", "--steps", "2"]


@pytest.mark.usefixtures("one_process")
def test_the_command_prints_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--determinism", f"{FILE}:Good", *OPTIONS]) == 0
    assert "2 global steps have the same bits in two processes" in capsys.readouterr().out

    assert main(["doctor", "--determinism", f"{FILE}:Clock", *OPTIONS]) == 1
    text = capsys.readouterr().out
    assert "two processes differ from global step 1 on: loss" in text
    assert f"in {qualified('Clock', 'train_step')}: the time (time.perf_counter_ns)" in text
    assert "times the CPU time of a step here" in text

    assert main(["doctor", f"--determinism={FILE}:Backward", *OPTIONS, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["same"]
    assert (found["difference"]["quantity"], found["difference"]["name"]) == ("backward", "net.0.weight")
    assert "os.urandom" in found["sources"][0]["called"]


def test_runs_that_cannot_be_compared_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        ([f"{FILE}:Good", "--backend", "ddp"], "joins processes"),
        ([f"{FILE}:Goood"], "Did you mean 'Good'?"),
        ([f"{FILE}:Good", "--steps", "0"], "--steps 0"),
        ([], "needs FILE.py:MODULE"),
    ):
        assert main(["doctor", "--determinism", *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.processes
def test_a_dependence_on_the_hash_seed_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """In real processes, which have different hash seeds."""
    assert main(["doctor", "--determinism", f"{FILE}:Order", *OPTIONS, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["depends_on_hashes"]
    assert found["difference"]["quantity"] == "loss"

    assert main(["doctor", "--determinism", f"{FILE}:Clock", *OPTIONS, "--json"]) == 1
    assert not json.loads(capsys.readouterr().out)["depends_on_hashes"]
