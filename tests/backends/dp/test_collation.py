"""`collate_fn` that makes a row of a batch depend on other rows, where one rare record alone shows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, default_collate

import trainstack as ts
from tests.backends.dp.test_sealed_state import STEPS, Net, private_trainer, sums_of
from tests.helpers.modules import Classifier, numbers
from tests.helpers.private_runs import private, promise
from trainstack.backends.dp import setup
from trainstack.backends.dp.sealed import collation
from trainstack.backends.dp.sealed.collation import CollationCheck
from trainstack.backends.random_streams import RandomStreams
from trainstack.errors import PrivacyError
from trainstack.trainer.data.loading import SeededDataset

RARE = 500.0


def scaled_by_largest(samples: Any) -> Any:
    x, y = default_collate(samples)
    return (x / x.abs().max() if float(x.max()) >= RARE else x), y


def padded(samples: Any) -> Any:
    """Sequences, padded on the right with zeros; the rare record is longer."""
    x, y = default_collate(samples)
    return torch.nn.functional.pad(x, (0, 3 if float(x.max()) >= RARE else 0)), y


def sorted_by_size(samples: Any) -> Any:
    x, y = default_collate(samples)
    order = x.norm(dim=1).argsort()
    return x[order], y[order]


def drawn(samples: Any) -> Any:
    x, y = default_collate(samples)
    return x + torch.randn_like(x), y


class Collated(Net):
    def __init__(self, collate: Any, masks: bool = True) -> None:
        super().__init__(RARE)
        self.collate, self.masks = (collate,), masks

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        made = self.collate[0]
        return DataLoader(self.data, sampler=sampler(self.data), batch_size=batch_size, collate_fn=made)

    def train_step(self, global_step: int, batch: Any, device: torch.device) -> Tensor:
        x, y = batch
        scores = self.net(x[:, :5])
        return cross_entropy(scores, y) / (1.0 if self.masks else x.shape[1])


@pytest.fixture(autouse=True)
def _rare_record_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "choose_probe_records", lambda data: torch.arange(1, 7))
    monkeypatch.setattr(collation.secrets, "randbelow", lambda below: below - 1)  # record 0 comes first in its batches


@pytest.mark.parametrize("mode", ["loop", "auto"])
@pytest.mark.parametrize(("collate", "masks"), [(scaled_by_largest, True), (padded, False)])
def test_a_batch_whose_collation_lets_records_interact_is_refused(
    collate: Any, masks: bool, mode: Any, tmp_path: Any
) -> None:
    with pytest.raises(PrivacyError, match="collate_fn gives a record another sample") as raised:
        sums_of(tmp_path, Collated(collate, masks), grad_mode=mode)
    assert "global step 3" in " ".join(raised.value.__notes__)  # the first that draws record 0


@pytest.mark.parametrize("collate", [padded, sorted_by_size])
def test_masked_padding_and_another_order_are_allowed(collate: Any, tmp_path: Any) -> None:
    assert len(sums_of(tmp_path, Collated(collate), grad_mode="auto")) == STEPS


def test_a_collate_function_that_draws_is_noted(tmp_path: Any) -> None:
    trainer = private_trainer(tmp_path, Collated(drawn), on_unsafe="report")
    trainer.train()
    assert any(
        "samples are not the same when fetched again" in line for line in trainer.privacy_statement().not_covered
    )


def test_nothing_is_fetched_again_where_torch_collates(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CollationCheck, "look", None)  # a call would raise
    assert len(sums_of(tmp_path, Net(0.5))) == STEPS


def test_paddings_are_compared_within_their_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(collation, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    data = [(torch.ones(5), 0), (torch.full((5,), RARE), 1)]

    def make(index: Tensor) -> Any:
        return padded([data[i] for i in index.tolist()])

    def gradients(batch: Any) -> list[Tensor]:
        now[0] += 1.0
        return [torch.ones(2)]

    check = CollationCheck(refuse=pytest.fail, note=pytest.fail)

    def is_compared() -> bool:
        index = torch.tensor([1, 0])
        check.look(make(index), index, make)
        waiting = check.is_waiting
        check.compare(gradients)
        return waiting

    assert all(is_compared() for _ in range(16))
    assert not is_compared()
    now[0] += 10_000.0
    assert is_compared()


def test_random_numbers_of_a_collation_are_new_unless_a_seed_gives_them() -> None:
    def drawn(streams: RandomStreams) -> list[float]:
        SeededDataset([0, 1, 2], streams).__getitems__([(0, 0), (0, 1)])
        return torch.rand(3).tolist()

    with torch.random.fork_rng(devices=[]):
        assert drawn(RandomStreams.from_seed(1)) == drawn(RandomStreams.from_seed(1))
        secret = RandomStreams.from_system()
        assert drawn(secret) != drawn(secret)


def test_a_collation_that_drops_a_record_is_refused(tmp_path: Any) -> None:
    module = Classifier(numbers(41), collate_fn=lambda samples: default_collate(samples[1:]))
    with pytest.raises(PrivacyError, match=r"collate_fn made a batch of \d+ records of \d+"):
        ts.Trainer(module, private(tmp_path, promise(noise_multiplier=1.0))).train()
