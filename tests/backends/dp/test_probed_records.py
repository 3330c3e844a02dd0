"""The records that probe a module include the rare ones that change its behaviour."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

import trainstack as ts
from tests.helpers.modules import Classifier, Noisy, arguments, numbers
from tests.helpers.private_runs import private, promise
from trainstack.backends.dp import checks
from trainstack.backends.dp.checks import choose_probe_records
from trainstack.backends.workload import TrainingSet


@pytest.fixture(autouse=True)
def _time_for_all_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine loads fewer of the 200 records in a second, and might omit the tested one."""
    monkeypatch.setattr(checks, "_SECONDS", 600.0)


def training_set(records: list[Any], collate: Any = default_collate) -> TrainingSet:
    return TrainingSet(
        length=len(records),
        fetch=lambda index: collate([records[i] for i in index.tolist()]),
        global_batch=8,
        max_micro_batch=8,
        total_steps=10,
    )


def padded(samples: list[Any]) -> Any:
    """Inputs `(records, longest, features)`, the mask of their real positions, and labels."""
    inputs, labels = zip(*samples, strict=True)
    real = pad_sequence([torch.ones(len(x)) for x in inputs], batch_first=True)
    return pad_sequence(list(inputs), batch_first=True), real, torch.stack(list(labels))


def mostly_short(count: int, long: int) -> list[Any]:
    x, y = numbers(count + 100).tensors
    return [(x[i : i + (100 if i == long else 5)], y[i]) for i in range(count)]


def rows(count: int) -> list[Any]:
    return [(torch.ones(4), torch.tensor(0), "word") for _ in range(count)]


@pytest.mark.parametrize("place", [0, 77, 199])
@pytest.mark.parametrize("what", ["longest", "shortest", "rare class", "weight", "text", "array"])
def test_a_record_that_differs_is_among_the_probed_ones(what: str, place: int) -> None:
    records = rows(200)
    x, y, words = records[place]
    records[place] = {
        "longest": (torch.ones(9), y, words),
        "shortest": (torch.ones(1), y, words),
        "rare class": (x, y + 1, words),
        "weight": (0.5 * x, y, words),
        "text": (x, y, "a longer one"),
        "array": (x, y, "", np.ones(3)),
    }[what]
    for _ in range(3):
        found = choose_probe_records(training_set(records, collate=lambda samples: [[value] for value in samples[0]]))
        assert found.shape == (6,)
        assert found.dtype is torch.int64
        assert place in found


def test_the_other_probed_records_change_each_time() -> None:
    drawn = {tuple(choose_probe_records(training_set(rows(200))).tolist()) for _ in range(5)}
    assert len(drawn) == 5
    assert all(len(set(records)) == 6 for records in drawn)


def test_a_small_data_set_is_taken_whole() -> None:
    assert choose_probe_records(training_set(rows(3))).tolist() == [0, 1, 2]


def test_only_six_records_are_loaded_if_loading_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[int] = []
    data = training_set(rows(200), collate=lambda samples: loaded.append(1) or default_collate(samples))
    monkeypatch.setattr("trainstack.backends.dp.checks._SECONDS", 0.0)
    assert len(choose_probe_records(data)) == 6
    assert len(loaded) == 6


class OverPaddedLength(Classifier):
    """A mean over positions, of which most may be padding."""

    def __init__(self, long: int) -> None:
        super().__init__(mostly_short(200, long), collate_fn=padded)  # type: ignore[arg-type]

    def losses(self, batch: Any) -> Tensor:
        inputs, real, labels = batch
        logits = self.net(inputs).flatten(0, 1)
        each = F.cross_entropy(logits, labels.repeat_interleave(inputs.shape[1]), reduction="none")
        return each.view_as(real) * real

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return (self.losses(batch).sum(1) / batch[1].shape[1]).mean()


class OverOwnLength(OverPaddedLength):
    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return (self.losses(batch).sum(1) / batch[1].sum(1)).mean()


@pytest.mark.parametrize("asked", ["auto", "loop"])
def test_division_by_the_padded_length_is_refused_if_lengths_differ(asked: str, tmp_path: Path) -> None:
    args = private(tmp_path, promise(noise_multiplier=1.0, grad_mode=asked))
    with pytest.raises(ts.PrivacyError, match="records have other gradients together than alone"):
        ts.Trainer(OverPaddedLength(long=31), args).train()
    ts.Trainer(OverOwnLength(long=31), args).train()


def test_probing_records_leaves_the_generators_of_the_run_unchanged(tmp_path: Path) -> None:
    def state() -> list[Any]:
        return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # type: ignore[index, union-attr]

    states = []
    for args in (arguments(tmp_path), private(tmp_path, promise(noise_multiplier=1.0))):
        trainer = ts.Trainer(Classifier(Noisy()), args)
        assert trainer.plan.total_steps == 6
        states.append(state())
        trainer.close()
    assert states[0] == states[1]


def test_a_coupling_of_records_with_short_gradients_is_found() -> None:
    """The probe clips all gradients: its limit is that of the shortest one, without records whose gradient is 0."""
    gradients = torch.zeros(4, 4)
    gradients[[0, 1, 2], [0, 1, 2]] = torch.tensor([1e-4, 1e-4, 1.0])

    def clipped_sum(index: torch.Tensor, limit: float) -> torch.Tensor:
        rows = gradients[index].clone()
        if len(index) > 1 and {0, 1} <= set(index.tolist()):  # one turns the other round
            rows[index == 1] *= -1
        return (rows * (limit / rows.norm(dim=1, keepdim=True).clamp(min=1e-12)).clamp(max=1.0)).sum(0)

    (found,) = checks._problems(partial(clipped_sum), partial(clipped_sum), torch.arange(4))
    assert "its influence is 2.236 times the clipping norm" in found
