"""`compare_by_replay` finds the exact step and parameter of two runs with the default record."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier
from tests.helpers.patience import patience
from tools.kills.__main__ import preloaded
from tools.replays import plants
from tools.replays.subject import Settings, Subject, arguments, flip_bit, make
from trainstack.cli.main import main
from trainstack.replaying import compare_by_replay
from trainstack.replaying.bisection import last_same_checkpoint
from trainstack.replaying.recorded import read_run
from trainstack.trainer.reporting.run_comparison import RunComparison
from trainstack.verifying.comparison import checkpoints_of

pytestmark = pytest.mark.processes
SETTINGS = Settings(augmentation=0.0)
STEP = 10
"""The step of the difference. Checkpoints are at 4, 6, 8, 12, 16 and 18, and log points at 9 and 12."""


class Changed(Subject):
    """`change` happens at global step `STEP`."""

    def __init__(self, change: str) -> None:
        super().__init__(replace(SETTINGS, augmentation=0.1 if change == "augmentation" else 0.0))
        self.change = change

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        loss = super().train_step(global_step, batch, device)
        if self.change == "random" and global_step >= STEP:
            loss = loss * (1 + int.from_bytes(os.urandom(4), "little") * 2.0**-32)
        return loss

    def on_end_backward(self, global_step: int, loss_tensor: torch.Tensor) -> None:
        if self.change == "bit" and global_step == STEP:
            flip_bit(self.net[3].weight)


def plain_module() -> Subject:
    return Changed("")


def record(place: Path, module: Any, **changes: Any) -> Path:
    args = arguments(place, **{**plants.ARGUMENTS, **changes})
    ts.seed_everything(args.seed)
    ts.Trainer(module, args).train()
    return place


def bit_module() -> Subject:
    return Changed("bit")


@pytest.fixture(autouse=True)
def _forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork processes from one that has imported torch."""
    module = sys.modules["trainstack.replaying.task"]
    monkeypatch.setattr(module, "multiprocessing", SimpleNamespace(get_context=lambda method: preloaded()))


@pytest.fixture
def _no_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> None:
        raise AssertionError("a replay")

    monkeypatch.setattr("trainstack.replaying.scratch.Engine.run", run)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    made = {"plain": plain_module(), "bit": bit_module()}
    return {name: record(folder / name, module) for name, module in made.items()}


def compared(one: Path, other: Path, *makers: Any) -> RunComparison:
    given = {"timeout_s": patience(60), "say": lambda line: None}
    return compare_by_replay(makers[0], one, other, other_module=makers[-1], **given)


def test_a_bit_is_found_at_its_step_and_parameter(runs: dict[str, Path]) -> None:
    logs = ts.compare_runs(runs["plain"], runs["bit"])
    assert (logs.step, logs.quantity, logs.parameters) == (STEP + 1, "forward", ())
    found = compared(runs["plain"], runs["bit"], plain_module, bit_module)
    assert (found.step, found.quantity, found.parameters) == (STEP, "optimizer", ("net.3.weight",))
    assert (found.same_until, found.compared) == (STEP - 1, 18)
    assert "weights that were changed between steps" in found.reason
    assert [note.partition(" ")[2] for note in found.notes] == [
        "was replayed from checkpoint-000000008 up to step 11, with the full record"
    ] * 2


@pytest.mark.long
def test_an_edited_augmentation_is_named_as_data(tmp_path: Path) -> None:
    index = next(one for one in range(43) if plants.first_step_of(one) == 5)
    edited = plants.with_plant(Settings(), "one sample", index)
    places = [record(tmp_path / str(n), make(one)[0]) for n, one in enumerate((Settings(), edited))]
    assert ts.compare_runs(*places).quantity == "forward"
    found = compared(*places, *(functools.partial(make, one) for one in (Settings(), edited)))
    assert (found.step, found.quantity, found.same_until) == (5, "data", 4)  # checkpoint 4 has the same states
    assert "an augmentation that was edited" in found.reason
    assert "log points" not in found.reason


@pytest.mark.long
def test_a_run_that_is_not_deterministic_is_named(runs: dict[str, Path], tmp_path: Path) -> None:
    place = record(tmp_path / "run", Changed("random"))
    found = compared(runs["plain"], place, plain_module, functools.partial(Changed, "random"))
    assert (found.step, found.quantity) == (STEP, "forward")
    assert found.reason.startswith(
        f"{place} is not reproducible: its replay differs from its record in step {STEP}, forward."
    )
    assert str(runs["plain"]) not in found.reason
    assert f"{place} was replayed from checkpoint-000000008" in found.notes[1]


@pytest.mark.usefixtures("_no_replay")
def test_runs_are_not_replayed_without_need(runs: dict[str, Path], tmp_path: Path) -> None:
    assert compared(runs["plain"], record(tmp_path / "same", plain_module()), plain_module).same
    full = [record(tmp_path / m.__name__, m(), record="full", epochs=2) for m in (plain_module, bit_module)]
    found = compared(*full, plain_module)
    assert (found.step, found.parameters, found.notes) == (STEP, ("net.3.weight",), ())
    with pytest.raises(AssertionError, match="a replay"):
        compared(runs["plain"], runs["bit"], plain_module)


def test_damaged_checkpoints_and_unused_random_states_are_ignored(runs: dict[str, Path], tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments(every_n_steps=2, keep_last=None)
    for name in ("one", "two"):
        torch.manual_seed(0)
        random.seed(name)
        np.random.seed(len(name) + ord(name[0]))
        trainer = ts.Trainer(Classifier(), arguments(tmp_path / name, epochs=1, checkpointer_args=saving))
        trainer.train()
    unseeded = [read_run(tmp_path / name) for name in ("one", "two")]
    assert last_same_checkpoint(*unseeded, before=6) == 4
    copied = tmp_path / "copied"
    shutil.copytree(runs["bit"], copied)
    whole, damaged = read_run(runs["plain"]), read_run(copied)
    assert [last_same_checkpoint(whole, damaged, before=step) for step in (18, 8, 4)] == [8, 6, 0]
    (checkpoint,) = (info.path for info in checkpoints_of(copied) if info.global_step == 8)
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    assert last_same_checkpoint(whole, damaged, before=18) == 6


@pytest.mark.long
def test_a_run_without_its_first_checkpoint_is_refused(tmp_path: Path) -> None:
    parent = record(tmp_path / "parent", plain_module(), epochs=1)
    begin = str(checkpoints_of(parent)[0].path)
    places = []
    for maker in (plain_module, bit_module):
        places.append(record(tmp_path / maker.__name__, maker(), resume=begin, epochs=2))
        for info in checkpoints_of(places[-1]):
            shutil.rmtree(info.path)
    with pytest.raises(ts.ConfigurationError, match=r"cannot be replayed from step 5: .* Remove the target"):
        compared(*places, plain_module, bit_module)


@pytest.mark.long
def test_a_private_run_is_refused(tmp_path: Path) -> None:
    private = ts.DifferentialPrivacyArguments(noise_multiplier=1.0, delta=1e-4)
    args = arguments(tmp_path, backend="sp-dp", epochs=1, differential_privacy_args=private)
    ts.Trainer(Classifier(), args).train()
    with pytest.raises(ts.ConfigurationError, match="its batches and its noise come from secret random numbers"):
        compared(tmp_path, tmp_path, Classifier)


@pytest.mark.long
def test_the_command_replays_the_targets(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    words = ["compare", str(runs["plain"]), str(runs["bit"])]
    here = "tests.replaying.test_bisection"
    assert main([*words, "--target", f"{here}:plain_module", "--other-target", f"{here}:bit_module"]) == 1
    said = capsys.readouterr().out
    assert f"{runs['bit']}:\nreplays steps 9 to 11 from checkpoint-000000008 with 1 process\n" in said
    assert f"the runs diverge at global step {STEP}: optimizer (net.3.weight); the same until global step 9\n" in said


def test_wrong_command_line_arguments_are_refused_with_a_correction(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "one", "two", "--other-target", "my.py:M", "--json"]) == 2
    assert "Write --target TARGET too" in json.loads(capsys.readouterr().err)["error"]
    assert main(["compare", "one", "two", "--target", "old/my.py:M", "--other-target", "new/my.py:M"]) == 2
    assert "are files of the same name" in capsys.readouterr().err
