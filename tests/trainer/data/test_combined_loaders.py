"""Several training loaders in one step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler

import trainstack as ts
from tests.helpers.processes import run_world
from tests.helpers.workers.token_data import Sequences, Stream, pad, run, several
from trainstack.trainer.data.library_orders import CombinedOrder


def names(step: list[list[Any]]) -> dict[str, list[int]]:
    return {name: [index for key, index in step if key == name] for name in ("one", "two")}


def loaders(first: int, second: int, times: int = 1) -> Any:
    def make(sampler: Any, size: int) -> Any:
        one, two = Sequences(first), Sequences(second, begin=100)
        return {
            "one": DataLoader(one, size, sampler=sampler(one), collate_fn=pad),
            "two": DataLoader(two, times * size, sampler=sampler(two), collate_fn=pad),
        }

    return make


@pytest.mark.parametrize(("mode", "steps"), [("min", 4), ("max", 6), ("cycle", 6)])
def test_the_mode_determines_the_loader_that_ends_an_epoch(mode: str, steps: int, tmp_path: Path) -> None:
    result = several(directory=str(tmp_path), combine_loaders=mode, epochs=1)
    parts = [names(step) for step in result["seen"]]
    ones, twos = ([index for part in parts for index in part[name]] for name in ("one", "two"))

    assert result["plan"]["steps_per_epoch"] == len(parts) == steps
    assert len(set(ones)) == len(ones) == (27 if mode == "min" else 45)
    if mode == "cycle":
        assert len(twos) == 45
        assert {twos.count(index) for index in range(100, 127)} == {1, 2}
        assert all(len(part["one"]) == len(part["two"]) for part in parts)
    elif mode == "max":  # whole global batches only
        assert len(set(twos)) == len(twos) == 24
        assert [len(part["two"]) for part in parts[3:]] == [0, 0, 0]
    else:
        assert set(twos) == set(range(100, 127))


def test_the_first_loader_keeps_its_separate_order(tmp_path: Path) -> None:
    def alone(sampler: Any, size: int) -> Any:
        return DataLoader(Sequences(), size, sampler=sampler(Sequences()), collate_fn=pad)

    combined = several(directory=str(tmp_path))
    assert [names(step)["one"] for step in combined["seen"]] == [
        [index for _, index in step] for step in run(alone, directory=str(tmp_path))["seen"]
    ]


@pytest.mark.parametrize("mode", ["min", "max", "cycle"])
@pytest.mark.parametrize("limit", [1, 3])
def test_global_batches_do_not_depend_on_micro_batches(mode: str, limit: int, tmp_path: Path) -> None:
    options = {"directory": str(tmp_path), "combine_loaders": mode, "grouped": mode == "cycle"}
    assert several(gpu_batch_size_limit=limit, **options)["seen"] == several(**options)["seen"]


@pytest.mark.processes
def test_workers_load_the_same_batches(tmp_path: Path) -> None:
    assert several(directory=str(tmp_path), workers=2) == several(directory=str(tmp_path))


def losses(limit: int | None, backend: str = "sp") -> list[float]:
    """Weights after two epochs with a loss that is a mean over samples of both loaders."""

    class Means(ts.ModuleInterface):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(1, 1, dtype=torch.float64)
            torch.nn.init.ones_(self.net.weight), torch.nn.init.zeros_(self.net.bias)

        def get_optimizers_schedulers(self, *_: Any) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01), None

        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            one, two = (torch.arange(count, dtype=torch.float64)[:, None] / 40 for count in (45, 54))
            return {
                "one": DataLoader(one, batch_size, sampler=sampler(one)),  # type: ignore[arg-type]
                "two": DataLoader(two, 2 * batch_size, sampler=sampler(two)),  # type: ignore[arg-type]
            }

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return self.net(batch["one"]).pow(2).mean() + (self.net(batch["two"]) - 1).pow(2).mean()

    from tests.helpers.modules import arguments, weights

    module = Means()
    options = {"train_batch_size": 8, "gpu_batch_size_limit": limit, "combine_loaders": "cycle", "epochs": 2}
    ts.Trainer(module, arguments("unused", clip_grads=False, backend=backend, **options)).train()
    return weights(module).tolist()


@pytest.mark.distributed
def test_every_split_gives_the_gradient_of_the_whole_batch() -> None:
    whole = losses(None)

    assert np.allclose(losses(1), whole, rtol=0, atol=1e-12)
    for rank in run_world(2, losses, limit=3, backend="ddp"):
        assert np.allclose(rank, whole, rtol=0, atol=1e-12)


@pytest.mark.distributed
def test_ranks_share_the_batches_of_each_loader(tmp_path: Path) -> None:
    one = several(directory=str(tmp_path))
    ranks = run_world(2, several, backend="ddp")

    assert [sorted(a + b) for a, b in zip(*(rank["seen"] for rank in ranks), strict=True)] == one["seen"]


@pytest.mark.parametrize("mode", ["min", "cycle"])
def test_a_run_resumes_within_an_epoch(mode: str, tmp_path: Path) -> None:
    whole = several(directory=str(tmp_path / "whole"), combine_loaders=mode)
    options = {"directory": str(tmp_path), "every_step": 1, "combine_loaders": mode}
    begun, rest = several(stop_at=7, **options), several(resume=True, **options)

    assert rest["first"] == 7
    assert begun["seen"] + rest["seen"] == whole["seen"]
    assert rest["weights"] == whole["weights"]
    options["directory"] = str(tmp_path / "other")
    several(stop_at=3, **options)
    with pytest.raises(ts.CheckpointMismatchError, match="came 'one' with 45 samples shuffled"):
        several(resume=True, **options, grouped=True)


def test_a_loader_may_have_a_multiple_of_the_batch_size(tmp_path: Path) -> None:
    result = run(loaders(20, 60, times=3), directory=str(tmp_path), gpu_batch_size_limit=4)
    parts = [names(step) for step in result["seen"]]

    assert [(len(part["one"]), len(part["two"])) for part in parts] == 2 * [(8, 24), (8, 24), (4, 12)]
    assert sorted(index for part in parts[:3] for index in part["two"]) == list(range(100, 160))


def streams(first: int, second: int) -> Any:
    def make(sampler: Any, size: int) -> Any:
        two = Sequences(second, begin=100)
        return {
            "one": DataLoader(Stream(first, first), size, collate_fn=pad),
            "two": DataLoader(two, size, sampler=SequentialSampler(two), collate_fn=pad),
        }

    return make


@pytest.mark.parametrize(("mode", "counts"), [("min", [16, 16]), ("max", [40, 16]), ("cycle", [40, 40])])
def test_streams_are_combined_batch_by_batch(mode: str, counts: list[int], tmp_path: Path) -> None:
    result = run(streams(40, 16), directory=str(tmp_path), combine_loaders=mode, epochs=1)
    parts = [names(step) for step in result["seen"]]

    assert [sum(len(part[name]) for part in parts) for name in ("one", "two")] == counts
    assert result["plan"]["steps_per_epoch"] == len(parts)


def test_loaders_that_cannot_be_combined_are_refused(tmp_path: Path) -> None:
    directory = str(tmp_path)
    with pytest.raises(ts.ConfigurationError, match=r"different lengths .*combine_loaders='min'"):
        run(loaders(20, 30), directory=directory)
    with pytest.raises(ts.ConfigurationError, match=r"custom order.*combine_loaders='min'"):
        run(streams(20, 20), directory=directory)
    with pytest.raises(ts.ConfigurationError, match="too few samples for one global step"):
        run(loaders(20, 3), directory=directory, combine_loaders="max")
    with pytest.raises(ts.ConfigurationError, match="private run draws its records from one data set"):
        several("sp-dp", directory=directory)
    with pytest.raises(ts.ConfigurationError, match="overfit_batches is for one data set"):
        several(overfit_batches=1, directory=directory)
    with pytest.raises(ts.ConfigurationError, match="combine_loaders='longest'"):
        several(combine_loaders="longest", directory=directory)
    with pytest.raises(ts.ModuleContractError, match=r"has batch_size=5. Write batch_size=batch_size"):
        run(lambda _, size: {"one": DataLoader(Sequences(), 5, collate_fn=pad)}, directory=directory)
    with pytest.raises(ts.ModuleContractError, match=r"returned a list of loaders. Return one loader, or a dict"):
        run(lambda _, size: [DataLoader(Sequences(), size)], directory=directory)
    with pytest.raises(ts.ModuleContractError, match="a dict with a int for the key 'one'"):
        run(lambda *_: {"one": 1}, directory=directory)
    with pytest.raises(ts.ModuleContractError, match="an empty dict"):
        run(lambda *_: {}, directory=directory)


def test_the_sampler_of_a_combined_loader_gives_each_position() -> None:
    order = CombinedOrder(range(3), "two loaders")
    assert (list(order), len(order), order.describe()) == ([0, 1, 2], 3, "two loaders")
