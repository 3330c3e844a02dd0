"""A resume over other samples than the run began with warns, by hashes of three samples in the checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Subset, TensorDataset

import trainstack as ts
from tests.helpers.modules import Classifier, Noisy, arguments, numbers
from tests.helpers.workers.agreement import Coin, Named, OfDict, OwnNoise


class Unlike(OwnNoise):
    """A data set that cannot be copied."""

    def __reduce__(self) -> Any:
        raise TypeError("no")


def flipped(count: int = 41) -> TensorDataset:
    return TensorDataset(*(tensor.flip(0) for tensor in numbers(count).tensors))


def middle_changed() -> TensorDataset:
    data = numbers(41)
    data.tensors[0][20] += 1
    return data


def resumed(
    directory: Path, first: Any, then: Any, caplog: pytest.LogCaptureFixture, module: Any = Classifier, **changes: Any
) -> list[str]:
    """The indices of samples that a run over `then` reports when it resumes a run over `first`."""
    saving = ts.DefaultCheckpointerArguments(every_n_steps=2)
    for dataset, steps in ((first, 2), (then, 4)):
        caplog.clear()
        args = arguments(directory, max_steps=steps, resume="auto", checkpointer_args=saving, **changes)
        ts.Trainer(module(dataset), args).train()
    return re.findall(r"data\.sample (\d+) +\w+ +\w+ +another run", caplog.text)


@pytest.mark.parametrize(
    ("then", "named"),
    [
        (flipped(), ["0", "40"]),
        (middle_changed(), ["20"]),
    ],
)
def test_other_samples_at_a_resume_are_named(
    tmp_path: Path, then: Any, named: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert resumed(tmp_path, numbers(41), then, caplog) == named


@pytest.mark.parametrize("dataset", [numbers(41), Noisy(), OwnNoise(), Unlike()], ids=lambda data: type(data).__name__)
def test_the_same_samples_cause_no_warning(tmp_path: Path, dataset: Any, caplog: pytest.LogCaptureFixture) -> None:
    again = type(dataset)() if not isinstance(dataset, TensorDataset) else numbers(41)

    assert not resumed(tmp_path, dataset, again, caplog)


class Curriculum(Classifier):
    """Trains on samples that a counter in its state chooses, which advances at `place`."""

    place, level = "hook", 0

    def __init__(self, dataset: Any, place: str = "hook") -> None:
        super().__init__(dataset)
        self.place = place

    def _at(self, place: str) -> None:
        self.level += self.place == place

    def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
        self._at("hook")

    def on_end_train_step(self, global_step: int) -> None:
        self._at("step")

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        self._at("loader")
        part = Subset(self.dataset, range(self.level, self.level + 24))
        return DataLoader(part, sampler=sampler(part), batch_size=batch_size)

    def get_state(self) -> dict[str, Any]:
        return {"weights": super().get_state(), "level": self.level}

    def update_state(self, state: Any) -> None:
        if state:
            super().update_state(state["weights"])
            self.level = state["level"]


@pytest.mark.parametrize("place", ["hook", "loader", "step"])
def test_samples_that_the_state_chooses_cause_no_warning(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saving = ts.DefaultCheckpointerArguments(every_n_steps=1)
    for steps in (2, 4, 6, 7, 8):  # within and between the epochs of three steps
        args = arguments(tmp_path, max_steps=steps, resume="auto", checkpointer_args=saving)
        ts.Trainer(Curriculum(numbers(41), place), args).train()

    assert "  data." not in caplog.text


def test_other_samples_than_in_the_epoch_before_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for dataset, epochs in ((numbers(41), 1), (flipped(), 2)):
        saving = ts.DefaultCheckpointerArguments()
        args = arguments(tmp_path, epochs=epochs, resume="auto", checkpointer_args=saving)
        ts.Trainer(Classifier(dataset), args).train()

    assert re.findall(r"data\.sample (\d+) ", caplog.text) == ["0", "40"]
    assert "list files in a fixed order (sorted)" in caplog.text


def test_random_samples_equal_in_two_fetches_cause_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not resumed(tmp_path, Coin("000000111"), Coin("111111000"), caplog)
    assert not resumed(tmp_path / "named", Named("host0"), Named("host1"), caplog, module=OfDict)


def test_hashes_change_nothing_of_a_training(tmp_path: Path) -> None:
    fetched = []
    for name, saves in (("saves", True), ("not", False)):
        data = OwnNoise()
        saving = ts.DefaultCheckpointerArguments(checkpoint=saves)
        ts.Trainer(Classifier(data), arguments(tmp_path / name, checkpointer_args=saving)).train()
        fetched.append(data.fetched)

    assert fetched == [41, 41]


def test_a_private_run_keeps_no_hashes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not resumed(tmp_path, numbers(41), flipped(), caplog, backend="sp-dp")
    newest = ts.list_checkpoints(tmp_path / "checkpoints")[0]
    kept = [path.read_text(errors="replace") for path in Path(newest.path).iterdir() if path.suffix == ".json"]

    assert kept
    assert not any('"samples"' in text for text in kept)
