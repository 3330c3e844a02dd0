"""The search for generators reaches the same ones from a module and from a dataset, ends, and runs no code."""

from __future__ import annotations

import ast
import functools
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from tests.helpers.patience import patience
from trainstack.backends import generator_search
from trainstack.backends.generator_search import find_generators
from trainstack.trainer.data.own_generators import own_generators
from trainstack.trainer.resume.module_generators import get_generator_states


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


class Samples(Box):
    def __len__(self) -> int:
        return 1


class Boxes:
    __slots__ = ("__private", "empty", "value")

    def __init__(self, value: Any) -> None:
        self.__private = value


@dataclass
class Record:
    value: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    value: Any


class OfClass:
    by_name: ClassVar[dict[str, Any]] = {"rng": random.Random(6)}
    rng = np.random.RandomState(7)

    @staticmethod
    def draw() -> float:
        return draw_from(AUGMENTATION.value)

    @property
    def drawn(self) -> float:
        return NEARBY.random()


class Net(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Identity())
        self.inner[0].value = value


NEARBY, AUGMENTATION, INDIRECT = random.Random(8), Frozen(random.Random(10)), np.random.default_rng(9)


def draw_from(rng: Any) -> float:
    return float(INDIRECT.random())


def local_of(value: Any) -> Any:
    local = threading.local()
    local.value = value
    return local


def decorated(value: Any) -> Any:
    def draw() -> None: ...

    draw.rng = value  # type: ignore[attr-defined]
    return functools.wraps(draw)(functools.lru_cache(draw))


def hooked(value: Any) -> nn.Module:
    module = nn.Identity()
    module.register_forward_hook(lambda *_: value)
    return module


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "attribute": Box,
    "slots": Boxes,
    "dict": lambda rng: {"a": {1: rng}},
    "key": lambda rng: {torch.ones(2): rng},
    "list": lambda rng: [0, [rng]],
    "tuple": lambda rng: ("a", (rng,)),
    "set": lambda rng: {"a", 1, rng},
    "frozenset": lambda rng: frozenset({Frozen("a"), rng}) - {Frozen("a")},
    "deque": lambda rng: deque([0, rng]),
    "ordered": lambda rng: OrderedDict(a=rng),
    "default": lambda rng: defaultdict(list, a=[rng]),
    "user dict": lambda rng: UserDict(a=rng),
    "proxy": lambda rng: MappingProxyType({"a": rng}),
    "dataclass": Record,
    "frozen": Frozen,
    "namespace": lambda rng: SimpleNamespace(rng=rng),
    "partial": lambda rng: functools.partial(print, 1, a=[rng]),
    "partial of": lambda rng: functools.partial(lambda: rng),
    "closure": lambda rng: lambda: rng,
    "default of a lambda": lambda rng: lambda value=rng: value,
    "keyword": lambda rng: lambda *, value=rng: value,
    "function": decorated,
    "method": lambda rng: Box(rng).__init__,  # type: ignore[misc]
    "method of it": lambda rng: rng.seed if isinstance(rng, random.Random | np.random.RandomState) else [rng],
    "module": Net,
    "hidden module": lambda rng: (Net(rng),),
    "module list": lambda rng: nn.ModuleList([*map(Net, range(200)), Net(rng)]),
    "hook": hooked,
    "thread": local_of,
    "subset": lambda rng: Subset(Box(rng), [0]),  # type: ignore[arg-type]
}
MADE = (torch.Generator, np.random.default_rng, np.random.RandomState, random.Random)


@pytest.mark.parametrize("holder", HOLDERS)
def test_module_and_dataset_reach_the_same_generators(holder: str) -> None:
    for make in MADE:
        check_both_reach(holder, make())


def check_both_reach(holder: str, rng: Any) -> None:
    held = [HOLDERS[holder](rng)] * 2
    module, dataset = nn.Identity(), Samples(held)
    module.held = held
    module.itself = dataset.itself = [module, dataset]  # type: ignore[attr-defined]
    context: Any = SimpleNamespace(module=module, events=SimpleNamespace(callbacks={}))
    saved = [path for path in get_generator_states(context) if not path.startswith("global")]
    seeded = own_generators(DataLoader(dataset)).search()  # type: ignore[arg-type]

    assert len(saved) == 1
    assert [path for path, one in seeded.by_path.items() if one is rng] == [f"train_dataset.value{saved[0][4:]}"]
    assert list(find_generators(module).by_path.values()) == list(seeded.by_path.values())
    assert not seeded.unsearched


def test_generators_named_by_classes_and_functions_are_reached() -> None:
    found = find_generators(OfClass(), OfClass).by_path

    assert found == {
        "rng": OfClass.rng,
        "by_name['rng']": OfClass.by_name["rng"],
        "global AUGMENTATION.value": AUGMENTATION.value,
        "global NEARBY": NEARBY,
        "global INDIRECT": INDIRECT,
    }


class Traps:
    """Raises in each piece of its code that a search could run."""

    def __init__(self, rng: Any) -> None:
        object.__setattr__(self, "rng", rng)

    def raises(self, *_: Any) -> Any:
        raise OSError("the code of a searched object was run")

    __getattr__ = __getattribute__ = __iter__ = __len__ = __eq__ = __repr__ = __bool__ = raises  # type: ignore[assignment]
    __hash__ = object.__hash__
    __class__ = property(raises)  # type: ignore[assignment]
    value = property(raises)


class NoAttributes(Traps):
    __slots__ = ()
    __dict__ = property(Traps.raises)  # type: ignore[assignment]


class LazyDict(dict[Any, Any]):
    """A dict that loads a file for each item."""

    def items(self) -> Any:
        raise OSError

    __iter__ = __getitem__ = __len__ = values = keys = items


def test_no_code_of_the_objects_runs() -> None:
    rng = random.Random(0)
    trap = Traps(rng)
    dead = weakref.proxy(Box(0))
    found = find_generators([trap, dead, weakref.ref(rng), Mock(), {trap: 1}, NoAttributes], {trap}, LazyDict(a=[trap]))

    assert list(found.by_path) == ["[0].rng"]
    assert list(find_generators(LazyDict(a=trap)).by_path) == ["['a'].rng"]


def test_several_generators_in_a_set_are_reported_as_unsearched() -> None:
    assert find_generators(owner=Box({random.Random(1), random.Random(2)})).unsearched == ["owner.value"]
    assert not find_generators(owner=Box({"a", ("b", 1), (2, 3)})).unsearched


PATHS = """
import random, sys
from trainstack.backends.generator_search import find_generators
class A:
    __slots__ = {"b", "a", "c", "d"}
    def __init__(self): self.a, self.b, self.c, self.d = (random.Random() for _ in range(4))
    def draw(self): return X.random() + Y.random()
X, Y = random.Random(), random.Random()
x, y, z = (random.Random() for _ in range(3))
print(list(find_generators(a=[A(), lambda: (z, x, y), {frozenset("abc"): {"xyz", random.Random()}}]).by_path))
"""


@pytest.mark.processes
def test_paths_do_not_depend_on_the_hash_seed() -> None:
    here: list[str] = []
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", PATHS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=patience(30))
    exec(PATHS, {"__name__": "__main__", "print": lambda paths: here.append(f"{paths}\n")})

    assert [done.stdout] == here, done.stderr
    assert len(ast.literal_eval(done.stdout)) == 10


@pytest.mark.parametrize(
    "make",
    [
        lambda: [[[0] * 10_000 for _ in range(100)] for _ in range(10)],
        lambda: [[[("a", n)] * 500 for n in range(100)] for _ in range(100)],
        lambda: [[{n: [Box(n), [n]] for n in range(100)} for _ in range(100)] for _ in range(3)],
        lambda: list(range(10**6)),
        lambda: SimpleNamespace(**{f"a{n}": n for n in range(10**5)}),
    ],
    ids=["numbers", "records", "objects", "list", "attributes"],
)
def test_a_search_ends(make: Callable[[], Any]) -> None:
    value = make()
    start = time.process_time()
    find_generators(value)
    assert time.process_time() - start < 3


def test_an_object_that_is_too_large_is_named() -> None:
    many = [[Box([random.Random(0)]) for _ in range(100)] for _ in range(100)]
    found = find_generators(owner=many)

    assert found.unsearched
    assert found.describe_unsearched().endswith(" more")
    assert find_generators(nn.Sequential(*(nn.Conv2d(1, 1, 1) for _ in range(3000)))).unsearched == []


def test_the_search_examines_as_many_items_as_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator_search, "MANY", 3)  # 150 items
    monkeypatch.setattr(generator_search, "WIDE", 1000)
    for count, is_found in ((147, True), (148, False)):  # and the inner list, and the class of the outer one
        found = find_generators(root=[[random.Random(1)], *[1] * count])
        assert (bool(found.by_path), bool(found.unsearched)) == (is_found, not is_found)
