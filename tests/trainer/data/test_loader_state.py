"""A loader with a state continues from it; a resume that cannot be exact is reported."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler

import trainstack as ts
from tests.helpers.modules import Classifier, Noisy, arguments, numbers, weights
from trainstack.backends import World
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.data.loader_state import LoaderState

# torchdata 0.11 calls a function that torch 2.13 deprecates, in each constructor of StatefulDataLoader
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

EVERY_STEP = ts.DefaultCheckpointerArguments(every_n_steps=1)


class Reads(Classifier):
    """Trains on the batches of its loader, records each batch, and is interrupted before the step `stop_at`."""

    def __init__(self, make: Any, *, lasting: bool = False, stop_at: int | None = None) -> None:
        super().__init__(numbers(41), dropout=0.2)
        self.make, self.lasting, self.stop_at = make, lasting, stop_at
        self.made: Any = None
        self.seen: dict[int, list[float]] = {}

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        if self.made is None or not self.lasting:
            self.made = self.make(self.dataset, sampler, batch_size)
        return self.made

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        if global_step == self.stop_at:
            raise KeyboardInterrupt
        self.seen.setdefault(global_step, []).extend(batch[0][:, 0].tolist())
        return super().train_step(global_step, batch, device)


def run(module: Reads, directory: Path, **changes: Any) -> ts.Trainer:
    ts.seed_everything(1)
    values = {"epochs": 3, "checkpointer_args": EVERY_STEP, "resume": "auto", "gpu_batch_size_limit": 4, **changes}
    trainer = ts.Trainer(module, arguments(directory, **values))
    trainer.train()
    return trainer


def unbroken_and_interrupted(make: Any, directory: Path, stops: tuple[int, ...], **changes: Any) -> tuple[Any, Any]:
    """Batches and final weights of two runs: one unbroken, one interrupted before each of the steps `stops`."""
    lasting = changes.pop("lasting", False)
    whole = Reads(make, lasting=lasting)
    run(whole, directory / "whole", **changes)
    seen: dict[int, list[float]] = {}
    for stop_at in (*stops, None):
        module = Reads(make, lasting=lasting, stop_at=stop_at)
        with suppress(KeyboardInterrupt):
            run(module, directory / "cut", **changes)
        seen |= module.seen
    return (whole.seen, weights(whole)), (seen, weights(module))


def agree(one: tuple[Any, torch.Tensor], other: tuple[Any, torch.Tensor]) -> bool:
    return one[0] == other[0] and torch.equal(one[1], other[1])


def shuffled(workers: int) -> Any:
    return lambda data, sampler, size: StatefulDataLoader(data, batch_size=size, shuffle=True, num_workers=workers)


def given_sampler(data: Any, sampler: Any, size: int) -> Any:
    return StatefulDataLoader(data, batch_size=size, sampler=sampler(data))


def given_sampler_and_workers(data: Any, sampler: Any, size: int) -> Any:
    return StatefulDataLoader(data, batch_size=size, sampler=sampler(data), num_workers=2)


def own_generator(data: Any, sampler: Any, size: int) -> Any:
    generator = torch.Generator().manual_seed(3)
    return StatefulDataLoader(data, batch_size=size, sampler=StatefulRandomSampler(data, generator=generator))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("stops", "lasting"),
    [
        ((2, 4, 7), True),
        ((9, 13), False),
        pytest.param((2, 4, 7), False, marks=pytest.mark.long),
        pytest.param((9, 13), True, marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [shuffled(0), given_sampler, own_generator], ids=["shuffle", "sampler", "generator"])
def test_an_interrupted_run_reads_and_ends_as_an_unbroken_one(
    stops: tuple[int, ...], make: Any, lasting: bool, tmp_path: Path
) -> None:
    """6 steps an epoch: twice within the first, at the ends of two, and within the second."""
    assert agree(*unbroken_and_interrupted(make, tmp_path, stops, lasting=lasting))


@pytest.mark.slow
@pytest.mark.parametrize("lasting", [False, True])
def test_augmentation_in_this_process_is_the_same_after_a_resume(lasting: bool, tmp_path: Path) -> None:
    def augmented(data: Any, sampler: Any, size: int) -> Any:
        return StatefulDataLoader(Noisy(), batch_size=size, shuffle=True)

    assert agree(*unbroken_and_interrupted(augmented, tmp_path, (3, 7, 10), lasting=lasting))


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "lasting"),
    [(shuffled(2), False), (shuffled(2), True), (given_sampler_and_workers, True)],
    ids=["made again", "lasting", "lasting, with a sampler"],
)
def test_prefetching_workers_do_not_change_the_position(make: Any, lasting: bool, tmp_path: Path) -> None:
    assert agree(*unbroken_and_interrupted(make, tmp_path, (3, 7, 10), lasting=lasting))


@pytest.mark.slow
@pytest.mark.parametrize("stops", [(5,), (6,)], ids=str)
def test_a_capped_epoch_does_not_continue_into_the_next(stops: tuple[int, ...], tmp_path: Path) -> None:
    """A cap of 4 steps: the epochs begin with the steps 1, 5 and 9."""
    for lasting in (False, True):
        changes = {"max_train_steps_per_epoch": 4, "lasting": lasting}
        assert agree(*unbroken_and_interrupted(own_generator, tmp_path / str(lasting), stops, **changes))


class Stream:
    """A loader of another class: batches from a stream, with the position in the stream as its state."""

    reads = 0

    def __init__(self, data: Any, size: int) -> None:
        self.data, self.size, self.place = data, size, 0

    def __iter__(self) -> Any:
        while self.place < len(self.data):
            begin, self.place = self.place, self.place + self.size
            Stream.reads += 1
            yield self.data[begin : self.place]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize("finished", [1, 4])
def test_a_custom_loader_with_a_state_skips_without_reading(
    finished: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make(data: Any, sampler: Any, size: int) -> Stream:
        return Stream(data, size)

    with pytest.raises(KeyboardInterrupt):
        run(Reads(make, stop_at=finished + 1), tmp_path, epochs=1)
    Stream.reads = 0
    run(Reads(make), tmp_path, epochs=1)

    assert Stream.reads == 11 - 2 * finished
    assert "it is a Stream, not a DataLoader" in caplog.text
    assert "Its state is saved in each checkpoint, and restored in a resume." in caplog.text


def test_a_loader_without_a_state_reads_and_drops_batches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Numbers(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(list(numbers(41)))

    def make(data: Any, sampler: Any, size: int) -> Any:
        return torch.utils.data.DataLoader(Numbers(), batch_size=size)

    assert agree(*unbroken_and_interrupted(make, tmp_path, (3,)))
    assert "The first 4 batches of this epoch are read and skipped" in caplog.text


@pytest.mark.processes
@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 1)])
@pytest.mark.slow
def test_another_number_of_workers_is_refused_with_the_reason(before: int, after: int, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(Reads(shuffled(before), stop_at=3), tmp_path)

    with pytest.raises(
        ts.CheckpointMismatchError,
        match=rf"a StatefulDataLoader, does not load its state.*the same number of workers \(num_workers={after} ",
    ):
        run(Reads(shuffled(after)), tmp_path)


@pytest.mark.processes
def test_missing_parts_of_a_loaders_state_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def torchs_own(data: Any, sampler: Any, size: int) -> Any:
        chosen = RandomSampler(data, generator=torch.Generator().manual_seed(1))
        return StatefulDataLoader(data, batch_size=size, sampler=chosen)

    caplog.set_level(logging.WARNING, "trainstack")
    run(Reads(torchs_own), tmp_path / "a", epochs=1)
    assert "after the first epoch the order would differ. Use torchdata.stateful" in caplog.text
    caplog.clear()
    run(Reads(shuffled(2)), tmp_path / "b", epochs=1)
    assert "Random numbers of its workers are not in the state." in caplog.text
    assert "RandomSampler" not in caplog.text


def test_states_of_split_loaders_need_the_same_world_size() -> None:
    states: list[Any] = [{"loader": {}}, {"loader": {}}]
    split, same = (LoaderState(RunLogger(), split_by_rank=whether) for whether in (True, False))
    same.restore(states, World())

    assert same.is_pending
    with pytest.raises(ts.CheckpointMismatchError, match="the states of 2 loaders, each with a part of the data"):
        split.restore(states, World())
