"""Numbers that a data set or `collate_fn` of a private run keeps are restored after each sample."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainstack.trainer.data.kept_numbers import KeptNumbers
from trainstack.trainer.data.loading import Fetcher

MARKED = torch.tensor([9.0, 1.0, 2.0])


class Keeps(Dataset[Any]):
    """Adds the largest value that it has seen to each sample; `largest` keeps it."""

    def __init__(self, largest: Callable[[float], float]) -> None:
        self.largest = largest

    def __len__(self) -> int:
        return len(MARKED)

    def __getitem__(self, index: int) -> Tensor:
        return MARKED[index] + self.largest(float(MARKED[index]))


class Attribute:
    kept: Any = 0.0

    def __call__(self, value: float) -> float:
        self.kept = max(self.kept, value)
        return float(self.kept)


class Slots:
    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept = 0.0

    __call__ = Attribute.__call__


class Buffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Buffer(torch.zeros(()))

    def forward(self, value: float) -> float:
        self.kept.clamp_(min=value)
        return float(self.kept)


class Missing:
    def __call__(self, value: float) -> float:
        self.kept = max(getattr(self, "kept", 0.0), value)
        return self.kept


def in_container(kept: Any, key: Any, value: float) -> float:
    kept[key] = max(kept[key], value)
    return float(kept[key])


def in_new_key(kept: dict[str, float], value: float) -> float:
    kept["largest"] = max(kept.get("largest", 0.0), value)
    return kept["largest"]


def in_items(kept: Any, value: float) -> float:
    kept.add(value) if isinstance(kept, set) else kept.append(value)
    return float(max(kept))


def in_closure() -> Callable[[float], float]:
    kept = 0.0

    def largest(value: float) -> float:
        nonlocal kept
        kept = max(kept, value)
        return kept

    return largest


def in_default(value: float, kept: list[float] = [0.0]) -> float:  # noqa: B006
    return in_container(kept, 0, value)


def in_keyword_default(value: float, *, kept: list[float] = [0.0]) -> float:  # noqa: B006
    return in_container(kept, 0, value)


def in_function_attribute() -> Callable[[float], float]:
    def largest(value: float) -> float:
        largest.kept = max(getattr(largest, "kept", 0.0), value)  # type: ignore[attr-defined]
        return float(largest.kept)  # type: ignore[attr-defined]

    return largest


def in_empty_cell() -> Callable[[float], float]:
    def largest(value: float) -> float:
        nonlocal kept
        try:
            kept = max(kept, value)
        except NameError:
            kept = value
        return kept

    if False:
        kept = 0.0
    return largest


class MethodDefault:
    def __call__(self, value: float, *, kept: list[float] = [0.0]) -> float:  # noqa: B006
        return in_container(kept, 0, value)


class ClassAttribute:
    @classmethod
    def largest(cls, value: float) -> float:
        cls.kept = max(getattr(cls, "kept", 0.0), value)  # type: ignore[attr-defined]
        return float(cls.kept)  # type: ignore[attr-defined]

    def __call__(self, value: float) -> float:
        return self.largest(value)


class DictWithAttribute(dict[str, float]):
    kept: Any = 0.0
    __call__ = Attribute.__call__


def of_library_object(value: float, *, holder: SimpleNamespace) -> float:
    return float(holder.largest(value))


def with_builtin_method(value: float, *, append: Callable[[float], None]) -> float:
    append(value)
    return float(max(append.__self__))  # type: ignore[attr-defined]


KEEPERS: dict[str, Callable[[], Callable[[float], float]]] = {
    "attribute": Attribute,
    "slot": Slots,
    "buffer": Buffer,
    "new attribute": Missing,
    "dict": lambda: partial(in_container, {"largest": 0.0}, "largest"),
    "new key": lambda: partial(in_new_key, {}),
    "list": lambda: partial(in_container, [0.0], 0),
    "array": lambda: partial(in_container, np.zeros(1), 0),
    "tensor": lambda: partial(in_container, torch.zeros(1), 0),
    "growing list": lambda: partial(in_items, [0.0]),
    "deque": lambda: partial(in_items, deque([0.0], maxlen=5)),
    "set": lambda: partial(in_items, {0.0}),
    "closure": in_closure,
    "default": lambda: in_default,
    "method": lambda: Attribute().__call__,
    "keyword default": lambda: in_keyword_default,
    "default of a method": MethodDefault,
    "function attribute": in_function_attribute,
    "empty cell": in_empty_cell,
    "class method": lambda: ClassAttribute.largest,
    "new class attribute": ClassAttribute,
    "attribute of a container": DictWithAttribute,
    "function in a library object": lambda: partial(of_library_object, holder=SimpleNamespace(largest=in_closure())),
    "method of a list": lambda: partial(with_builtin_method, append=[0.0].append),
}


@pytest.mark.parametrize("make", KEEPERS.values(), ids=KEEPERS)
def test_a_sample_does_not_depend_on_those_before(make: Callable[[], Callable[[float], float]]) -> None:
    fetcher = Fetcher(DataLoader(Keeps(make())), 0, one_by_one=True)
    for index in ([0, 1, 2], [2, 0, 1]):
        batch = fetcher.load(0, torch.tensor(index))
        assert torch.equal(batch, 2 * MARKED[index])


class SumsUp:
    """A `collate_fn` that adds the number of samples so far."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, samples: list[Tensor]) -> Tensor:
        self.seen += len(samples)
        return torch.stack(samples) + self.seen


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.processes)])
def test_a_batch_does_not_depend_on_those_before(workers: int) -> None:
    loader = DataLoader(Keeps(float), collate_fn=SumsUp(), num_workers=workers)
    fetcher = Fetcher(loader, 0, one_by_one=True)
    assert [list(batch) for batch in fetcher.batches(0, [torch.tensor([1]), torch.tensor([2])])] == [[3.0], [5.0]]


def adds_count(samples: list[Tensor], *, kept: list[int] = []) -> Tensor:  # noqa: B006
    kept.append(len(samples))
    return torch.stack(samples) + sum(kept)


def test_a_batch_does_not_depend_on_keyword_defaults() -> None:
    fetcher = Fetcher(DataLoader(Keeps(float), collate_fn=adds_count), 0, one_by_one=True)
    assert [fetcher.load(0, torch.tensor([1])).item() for _ in range(3)] == [3.0, 3.0, 3.0]


class Reuses(Dataset[Any]):
    """Gives all samples in the same memory."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def __getitem__(self, index: int) -> Any:
        self.memory[:] = float(MARKED[index])
        return self.memory


@pytest.mark.parametrize("memory", [torch.zeros(1), np.zeros(1)], ids=["tensor", "array"])
def test_samples_in_the_same_memory_keep_their_values(memory: Any) -> None:
    fetcher = Fetcher(DataLoader(Reuses(memory)), 0, one_by_one=True)
    assert fetcher.load(0, torch.tensor([0, 1, 2])).flatten().tolist() == MARKED.tolist()


class Opens:
    """Opens a file late, and caches its content."""

    def __init__(self) -> None:
        self.file: Any = None
        self.table: Any = None
        self.is_open, self.cache = False, dict[int, float]()

    def read(self) -> None:
        self.file, self.is_open, self.table = iter(()), True, np.zeros(1000)
        self.cache[3] = 4.0


def test_files_and_caches_are_not_restored() -> None:
    opens = Opens()
    kept = KeptNumbers(opens)
    opens.read()
    kept.restore(None)
    assert opens.is_open
    assert opens.file is not None
    assert opens.table is not None
    assert opens.cache == {3: 4.0}
