"""Generators that a dataset, a transform or a collate_fn holds are seeded for each sample."""

from __future__ import annotations

import random
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    default_collate,
    get_worker_info,
)

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, weights
from trainstack.backends.generator_search import find_generators
from trainstack.trainer.data.own_generators import own_generators

GLOBAL = np.random.default_rng(5)


class Jitter:
    """A transform with generators of four kinds; with `picklable` without the one that cannot be sent to a worker."""

    def __init__(self, picklable: bool = False) -> None:
        self.kinds: dict[str, Any] = {"numpy": np.random.default_rng(0), "python": random.Random(1)}
        self.old = np.random.RandomState(2)
        self.torch = None if picklable else torch.Generator().manual_seed(3)  # torch 2.13.0 cannot send it to a spawn

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        drawn = self.kinds["numpy"].normal() + self.kinds["python"].random() + self.old.rand() + GLOBAL.random()
        drawn += 0.0 if self.torch is None else float(torch.rand((), generator=self.torch))
        return inputs + 0.1 * float(drawn)


class Augmented(Dataset[Any]):
    def __init__(self, *transforms: Any, count: int = 24) -> None:
        self.base, self.transforms = numbers(count), list(transforms)

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> Any:
        inputs, label = self.base[index]
        for transform in self.transforms:
            inputs = transform(inputs)
        return inputs, label


class Mixup:
    """A `collate_fn` with a generator, either that of the dataset or a separate one."""

    def __init__(self, rng: Any = None) -> None:
        self.rng = np.random.default_rng(9) if rng is None else rng

    def __call__(self, samples: Any) -> Any:
        inputs, labels = default_collate(samples)
        return inputs * float(self.rng.uniform(0.5, 1.5)), labels


def set_up(worker: int) -> None:
    """Give the worker's dataset a generator that depends on the worker."""
    get_worker_info().dataset.transforms[0].kinds["numpy"] = np.random.default_rng(worker)  # type: ignore[union-attr]


def wrapped(kind: str, data: Dataset[Any]) -> Any:
    if kind == "subset":
        return Subset(data, list(range(20)))
    if kind == "concat":
        return ConcatDataset([data, Augmented(Jitter(), count=5)])
    return data


def trained(directory: Path, dataset: Any, stop_at: int | None = None, **loader: Any) -> torch.Tensor:
    class Stops(Classifier):
        def on_end_train_step(self, global_step: int) -> None:
            if global_step == stop_at:
                raise InterruptedError

    module = Stops(dataset, **loader)
    saving = ts.DefaultCheckpointerArguments(every_n_steps=1, checkpoint=stop_at is not None)
    args = arguments(directory, epochs=2, checkpointer_args=saving, resume="auto")
    trainer = ts.Trainer(module, args)
    try:
        trainer.train()
    except InterruptedError:
        return trained(directory, again(dataset), **loader)
    finally:
        trainer.close()
    return weights(module)


def again(dataset: Any) -> Any:
    """The dataset as a new process creates it."""
    return type(dataset)(Jitter()) if isinstance(dataset, Augmented) else dataset


@pytest.mark.parametrize("kind", ["plain", "subset", "concat", "shared", "collate"])
@pytest.mark.processes
def test_workers_and_resumes_do_not_change_random_samples(kind: str, tmp_path: Path) -> None:
    found = []
    for number, workers in enumerate((0, 2)):
        jitter = Jitter()
        options: dict[str, Any] = {"num_workers": workers}
        if kind in ("shared", "collate"):
            options["collate_fn"] = Mixup(jitter.kinds["numpy"] if kind == "shared" else None)
        found.append(trained(tmp_path / str(number), wrapped(kind, Augmented(jitter)), **options).tolist())
    stopped = trained(
        tmp_path / "stopped", wrapped(kind, Augmented(Jitter())), stop_at=4, **{**options, "num_workers": 0}
    )

    assert found[0] == found[1]
    assert kind in ("concat", "shared") or stopped.tolist() == found[0]


@pytest.mark.processes
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 4},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 2, "worker_init_fn": set_up},
        pytest.param({"num_workers": 2, "multiprocessing_context": "spawn"}, marks=pytest.mark.long),
    ],
    ids=["four", "persistent", "worker_init_fn", "spawn"],
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_options_of_workers_do_not_change_random_samples(options: Any, tmp_path: Path) -> None:
    plain = trained(tmp_path, Augmented(Jitter(picklable=True)), collate_fn=Mixup())

    assert (
        trained(tmp_path, Augmented(Jitter(picklable=True)), collate_fn=Mixup(), **options).tolist() == plain.tolist()
    )


def test_generators_of_this_process_keep_their_states(tmp_path: Path) -> None:
    jitter = Jitter()
    before = [jitter.kinds["numpy"].bit_generator.state, jitter.kinds["python"].getstate(), GLOBAL.bit_generator.state]
    trained(tmp_path, Augmented(jitter))

    assert before == [
        jitter.kinds["numpy"].bit_generator.state,
        jitter.kinds["python"].getstate(),
        GLOBAL.bit_generator.state,
    ]


def test_samples_and_epochs_draw_different_numbers(tmp_path: Path) -> None:
    drawn = []

    class Notes(Jitter):
        def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
            drawn.append((self.kinds["numpy"].random(), self.kinds["python"].random(), self.old.rand()))
            return inputs

    trained(tmp_path, Augmented(Notes()))

    assert len(drawn) >= 48
    assert len({number for numbers in drawn[-48:] for number in numbers}) == 3 * 48


def test_generators_that_cannot_be_seeded_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    jitter = Jitter()
    jitter.kinds["system"] = random.SystemRandom()
    trained(tmp_path, Augmented(jitter))

    assert "train_dataset.transforms[0].kinds['system'] cannot be seeded" in caplog.text


def test_generators_are_found_where_users_keep_them() -> None:
    rng = np.random.default_rng(0)

    class Slots:
        __slots__ = ("rng",)

        def __init__(self) -> None:
            self.rng = np.random.default_rng(1)

    class OfClass:
        rng = random.Random(0)

    def closed(value: Any) -> Any:
        return rng.normal() + value

    def named() -> float:
        return float(GLOBAL.random())

    def paths(owner: Any) -> list[str]:
        return list(find_generators(owner=owner).by_path)

    assert paths([Slots()]) == ["owner[0].rng"]
    assert paths(OfClass()) == ["owner.rng"]
    assert paths(closed) == ["owner(rng)"]
    assert paths(named) == ["global GLOBAL"]
    assert len(paths(partial(closed, rng))) == 1
    assert len(paths(Jitter().__call__)) == 5
    assert paths({"a": [1, "text", torch.ones(2), np.ones(2), random, np.random, torch.default_generator]}) == []
    cycle: list[Any] = [rng]
    cycle.append(cycle)
    assert paths(cycle) == ["owner[0]"]


def test_only_a_loader_of_the_user_is_searched_itself() -> None:
    loader = SimpleNamespace(dataset=[1.0, 2.0], rng=random.Random(1))

    assert list(own_generators(loader).search().by_path) == ["loader.rng"]
    assert not own_generators(DataLoader(numbers(4), generator=torch.Generator())).search().by_path


class Holder:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


IN_DICT, IN_LIST = {"rng": random.Random(1)}, [np.random.default_rng(2)]
IN_OBJECT = Holder(torch.Generator())


def test_generators_in_global_containers_and_objects_are_found() -> None:
    def named() -> float:
        return IN_DICT["rng"].random() + IN_LIST[0].random() + float(torch.rand((), generator=IN_OBJECT.inner))

    assert list(find_generators(owner=named).by_path) == [
        "global IN_DICT['rng']",
        "global IN_LIST[0]",
        "global IN_OBJECT.inner",
    ]


def test_objects_that_are_not_searched_completely_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def unsearched(owner: Any) -> list[str]:
        return find_generators(owner=owner).unsearched

    deep = Holder(random.Random(0))
    for _ in range(9):
        deep = Holder(deep)
    assert unsearched({"many": [random.Random(n) for n in range(101)]}) == ["owner['many']"]
    assert unsearched(deep) == ["owner" + 8 * ".inner"]
    assert len(unsearched([[Holder(n) for n in range(100)] for _ in range(100)])) > 0
    assert unsearched(Holder([(f"{n}.png", n) for n in range(500)])) == []
    assert unsearched([random.Random(n) for n in range(100)]) == []

    data = Augmented(Jitter())
    trained(tmp_path / "one", data)
    assert "to be searched completely" not in caplog.text
    data.transforms += [Jitter() for _ in range(100)]
    _ = ts.Trainer(Classifier(data), arguments(tmp_path / "two")).plan
    assert "train_dataset.transforms: too large or too deep to be searched completely" in caplog.text


class Drawn(IterableDataset[Any]):
    def __init__(self) -> None:
        self.base, self.rng = numbers(24), np.random.default_rng(0)

    def __iter__(self) -> Any:
        for index in self.rng.permutation(24).tolist():
            inputs, label = self.base[index]
            yield inputs + float(self.rng.normal()), label


class Streams(Classifier):
    """A loader with a custom order, from a generator that exists as long as the module."""

    def __init__(self, kind: str, stop_at: int | None) -> None:
        super().__init__(Drawn() if kind == "iterable" else numbers(24))
        self.kind, self.stop_at, self.inputs = kind, stop_at, list[list[float]]()
        self.sampler = None if kind == "iterable" else Shuffled(self.dataset)

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.dataset, batch_size=batch_size, sampler=self.sampler)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        if global_step == self.stop_at:
            raise InterruptedError
        self.inputs.append(batch[0][:, 0].tolist())
        return super().train_step(global_step, batch, device)


class Shuffled(RandomSampler):
    def __init__(self, data: Any) -> None:
        super().__init__(data, replacement=True, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["iterable", "sampler"])
def test_a_loader_with_custom_order_is_seeded_each_epoch(kind: str, tmp_path: Path) -> None:
    seen = []
    for stops in ((None,), (3, 6, None)):
        inputs: list[list[float]] = []
        for stop_at in stops:
            module = Streams(kind, stop_at)
            saving = ts.DefaultCheckpointerArguments(every_n_steps=1)
            args = arguments(tmp_path / str(len(stops)), epochs=3, checkpointer_args=saving, resume="auto")
            with suppress(InterruptedError):
                ts.Trainer(module, args).train()
            inputs += module.inputs
        seen.append(inputs)

    assert seen[0] == seen[1]
    assert seen[0][:3] != seen[0][3:6]


class Staged(Augmented):
    """Scales its samples by the epoch of `set_epoch`."""

    scale = 1.0

    def set_epoch(self, epoch: int) -> None:
        self.scale = 1.0 + epoch

    def __getitem__(self, index: int) -> Any:
        inputs, label = super().__getitem__(index)
        return inputs * self.scale, label


@pytest.mark.processes
def test_persistent_workers_get_each_epoch(tmp_path: Path) -> None:
    plain = trained(tmp_path, Staged())

    for options in ({"num_workers": 1}, {"num_workers": 2, "persistent_workers": True}):
        assert trained(tmp_path, Subset(Staged(), range(24)), **options).tolist() == plain.tolist()
