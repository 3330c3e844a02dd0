"""Seed the generators that a dataset and its loader hold, for each sample."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader

from trainstack.backends.generator_search import FoundGenerators, find_generators
from trainstack.backends.generators import get_generator_state, seed_generator, set_generator_state
from trainstack.backends.random_streams import RandomStreams
from trainstack.trainer.core.order import mix
from trainstack.trainer.core.random_state import Seed


def can_be_seeded(generator: Any) -> bool:
    """Whether `seed_generator` works for `generator`. Its state does not change."""
    try:
        state = get_generator_state(generator)
        seed_generator(generator, 1)
        set_generator_state(generator, state)
    except Exception:  # a class of the user may raise anything
        return False
    return True


class OwnGenerators:
    """The generators that a dataset and the parts of its loader hold, seeded like those of the process.

    They are searched in each process and each epoch, because a `worker_init_fn` or `set_epoch` may make others.

    Args:
        owners: the objects to search, by the first name of their paths.
    """

    def __init__(self, **owners: Any) -> None:
        self._owners = owners
        self._found: list[Any] = []
        self._found_at: tuple[int, int] | None = None  # the process and the epoch
        self._kept: list[tuple[Any, Any]] | None = None  # generators and their states, in `preserved`
        self._left_out: set[int] = set()

    def without(self, generators: Iterable[Any]) -> OwnGenerators:
        """Omit some generators, which other code seeds."""
        self._left_out = {id(generator) for generator in generators}
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_own_generators, (self._owners,)

    def search(self) -> FoundGenerators:
        """All generators, and the objects that were not searched completely."""
        found = find_generators(**self._owners)
        found.by_path = {path: one for path, one in found.by_path.items() if id(one) not in self._left_out}
        return found

    def seed(self, seed: Seed, epoch: int, index: int) -> None:
        """Seed each generator from (seed, epoch, index) and its position."""
        place = os.getpid(), epoch
        if place != self._found_at:
            self._found = [generator for generator in self.search().by_path.values() if can_be_seeded(generator)]
            self._found_at = place
        if not self._found:
            return
        if self._kept == []:
            self._kept = [(generator, get_generator_state(generator)) for generator in self._found]
        if isinstance(seed, RandomStreams):
            seed.seed_each(self._found, "sample", epoch, index)
            return
        for position, generator in enumerate(self._found):
            seed_generator(generator, mix(seed, epoch, index, position))

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """A block after which the states of the generators are restored, as if another process had run it."""
        self._kept = []
        try:
            yield
        finally:
            kept, self._kept = self._kept, None
            for generator, state in kept or ():
                set_generator_state(generator, state)


WHOLE_EPOCH = -1
"""Replaces the index of a sample in the seed of the generators of a loader with a custom order."""


def own_generators(loader: Any, besides: Any = None) -> OwnGenerators:
    """The generators of a loader: of its dataset, `collate_fn`, samplers, and of other loaders than `DataLoader`.

    Generators that are attributes of `besides`, the module, are omitted, because they belong to the state of the
    module.
    """
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader, "sampler", None) or getattr(batches, "sampler", None)
    owners = {"train_dataset": getattr(loader, "dataset", None), "collate_fn": getattr(loader, "collate_fn", None)}
    owners |= {"sampler": sampler, "batch_sampler": batches}
    owners |= {} if isinstance(loader, DataLoader) else {"loader": loader}
    return OwnGenerators(**owners).without(vars(besides).values() if besides is not None else ())


def _restore_own_generators(owners: dict[str, Any]) -> OwnGenerators:
    return OwnGenerators(**owners)
