"""A resume over other samples than the run began with warns, by hashes of three samples in the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import TensorDataset

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
    """The warnings about samples of a run over `then` that continues one over `first`."""
    saving = ts.DefaultCheckpointerArguments(every_n_steps=2)
    for dataset, steps in ((first, 2), (then, 4)):
        caplog.clear()
        args = arguments(directory, max_steps=steps, resume="auto", checkpointer_args=saving, **changes)
        ts.Trainer(module(dataset), args).train()
    return [message for message in caplog.messages if "is not what it was when" in message]


@pytest.mark.parametrize(
    ("then", "named"),
    [
        (flipped(), "of the samples 0, 20, 40, which are compared, 0, 40 differ."),
        (middle_changed(), "of the samples 0, 20, 40, which are compared, 20 differs."),
    ],
)
def test_other_samples_at_a_resume_are_named(
    tmp_path: Path, then: Any, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    (message,) = resumed(tmp_path, numbers(41), then, caplog)

    assert named in message


@pytest.mark.parametrize("dataset", [numbers(41), Noisy(), OwnNoise(), Unlike()], ids=lambda data: type(data).__name__)
def test_the_same_samples_are_no_warning(tmp_path: Path, dataset: Any, caplog: pytest.LogCaptureFixture) -> None:
    again = type(dataset)() if not isinstance(dataset, TensorDataset) else numbers(41)

    assert not resumed(tmp_path, dataset, again, caplog)


def test_random_samples_that_are_equal_in_two_fetches_cause_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
