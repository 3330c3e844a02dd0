"""The library orders the data itself only where loader, samplers and datasets have torch's own methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset, TensorDataset
from torch.utils.data._utils.collate import default_collate_fn_map

import trainstack as ts
from tests.helpers.modules import arguments
from trainstack.trainer.data.loading import Fetcher
from trainstack.trainer.data.step_batches import unsupported_order_reason
from trainstack.trainer.data.torch_classes import draws_first_batch_alone

DATA = TensorDataset(torch.arange(6.0)[:, None], torch.zeros(6, 1))
METHODS = [
    name
    for name, item in vars(DataLoader).items()
    if (callable(item) or isinstance(item, property)) and name != "__init__"
]


def fetched(loader: DataLoader[Any], *, fast_paths: bool = True) -> list[Any]:
    """The first items of the batches that the library makes of `loader`."""
    return [
        batch[0].tolist() for batch in Fetcher(loader, 0, fast_paths=fast_paths).batches(0, torch.arange(4).split(2))
    ]


def seen_in(loader_class: Any, tmp_path: Path) -> list[float]:
    class Sees(ts.SupervisedModule):
        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            return loader_class(self.train_dataset, batch_size=batch_size)

        def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
            return loader_class(self.train_dataset, batch_size=batch_size)

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            seen.append(batch[0].item())
            return super().train_step(global_step, batch, device)

        val_step = train_step

    seen: list[float] = []
    module = Sees(torch.nn.Linear(1, 1), torch.nn.MSELoss(), "sgd", DATA)
    ts.Trainer(module, arguments(tmp_path, train_batch_size=1)).train()
    return seen


class Halves(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        return ([x / 2, y] for x, y in super()._get_iterator())


def test_a_custom_iterator_of_a_loader_is_used(tmp_path: Path) -> None:
    assert seen_in(Halves, tmp_path) == 2 * [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("place", ["subclass", "object", "class"])
def test_a_loader_with_a_replaced_method_keeps_its_order(
    name: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = vars(DataLoader)[name]
    other: Any = property(usual.fget, usual.fset) if isinstance(usual, property) else lambda *args: usual(*args)
    kind = type("Mine", (DataLoader,), {name: other} if place == "subclass" else {})
    loader = kind(DATA, batch_size=2)
    assert (unsupported_order_reason(loader) is not None) == (place == "subclass")
    if place == "object":
        vars(loader)[name] = other
    if place == "class":
        monkeypatch.setattr(DataLoader, name, other)
    assert f"has its own {name}" in (unsupported_order_reason(loader) or "")


def test_a_subclass_with_additional_methods_is_ordered() -> None:
    class Named(DataLoader[Any]):
        def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.name = name

        def describe(self) -> str:
            return self.name

    assert unsupported_order_reason(Named("mine", DATA, batch_size=2)) is None


@pytest.mark.parametrize("kind", [RandomSampler, BatchSampler])
def test_a_patched_sampler_keeps_its_order(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(DATA, batch_size=2, shuffle=True)
    assert unsupported_order_reason(loader) is None
    usual = kind.__iter__  # type: ignore[attr-defined]
    monkeypatch.setattr(kind, "__iter__", lambda self: usual(self))
    assert unsupported_order_reason(loader) is not None


DTYPES = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
INDICES: dict[str, Any] = {
    **{f"numpy {dtype.__name__}": np.array([5, 3, 3, -1 % 6], dtype=dtype) for dtype in DTYPES},
    **{f"torch {dtype}": torch.tensor([5, 3, 3, 1], dtype=dtype) for dtype in (torch.int8, torch.int32, torch.int64)},
    "torch uint8, a mask": torch.tensor([1, 0, 1, 1], dtype=torch.uint8),
    "numpy bool": np.array([True, False, True, True]),
    "list": [5, 3, 3, -1],
    "list of numpy": list(np.array([5, 3, 3, 1], dtype=np.uint8)),
    "list with a bool": [5, True, 3, 1],
    "tuple": (5, 3, 3, 1),
    "range": range(5, 1, -1),
    "numpy, 2 dimensions": np.array([[5], [3], [3], [1]]),
}


@pytest.mark.parametrize("name", INDICES)
def test_a_subset_gives_the_samples_of_a_dataloader(name: str) -> None:
    outer = Subset(Subset(DATA, INDICES[name]), [3, 1, 0, 2])
    loader = DataLoader(outer, batch_size=2)
    try:
        expected = [batch[0].tolist() for batch in loader]
    except Exception as error:
        with pytest.raises(type(error)):
            fetched(loader)
        return
    assert fetched(loader) == fetched(loader, fast_paths=False) == expected


@pytest.mark.parametrize("kind", [TensorDataset, Subset])
@pytest.mark.parametrize("name", ["__getitem__", "__getitems__"])
@pytest.mark.parametrize("place", ["object", "class"])
def test_a_patched_method_of_a_dataset_is_called(
    kind: type, name: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = DATA if kind is TensorDataset else Subset(DATA, range(4))
    called = []

    def patched(*args: Any) -> Any:
        called.append(name)
        indices = args[-1] if isinstance(args[-1], list) else [args[-1]]
        rows = [(DATA.tensors[0][index] + 10, DATA.tensors[1][index]) for index in indices]
        return rows if name == "__getitems__" else rows[0]

    if place == "class":
        monkeypatch.setattr(kind, name, patched, raising=False)
    else:
        monkeypatch.setitem(vars(dataset), name, patched)
    loader = DataLoader(dataset, batch_size=2)  # type: ignore[arg-type]
    expected = [batch[0].tolist() for batch in loader][:2]
    was_called = bool(called)
    called.clear()
    assert fetched(loader) == expected
    assert bool(called) is was_called


@pytest.mark.parametrize("registered", [Tensor, tuple, (tuple, list)])
def test_a_collate_function_registered_with_torch_is_used(registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(samples: Any, *, collate_fn_map: Any = None) -> Any:
        if isinstance(samples[0], Tensor):
            return 2 * torch.stack(list(samples))
        return [2 * torch.stack([sample[field] for sample in samples]) for field in (0, 1)]

    loader = DataLoader(DATA, batch_size=2)
    assert fetched(loader) == [[[0.0], [1.0]], [[2.0], [3.0]]]
    monkeypatch.setitem(default_collate_fn_map, registered, doubled)  # type: ignore[arg-type]
    assert fetched(loader) == [[[0.0], [2.0]], [[4.0], [6.0]]]


def test_loaders_that_may_draw_with_each_batch_are_recognized() -> None:
    class Drawing(BatchSampler):
        pass

    batches: Any = [(torch.zeros(2, 1), torch.zeros(2, 1))] * 3
    own, samples = RandomSampler(DATA, generator=torch.default_generator), list(DATA)
    drawing = DataLoader(DATA, batch_sampler=Drawing(range(6), 2, False))

    assert draws_first_batch_alone(batches)
    assert draws_first_batch_alone(DataLoader(batches, batch_size=None, shuffle=True))
    assert draws_first_batch_alone(DataLoader(DATA, batch_size=2, shuffle=True))
    assert draws_first_batch_alone(DataLoader(Subset(DATA, range(4)), batch_size=2, num_workers=1))
    assert not draws_first_batch_alone(iter(batches))
    assert not draws_first_batch_alone(DataLoader(Subset(DATA, range(4)), batch_size=2))  # of a user's dataset
    assert not draws_first_batch_alone(DataLoader(samples, batch_size=2))  # type: ignore[arg-type]
    assert not draws_first_batch_alone(DataLoader(DATA, batch_size=2, collate_fn=lambda rows: rows))
    assert not draws_first_batch_alone(DataLoader(DATA, batch_size=2, sampler=own))
    assert not draws_first_batch_alone(drawing)
