"""`SaltedSeeds` mixes a secret of the run into the seeds that a dataset sets in random generators."""

from __future__ import annotations

import functools
import random
import sys
from types import TracebackType
from typing import Any

import numpy as np
import torch

from trainstack.backends.generator_search import is_scope_of_user
from trainstack.backends.random_streams import Place, RandomStreams, seed_from, set_torch_state
from trainstack.errors import PrivacyError

_seed_random, _seed_numpy, _default_rng = random.seed, np.random.seed, np.random.default_rng
_torch_random: Any = torch.random


class SaltedSeeds:
    """A block in which a dataset makes a sample of a private run, or the samples of a batch.

    Datasets seed generators to repeat random numbers: `np.random.seed(index)` gives each sample its augmentation, and
    the same seed twice gives an image and its mask the same crop. Such a seed is public. Without one record, all later
    records have other indices and other public augmentation, which clipping does not bound. In the block, the state
    after a seed depends on the seed, the place and the streams of the run. Within a sample, equal seeds still give
    equal numbers.

    This covers `random.seed`, `numpy.random.seed` and `torch.manual_seed`, and generators that the dataset makes in the
    block with `random.Random`, `numpy.random.default_rng`, `numpy.random.RandomState`, bit generators of numpy or
    `torch.Generator`. It also covers modules of the user that have imported these names. It does not cover names that a
    library has imported or that a function or a class holds, and generators that a dataset keeps and seeds again.

    Args:
        streams: the random streams of the run.
        place: the place of the sample.

    Raises:
        PrivacyError: at the end of the block, if torch's default generator was seeded in another way.
    """

    def __init__(self, streams: RandomStreams, *place: Place) -> None:
        self._streams, self._place = streams, place
        self._markers: set[int] = set()
        self._places: tuple[_Place, ...] = ()
        self._outer: list[Any] = []

    def bits(self, kind: str, seed: Any) -> np.random.SFC64:
        """The random stream for a seed in the block."""
        return self._streams.at("seed", *self._place, kind, repr(seed))

    def seed_torch(self, seed: int) -> None:
        """Seed torch's default generator."""
        self._markers.add(set_torch_state(torch.default_generator, self.bits("torch", int(seed))))

    def __enter__(self) -> None:
        global _active
        self._markers = {torch.default_generator.initial_seed()}
        self._places = (*_REPLACED, *_imported_names(len(sys.modules)))
        self._outer = [_active, *(getattr(place, name) for place, name, _ in self._places)]
        _active = self
        for place, name, replacement in self._places:
            setattr(place, name, replacement)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        _active, *outer = self._outer
        for (place, name, _), value in zip(self._places, outer, strict=True):
            setattr(place, name, value)
        if error is None and torch.default_generator.initial_seed() not in self._markers:
            raise PrivacyError(
                "the data set seeds torch's default generator itself. Such a seed makes the random numbers of each "
                "sample public, and without one record the later ones have other numbers. Remove the seed, or call "
                "torch.manual_seed, which private runs mix with a secret."
            )


_active: SaltedSeeds | None = None


class _AsBefore(type):
    """Makes `isinstance` and `issubclass` accept objects of the replaced class."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__mro__[1])

    def __subclasscheck__(cls, other: Any) -> bool:
        return issubclass(other, cls.__mro__[1])


class _SaltedRandom(random.Random, metaclass=_AsBefore):
    def seed(self, a: Any = None, version: int = 2) -> None:
        super().seed(_bytes(a), version)


class _SaltedRandomState(np.random.RandomState, metaclass=_AsBefore):
    def __init__(self, seed: Any = None) -> None:
        super().__init__(_words(seed))

    def seed(self, seed: Any = None) -> None:
        super().seed(_words(seed))


class _AsBeforeInTorch(_AsBefore, type(torch.Generator)):  # type: ignore[misc]
    pass


class _SaltedGenerator(torch.Generator, metaclass=_AsBeforeInTorch):
    def manual_seed(self, seed: int) -> torch.Generator:
        if _active is None:
            super().manual_seed(seed)
        else:
            seed_from(self, _active.bits("generator", int(seed)))
        return self


class _DefaultGenerator:
    """Replaces torch's generator in `torch.random`, whose functions refer to it by name (torch 2.10 to 2.13)."""

    def manual_seed(self, seed: int) -> torch.Generator:
        assert _active is not None  # the name is only replaced within a block
        _active.seed_torch(seed)
        return torch.default_generator

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.default_generator, name)


def _bytes(seed: Any) -> Any:
    """A seed of 4 x 64 bits for a generator of Python; None for a seed of the operating system."""
    return seed if seed is None or _active is None else _active.bits("python", seed).random_raw(4).tobytes()


def _words(seed: Any) -> Any:
    """Eight 32-bit words as a seed for a generator of numpy; None for a seed of the operating system."""
    return seed if seed is None or _active is None else _active.bits("numpy", seed).random_raw(4).view(np.uint32)


def _salted_random_seed(a: Any = None, version: int = 2) -> None:
    _seed_random(_bytes(a), version)


def _salted_numpy_seed(seed: Any = None) -> None:
    _seed_numpy(_words(seed))


def _salted_default_rng(seed: Any = None) -> np.random.Generator:
    if isinstance(seed, np.random.Generator | np.random.BitGenerator | np.random.RandomState):
        return _default_rng(seed)
    return _default_rng(_words(seed))


def _salted_bits(kind: Any) -> type:
    """A subclass of a bit generator whose seeds are salted."""

    def init(self: Any, seed: Any = None, **given: Any) -> None:
        is_seeded = seed is not None or given
        kind.__init__(self, _words((kind.__name__, seed, sorted(given.items()))) if is_seeded else None)

    return _AsBefore(kind.__name__, (kind,), {"__init__": init})


_Place = tuple[Any, str, Any]
"""A module, a name in it, and its value within a block."""

_BIT_GENERATORS: Any = [np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64]

_REPLACED: tuple[_Place, ...] = (
    (random, "seed", _salted_random_seed),
    (random, "Random", _SaltedRandom),
    (np.random, "seed", _salted_numpy_seed),
    (np.random, "default_rng", _salted_default_rng),
    (np.random, "RandomState", _SaltedRandomState),
    *((np.random, kind.__name__, _salted_bits(kind)) for kind in _BIT_GENERATORS),
    (torch, "Generator", _SaltedGenerator),
    (_torch_random, "default_generator", _DefaultGenerator()),
)

_ORIGINALS = {id(getattr(place, name)): new for place, name, new in _REPLACED if place is not _torch_random}


@functools.lru_cache(maxsize=1)
def _imported_names(modules: int) -> tuple[_Place, ...]:
    """The names of replaced functions and classes in modules of the user. `modules`, a count, keys the cache."""
    return tuple(
        (module, name, _ORIGINALS[id(value)])
        for scope, module in list(sys.modules.items())
        if is_scope_of_user(scope)
        for name, value in list(getattr(module, "__dict__", {}).items())
        if id(value) in _ORIGINALS
    )
