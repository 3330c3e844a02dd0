"""`compare_runs` finds the first step at which two runs differ, and its cause, without false alarms."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers
from trainstack.cli.main import main
from trainstack.step_log import ENTRY, Flag, Start, log_path
from trainstack.step_log.format import Kind, to_json
from trainstack.trainer import start_description
from trainstack.trainer.recording.log_file import LogFile
from trainstack.trainer.reporting.report.page import page_of
from trainstack.trainer.reporting.report.runs import read_run

STEPS = 12  # two epochs of six


class Planted(Classifier):
    """Calls `plant` with the module after global step 5."""

    def __init__(self, *given: Any, plant: Callable[[Any], Any] = lambda module: None, **options: Any) -> None:
        super().__init__(*given, **options)
        self.plant = plant

    def on_end_train_step(self, global_step: int) -> None:
        if global_step == 5:
            self.plant(self)


def flip_bit(bit: int) -> ts.ModuleInterface:
    def flip(module: Any) -> None:
        module.net[0].weight.data.view(torch.int32)[0, 0] ^= 1 << bit

    return Planted(plant=flip)


def trained(folder: Path, module: ts.ModuleInterface | None = None, **changes: Any) -> Path:
    saving = ts.DefaultCheckpointerArguments(checkpoint=False)
    torch.manual_seed(11)
    random.seed(12)
    args = {"epochs": 2, "log_every": 4, "checkpointer_args": saving, "writers": ["csv"], **changes}
    ts.Trainer(Planted() if module is None else module, arguments(folder, **args)).train()
    return folder


def swapped(one: int, other: int) -> Any:
    data = numbers(41)
    for tensor in data.tensors:
        tensor[[one, other]] = tensor[[other, one]]
    return data


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An unchanged run for each mode of the record."""
    folder = tmp_path_factory.mktemp("runs")
    return {mode: trained(folder / mode, record=mode) for mode in ("steps", "full")}


def first_step_with(index: int, seed: int = 0) -> int:
    """The first global step that trains on a sample."""
    seen = list[int]()

    class Seen(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 41

        def __getitem__(self, place: int) -> Any:
            seen.append(place)
            return numbers(41)[place]

    ts.Trainer(Classifier(Seen()), arguments(None, seed=seed, fast_dev_run=6, record="off")).train()
    steps = [i for i, place in enumerate(seen[-41:]) if place == index]
    return steps[0] // 8 + 1


@pytest.mark.parametrize("mode", ["steps", "full"])
def test_equal_runs_raise_no_alarm(mode: str, runs: dict[str, Path], tmp_path: Path) -> None:
    found = ts.compare_runs(runs[mode], trained(tmp_path / "again", record=mode))

    assert found.same
    assert (found.step, found.quantity, found.changes, found.notes) == (None, None, (), ())
    assert str(found) == f"same records in {STEPS} global steps"


def test_random_states_that_are_not_used_are_ignored(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "seed", lambda *_: None)
    random.random()

    assert ts.compare_runs(runs["full"], trained(tmp_path, record="full")).same


def test_another_used_random_state_at_the_start_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = trained(tmp_path / "one", Planted(dropout=0.5))
    seed = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda number: seed(number + (number == 11)))
    found = ts.compare_runs(one, trained(tmp_path / "two", Planted(dropout=0.5)))

    assert (found.step, found.quantity) == (1, "random state")
    assert found.values[0].startswith("torch ")


def test_logs_of_both_modes_can_be_compared(runs: dict[str, Path]) -> None:
    assert ts.compare_runs(runs["steps"], runs["full"]).same


Plant = tuple[Callable[[], ts.ModuleInterface], dict[str, Any]]
PLANTED: dict[str, Plant] = {
    "seed": (Planted, {"seed": 1}),
    "lr": (lambda: Planted(lr=0.2), {}),
    "weights": (lambda: Planted(seed=5), {}),
    "clipping": (Planted, {"max_grad_norm": 1e-3}),
    "batch": (Planted, {"train_batch_size": 4}),
    "bit": (lambda: flip_bit(22), {}),
    "lowest bit": (lambda: flip_bit(0), {}),
    "draw": (lambda: Planted(plant=lambda module: torch.rand(())), {}),
}


@pytest.mark.parametrize(
    ("plant", "mode", "step", "quantity", "cause"),
    [
        ("seed", "steps", 1, "data", "arguments.seed (0 and 1)"),
        ("seed", "full", 1, "data", "arguments.seed (0 and 1)"),
        ("lr", "steps", 1, "learning rate", "optimizers.0.lr (0.1 and 0.2)"),
        ("lr", "full", 1, "learning rate", "optimizers.0.lr (0.1 and 0.2)"),
        ("weights", "steps", 1, "weights at the start", "began with other weights"),
        ("clipping", "steps", 2, "forward", "arguments.max_grad_norm (1.0 and 0.001)"),
        ("clipping", "full", 1, "backward", "arguments.max_grad_norm (1.0 and 0.001)"),
        ("batch", "steps", 1, "data", "data.global batch (8 and 4)"),
        ("bit", "steps", 6, "forward", "weights that were changed between steps"),
        ("bit", "full", 6, "forward", "weights that were changed between steps"),
        ("lowest bit", "full", 6, "optimizer", "weights that were changed between steps"),
        ("draw", "full", 6, "random state", "code that drew other random numbers"),
    ],
)
def test_planted_differences_are_found(
    plant: str, mode: str, step: int, quantity: str, cause: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    make, changes = PLANTED[plant]
    found = ts.compare_runs(runs[mode], trained(tmp_path, make(), record=mode, **changes))

    assert (found.step, found.quantity) == (step, quantity)
    assert cause in found.reason
    assert found.same_until == step - 1
    if plant == "weights":
        assert found.parameters == ("net.0.weight", "net.0.bias", "net.3.weight", "net.3.bias")


def test_a_full_record_shows_a_swapped_sample(runs: dict[str, Path], tmp_path: Path) -> None:
    step = min(first_step_with(7), first_step_with(13))
    other = trained(tmp_path, Planted(swapped(7, 13)), record="full")
    found = ts.compare_runs(runs["full"], other)

    assert (found.step, found.quantity) == (step, "data")
    assert "samples" in found.reason


def test_another_version_of_torch_is_reported(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = start_description.package_versions()
    monkeypatch.setattr(start_description, "package_versions", lambda: {**known, "torch": "9.9"})
    same = ts.compare_runs(runs["steps"], trained(tmp_path / "same"))
    assert same.same
    assert [(c.name, c.given) for c in same.changes] == [("environment.torch", "9.9")]

    found = ts.compare_runs(runs["steps"], trained(tmp_path / "bit", flip_bit(22)))
    assert found.step == 6
    assert f"environment.torch ({known['torch']} and 9.9)" in found.reason


def test_the_report_of_several_runs_has_the_first_difference(runs: dict[str, Path], tmp_path: Path) -> None:
    other = trained(tmp_path / "clipped", max_grad_norm=1e-3)
    shown = page_of([read_run(folder, name) for folder, name in ((runs["steps"], "one"), (other, "two"))])

    assert "First difference from one" in shown
    assert "the runs diverge at global step 2: forward; the same until global step 1" in shown
    assert "because the starts differ: arguments.max_grad_norm (1.0 and 0.001)." in shown


# --- logs that the tests write


def write_log(
    run: Path, losses: Any, *, rank: int = 0, size: int = 1, environment: dict[str, str] | None = None, **fields: Any
) -> Path:
    """A log with an entry for each loss."""
    entries = np.zeros(len(losses), ENTRY)
    entries["step"], entries["loss"] = np.arange(1, len(losses) + 1), losses
    entries["flags"] = Flag.NORM | Flag.SAMPLES
    for name, values in fields.items():
        entries[name] = values
    about = {"environment": {"world size": str(size), **(environment or {})}}
    log = LogFile(log_path(run, rank))
    start = Start(
        number=0, run_id="", rank=rank, world_size=size, backend="sp", resumed_step=0, mode="steps", description=about
    )
    parts = np.array_split(entries, max(1, len(entries) // 50))
    log.append((Kind.START, to_json(asdict(start))), *((Kind.STEPS, part.tobytes()) for part in parts))
    log.close()
    return run


def test_different_numbers_of_ranks_are_compared_by_their_sums(tmp_path: Path) -> None:
    one = write_log(tmp_path / "one", [1.0, 0.75, 0.5])
    for rank in (0, 1):
        write_log(tmp_path / "same", [0.5, 0.375, 0.25], rank=rank, size=2)
        write_log(tmp_path / "two", [0.5, 0.375, 0.25 + 1e-9 * rank], rank=rank, size=2)

    assert ts.compare_runs(one, tmp_path / "same").same
    found = ts.compare_runs(one, tmp_path / "two")
    assert (found.step, found.quantity, found.same_until) == (3, "forward", 2)
    assert "environment.world size (1 and 2)" in found.reason
    assert "agree up to rounding, and with dropout the model draws other masks" in found.reason
    assert any("1 and 2 ranks" in note for note in found.notes)


@pytest.mark.parametrize(
    ("limits", "step"),
    [
        ({}, 1),
        ({"tolerance": 1e-7}, 2),
        ({"tolerance": 1e-5}, 3),
        ({"absolute_tolerance": 1e-6}, 2),
        ({"absolute_tolerance": 1e-3}, None),
        ({"tolerance": 1e-7, "absolute_tolerance": 1e-3}, None),
        ({"tolerance": 2.0}, None),
        ({"tolerance": 0.0}, 1),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_losses_and_norms_within_a_tolerance_are_the_same(
    limits: dict[str, float], step: int | None, size: int, tmp_path: Path
) -> None:
    write_log(tmp_path / "one", [1.0, 1.0, 1e-5], norm=[1.0, 1.0, 1.0])
    shares = np.array([1.0 + 1e-8, 1.0 + 2e-6, 2e-5])
    for rank in range(size):
        write_log(tmp_path / "two", shares / size, rank=rank, size=size, norm=[1.0, 1.0, 1.0 + 1e-12])

    found = ts.compare_runs(tmp_path / "one", tmp_path / "two", **limits)
    assert (found.step, found.quantity) == (step, None if step is None else "forward")
    assert (found.tolerance, found.absolute_tolerance) == (limits.get("tolerance"), limits.get("absolute_tolerance"))
    assert found.largest_error == (pytest.approx(0.5) if limits else None)
    if step is None:
        assert found.summary.startswith("same to a tolerance of ")


@pytest.mark.parametrize(
    ("fields", "quantity"),
    [
        ({"samples": [0, 7]}, "data"),
        ({"rates": [0, 7]}, "learning rate"),
        ({"flags": [6, 7]}, "skipped step"),
        ({"norm": [0.0, 1.0]}, "backward"),
        ({"norm": [0.0, np.inf]}, "backward"),
        ({"norm": [0.0, np.nan]}, "backward"),
    ],
)
def test_a_tolerance_does_not_hide_other_differences(fields: dict[str, Any], quantity: str, tmp_path: Path) -> None:
    write_log(tmp_path / "one", [1.0, 1.0])
    write_log(tmp_path / "two", [1.0, 1.0], **fields)

    found = ts.compare_runs(tmp_path / "one", tmp_path / "two", tolerance=0.5, absolute_tolerance=0.5)
    assert (found.step, found.quantity) == (2, quantity)


def test_digests_of_weights_and_gradients_have_no_tolerance(runs: dict[str, Path], tmp_path: Path) -> None:
    other = trained(tmp_path, flip_bit(15), record="full")

    assert ts.compare_runs(runs["full"], other).step == 6
    found = ts.compare_runs(runs["full"], other, tolerance=1e-2)
    assert found.same
    assert 0 < (found.largest_error or 0.0) < 1e-2


@pytest.mark.parametrize("limits", [{"tolerance": -1.0}, {"absolute_tolerance": np.inf}, {"tolerance": np.nan}])
def test_a_tolerance_that_means_nothing_is_refused(limits: dict[str, float], tmp_path: Path) -> None:
    one = write_log(tmp_path, [1.0])
    with pytest.raises(ts.ConfigurationError, match=r"tolerance=.*: write a number from 0 up, such as 1e-4"):
        ts.compare_runs(one, one, **limits)


def test_the_first_rank_that_differs_is_reported(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_log(tmp_path / "one", [1.0, 0.5, 0.25], rank=rank, size=2)
        write_log(tmp_path / "two", [1.0, 0.5 + rank, 9.0], rank=rank, size=2)

    found = ts.compare_runs(tmp_path / "one", tmp_path / "two")
    assert (found.step, found.rank, found.quantity) == (2, 1, "forward")
    assert "at global step 2 on rank 1" in str(found)


@pytest.mark.parametrize(
    ("fields", "quantity", "values"),
    [
        ({"samples": [0, 7, 0]}, "data", ("digest 0000000000000000", "digest 0000000000000007")),
        ({"rates": [0, 7, 0]}, "learning rate", ("digest 0000000000000000", "digest 0000000000000007")),
        ({"norm": [0.0, -0.0, 0.0]}, "backward", ("0.0 (0x0.0p+0)", "-0.0 (-0x0.0p+0)")),
        ({"flags": [6, 7, 6]}, "skipped step", ("made", "skipped")),
        ({"epoch": [0, 1, 1]}, "data", ("epoch 0", "epoch 1")),
        ({"loss": [1.0, np.nan, 1.0]}, "forward", ("1.0 (0x1.0000000000000p+0)", "nan (nan)")),
    ],
)
def test_each_field_has_its_quantity(
    fields: dict[str, Any], quantity: str, values: tuple[str, str], tmp_path: Path
) -> None:
    write_log(tmp_path / "one", [1.0, 1.0, 1.0])
    write_log(tmp_path / "two", [1.0, 1.0, 1.0], **fields)

    found = ts.compare_runs(tmp_path / "one", tmp_path / "two")
    assert (found.step, found.quantity, found.values) == (2, quantity, values)


def test_entries_of_only_one_run_are_ignored(tmp_path: Path) -> None:
    write_log(tmp_path / "one", [1.0, 1.0], samples=[3, 4], norm=[1.0, 2.0])
    write_log(tmp_path / "two", [9.0, 9.0], flags=[int(Flag.HIDDEN)] * 2)

    assert ts.compare_runs(tmp_path / "one", tmp_path / "two").same


def test_equal_nans_are_the_same(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_log(tmp_path / name, [1.0, np.nan])

    assert ts.compare_runs(tmp_path / "one", tmp_path / "two").same


def test_different_lengths_and_damage_are_reported(tmp_path: Path) -> None:
    write_log(tmp_path / "one", [1.0] * 200)
    write_log(tmp_path / "two", [1.0] * 200)
    path = log_path(tmp_path / "two", 0)
    path.write_bytes(path.read_bytes()[:-1])

    found = ts.compare_runs(tmp_path / "one", tmp_path / "two")
    assert found.same
    assert found.compared == 150
    assert len(found.notes) == 2
    assert "rank 0: " in found.notes[0]
    assert found.notes[1] == "the first has 200 global steps, the second 150; those of both are compared"


def test_the_command_has_an_exit_code_for_each_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = write_log(tmp_path / "one", [1.0, 0.5]), write_log(tmp_path / "two", [1.0, 0.25])
    (tmp_path / "none").mkdir()

    assert main(["compare", str(one), str(one)]) == 0
    assert capsys.readouterr().out == "same records in 2 global steps\n"
    assert main(["compare", str(one), str(two)]) == 1
    assert "the runs diverge at global step 2: forward; the same until global step 1" in capsys.readouterr().out
    assert main(["compare", str(one), str(two), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["same"], answer["step"], answer["quantity"], answer["same_until"]) == (False, 2, "forward", 1)
    assert main(["compare", str(one), str(two), "--tolerance", "1e-3", "--absolute_tolerance", "0.3"]) == 0
    assert capsys.readouterr().out == (
        "same to a tolerance of 0.001 (relative) or 0.3 (absolute) in 2 global steps; the largest relative difference "
        "of a loss or gradient norm is 0.5\n"
    )
    assert main(["compare", str(one), str(two), "--tolerance", "1e-3", "--target", "my.py:Net"]) == 2
    assert "--tolerance allows other bits. Remove one of them." in capsys.readouterr().err
    assert main(["compare", str(one), str(tmp_path / "none")]) == 2
    assert "has no step log. Name the output_dir of a run" in capsys.readouterr().err
