"""Capture, restore and isolation of random states."""

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
    """Seed python's, numpy's and torch's global generators (all devices).

    Raises:
        ConfigurationError: `seed` is not a whole number.
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise ConfigurationError(f"seed={seed!r}: write a whole number.")
    seed = int(seed)
    random.seed(seed)
    np.random.seed(mix(seed) & 0xFFFFFFFF)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # which would keep the request, and the stack it came from, for devices that are not there
        torch.default_generator.manual_seed(seed)


Seed = int | RandomStreams
"""The source of random numbers: a seed of the user's, or the streams of a private run."""


def _seed_one(seed: Seed, device: torch.device) -> None:
    """Seed the generators of the host and of `device`, and of no other device; `capture_rng` was called before."""
    if isinstance(seed, RandomStreams):
        seed.seed_all(device, (), "isolated")
        return
    _seed_each({"python": seed, "numpy": mix(seed), "torch": seed, device.type: seed}, device)


def _seed_each(seeds: Mapping[str, int], device: torch.device) -> None:
    """Seed each generator of the host and of `device` by its name in `capture_rng`."""
    random.seed(seeds["python"])
    np.random.seed(seeds["numpy"] & 0xFFFFFFFF)
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
    """The state of every global generator that training on `device` may draw from, as plain values and tensors."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore_rng(state: Mapping[str, Any], device: torch.device) -> None:
    """Put back what `capture_rng` returned.

    Raises:
        CheckpointMismatchError: the state was captured for another kind of device.
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
    """A block that draws from generators seeded with `seed` and leaves the outer ones as they were."""
    saved = capture_rng(device)
    try:
        _seed_one(seed, device)
        yield
    finally:
        restore_rng(saved, device)


@contextmanager
def preserve_host_rng() -> Iterator[None]:
    """A block after which the generators of the host are what they were; for loading samples in this process."""
    saved = capture_rng(_HOST)
    try:
        yield
    finally:
        restore_rng(saved, _HOST)


def separate_ranks(world: World) -> None:
    """Let each rank draw other random numbers than the others; all ranks call it together.

    Rank 0 keeps its generators, so that one process equals a plain loop. The others derive each of theirs from the
    state that this generator has on rank 0, and from their rank: who seeds torch alone gets the same numbers of torch.
    """
    if world.size == 1:
        return
    digests = {name: _digest(state) for name, state in capture_rng(world.device).items()}
    digests = world.comm.broadcast_object(digests, "the random state of rank 0")
    if world.rank:
        # Shifted by one: a seed of 63 bits is the same number whether it is read with a sign or without.
        _seed_each({name: mix(digest, world.rank) >> 1 for name, digest in digests.items()}, world.device)


def _digest(state: Any) -> int:
    """64 bits that depend on all of a generator's state."""
    if isinstance(state, torch.Tensor):
        data = state.cpu().numpy().tobytes()
    else:
        with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
            data = str(state).encode()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def seed_sample(seed: Seed, epoch: int, index: int) -> None:
    """Seed the host's generators for one sample, so that its augmentation depends on nothing else.

    Whatever process, worker or micro-batch loads sample `index` in `epoch`, it draws the same numbers. The generators
    are those of the process: another thread that draws from them at the same time changes the numbers.

    A record that is drawn several times in an epoch has the same numbers each time, in a private run too. Given the
    secret key, the dataset of an epoch is then a fixed one, and steps on it compose as without augmentation.
    """
    if isinstance(seed, RandomStreams):
        seed.seed_host("sample", epoch, index)
        return
    key = mix(seed, epoch, index)
    # Shifted by one: a seed of 63 bits is the same number whether it is read with a sign or without.
    torch.default_generator.manual_seed(key >> 1)
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)


_LOADER = -1
"""In the place of a sample's index in the seed of a loader's generators."""

T = TypeVar("T")


class LoaderGenerators:
    """The state of the host's generators under which a loader with an order of its own is used.

    It derives from (seed, epoch) alone, so all ranks read the same stream, whatever else draws random numbers there.
    The state is swapped in for a block. Outside of it the generators of the process are what they were.

    Args:
        seed: of the run.
        epoch: for which the loader is used.
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
        """The state that the next block begins with."""
        if self._state is None:
            with self:
                pass
        assert self._state is not None
        return self._state

    def update_state(self, state: dict[str, Any]) -> None:
        """Let the next block begin with what `get_state` returned."""
        self._state = state


class IsolatedIterator(Generic[T]):
    """An iterator that is made and used under generators other than those of the process.

    Args:
        generators: swapped in around each call.
        make: returns the iterator.
        first_alone: whether only `make` and the first item draw. Then the generators are not swapped for the others,
            which would cost more than a small batch.
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
