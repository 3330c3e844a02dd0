"""Capture, restore and isolate the states of random generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from trainstack.backends import World
from trainstack.backends.random_streams import RandomStreams
from trainstack.errors import CheckpointMismatchError, ConfigurationError
from trainstack.trainer.core.order import mix

_HOST = torch.device("cpu")


def seed_everything(seed: int) -> None:
    """Seed the global generators of python, numpy and torch on all devices.

    Args:
        seed: a whole number from 0 to 2**63 - 1; numpy gets 32 bits of its hash.

    Raises:
        ConfigurationError: `seed` is not a whole number.

    Examples:
        >>> ts.seed_everything(0)
        >>> first = torch.rand(3)
        >>> ts.seed_everything(0)
        >>> torch.equal(torch.rand(3), first)
        True
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise ConfigurationError(f"seed={seed!r}: write a whole number.")
    seed = int(seed)
    random.seed(seed)
    np.random.seed(mix(seed) & 0xFFFFFFFF)  # numpy takes 32 bits
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # torch.manual_seed would keep a call, with its stack, for each kind of device that does not exist
        torch.default_generator.manual_seed(seed)


Seed = int | RandomStreams
"""The source of random numbers: a user's seed, or the streams of a private run."""


def _seed_one(seed: Seed, device: torch.device) -> None:
    """Seed the generators of the host and of `device` only, because callers restore only these."""
    if isinstance(seed, RandomStreams):
        seed.seed_all(device, (), "isolated")
        return
    _seed_each({"python": seed, "numpy": mix(seed), "torch": seed, device.type: seed}, device)


def _seed_each(seeds: Mapping[str, int], device: torch.device) -> None:
    """Seed the generators of the host and of `device`, each by its name in `capture_rng`."""
    random.seed(seeds["python"])
    np.random.seed(seeds["numpy"] & 0xFFFFFFFF)  # numpy takes 32 bits
    torch.default_generator.manual_seed(seeds["torch"])
    if device.type == "cpu":
        return
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", None)  # torch 2.13.0: cuda and xpu have one for each device
    if generators:
        generators[module.current_device() if device.index is None else device.index].manual_seed(seeds[device.type])
    else:
        module.manual_seed(seeds[device.type])


def capture_rng(device: torch.device) -> dict[str, Any]:
    """Return the states of all global generators that training on `device` may use, as plain values and tensors."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore_rng(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the states from `capture_rng`.

    Raises:
        CheckpointMismatchError: the states were captured for another kind of device.
    """
    if device.type != "cpu" and device.type not in state:
        raise CheckpointMismatchError(
            f"the checkpoint holds no random state for {device.type!r}: it was written by a run on "
            f"{sorted(set(state) - {'python', 'numpy', 'torch'}) or 'cpu'}. Resume on that kind of device."
        )
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state[device.type], device)


@contextmanager
def isolated_rng(seed: Seed, device: torch.device) -> Iterator[None]:
    """Context manager that seeds the generators with `seed`, and restores their states at the end of the block."""
    saved = capture_rng(device)
    try:
        _seed_one(seed, device)
        yield
    finally:
        restore_rng(saved, device)


@contextmanager
def preserve_host_rng() -> Iterator[None]:
    """Context manager that restores the generators of the host; for samples that are loaded in this process."""
    saved = capture_rng(_HOST)
    try:
        yield
    finally:
        restore_rng(saved, _HOST)


def separate_ranks(world: World) -> None:
    """Give each rank different random numbers. All ranks call it together.

    Rank 0 keeps its generators, so that one process gives the same numbers as a plain loop. Each other rank derives the
    seed of each generator from the state of the same generator on rank 0 and from its rank. So a user who seeds only
    torch gets reproducible numbers from torch.
    """
    if world.size == 1:
        return
    digests = {name: _digest(state) for name, state in capture_rng(world.device).items()}
    digests = world.comm.broadcast_object(digests, "the random state of rank 0")
    if world.rank:
        # The shift gives a seed of 63 bits, which is the same number as a signed and as an unsigned integer.
        _seed_each({name: mix(digest, world.rank) >> 1 for name, digest in digests.items()}, world.device)


def _digest(state: Any) -> int:
    """Hash the whole state of a generator to 64 bits."""
    if isinstance(state, torch.Tensor):
        data = state.cpu().numpy().tobytes()
    else:
        with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
            data = str(state).encode()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def seed_sample(seed: Seed, epoch: int, index: int) -> None:
    """Seed the host's generators for one sample, so that its augmentation depends only on the arguments.

    Sample `index` gets the same random numbers in `epoch` in any process, worker or micro-batch. The global generators
    are used: another thread that draws from them at the same time changes the numbers.

    A record that is drawn several times in an epoch has the same numbers each time, also in a private run. Given the
    secret key, the dataset of an epoch is therefore fixed, and steps compose as without augmentation.
    """
    if isinstance(seed, RandomStreams):
        seed.seed_host("sample", epoch, index)
        return
    key = mix(seed, epoch, index)
    # The shift gives a seed of 63 bits, which is the same number as a signed and as an unsigned integer.
    torch.default_generator.manual_seed(key >> 1)
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)


_LOADER = -1
"""Takes the place of a sample's index in the seed of a loader's generators; no sample has a negative index."""

T = TypeVar("T")


class LoaderGenerators:
    """States of the host's generators with which a loader with a custom order is used.

    They derive only from (seed, epoch), so that all ranks draw the same numbers, independent of other random numbers in
    the process. As a context manager it installs these states, and restores those of the process at the end.

    Args:
        seed: seed of the run.
        epoch: epoch in which the loader is used.
    """

    def __init__(self, seed: Seed, epoch: int) -> None:
        self._seed, self._epoch = seed, epoch
        self._state: dict[str, Any] | None = None  # seeded in the first block
        self._outer: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._outer = capture_rng(_HOST)
        if self._state is None:
            seed_sample(self._seed, self._epoch, _LOADER)
        else:
            restore_rng(self._state, _HOST)

    def __exit__(self, *_: object) -> None:
        self._state = capture_rng(_HOST)
        restore_rng(self._outer, _HOST)

    def get_state(self) -> dict[str, Any]:
        """Return the states at the start of the next block."""
        if self._state is None:
            with self:
                pass
        assert self._state is not None
        return self._state

    def update_state(self, state: dict[str, Any]) -> None:
        """Set the states for the next block, from `get_state`."""
        self._state = state


class IsolatedIterator(Generic[T]):
    """Iterator that is made and advanced with the states of `generators`.

    Args:
        generators: states that are installed around each call.
        make: function that returns the iterator.
        first_alone: whether only `make` and the first item draw random numbers. Then later items are loaded without a
            change of states, which would take longer than a small batch.
    """

    def __init__(
        self, generators: LoaderGenerators, make: Callable[[], Iterator[T]], *, first_alone: bool = False
    ) -> None:
        self._generators, self._first_alone, self._has_drawn = generators, first_alone, False
        with generators:
            self._iterator = make()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._has_drawn:
            return next(self._iterator)
        with self._generators:
            item = next(self._iterator)
        self._has_drawn = self._first_alone
        return item
