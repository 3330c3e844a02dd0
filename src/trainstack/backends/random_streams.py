"""`RandomStreams`, independent streams of random numbers that are derived from one key."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from trainstack.backends.processes.communicator import Communicator

Place = int | str

_SFC64 = np.random.SFC64  # kept, because private runs replace this name of numpy by another class


class RandomStreams:
    """Streams that replace the generators of the process: each is a function of a key and a place.

    A place is a tuple of numbers and words, such as `("sample", epoch, index)`. Without the key, streams of different
    places cannot be told from independent ones. All ranks have the same key. It exists in memory only.

    `blake2b` with the 256 bits of the key gives the state of an SFC64 generator for each place, and that gives the
    states of the generators. `torch.manual_seed` would not be enough: an attacker can try its 32 bits on the CPU.

    Args:
        key: 32 bytes.
        is_secret: whether the key comes from the operating system. Otherwise it comes from a debug seed, and each draw
            has to be a function of its place.
    """

    is_secret: bool

    def __init__(self, key: bytes, *, is_secret: bool) -> None:
        self._key, self.is_secret = key, is_secret
        self._bits = _SFC64(0)  # reused, because a new one costs more than setting its state

    @classmethod
    def from_system(cls, comm: Communicator | None = None) -> RandomStreams:
        """Streams with a new key of the operating system, which rank 0 broadcasts to the other ranks of `comm`."""
        key = secrets.token_bytes(32)
        return cls(key if comm is None else comm.broadcast_object(key, "seeding private runs"), is_secret=True)

    @classmethod
    def from_seed(cls, seed: int) -> RandomStreams:
        """Streams with a key that is a hash of a public seed."""
        return cls(blake2b(str(seed).encode(), digest_size=32, person=b"debug_seed").digest(), is_secret=False)

    def at(self, *place: Place) -> np.random.SFC64:
        """A bit generator for one place. Each call restarts the stream of the place."""
        return self._set(_SFC64(0), place)

    def _set(self, bits: np.random.SFC64, place: tuple[Place, ...]) -> np.random.SFC64:
        set_bits(bits, blake2b(repr(place).encode(), key=self._key, digest_size=32).digest())
        return bits

    def number(self, *place: Place) -> int:
        """64 bits for a place, as a signed integer."""
        digest = blake2b(repr(place).encode(), key=self._key, digest_size=8, person=b"number").digest()
        return int.from_bytes(digest, "little", signed=True)

    def seed_host(self, *place: Place) -> None:
        """Seed the global generators of Python, numpy and torch for the CPU."""
        bits = self._set(self._bits, place)
        set_torch_state(torch.default_generator, bits)
        np.random.seed(_words(bits))
        random.seed(_integer(bits))

    def seed_all(self, device: torch.device, generators: Iterable[Any], *place: Place) -> None:
        """Seed the global generators of the host and of `device`, and each of `generators` by its position."""
        self.seed_host(*place)
        for generator in device_generators(device):
            generator.manual_seed(self.number(*place, device.type))
        self.seed_each(generators, *place)

    def seed_each(self, generators: Iterable[Any], *place: Place) -> None:
        """Seed each generator by the place and its position among them.

        Raises:
            TypeError, ValueError: one of them cannot be seeded.
        """
        for position, generator in enumerate(generators):
            seed_from(generator, self.at(*place, "own", position))


def set_bits(bits: np.random.SFC64, seed: bytes) -> None:
    """Derive the state of an SFC64 generator from 32 bytes."""
    state = np.frombuffer(seed, dtype=np.uint64).copy()
    bits.state = {"bit_generator": type(bits).__name__, "state": {"state": state}, "has_uint32": 0, "uinteger": 0}
    bits.random_raw(12, output=False)  # 12 rounds, as in SFC64's own seeding: then each bit depends on the whole seed


def _words(bits: np.random.SFC64) -> Any:
    return bits.random_raw(4).view(np.uint32)  # `init_by_array` uses each word


def _integer(bits: np.random.SFC64) -> int:
    return int.from_bytes(bits.random_raw(4).tobytes(), "little")


def set_torch_state(generator: torch.Generator, bits: np.random.SFC64) -> int:
    """Give a torch generator for the CPU all 624 words of its state.

    Returns:
        its `initial_seed` afterwards: a random number, the lowest 20 bits of which are 0.

    torch 2.10 to 2.13: `get_state` has 5056 bytes, `CPUGeneratorImplState` in aten/src/ATen/CPUGeneratorImpl.cpp. The
    seed (8 bytes), `left` and `seeded` (4 each) and `next` (8) come first, then 624 words of the Mersenne twister in 8
    bytes each, then cached normal numbers, all of them marked invalid here. With `left` 1 the next draw begins with a
    new block of the words, like numpy's `MT19937` with `pos` 624.
    """
    # in memory of numpy, because user code could find a tensor with these bytes among live objects
    state = np.zeros(_STATE_BYTES, dtype=np.uint8)
    raw = bits.random_raw(1 + _MT_WORDS // 2)
    marker = int(raw[0]) & ~0xFFFFF
    state[:8].view(np.uint64)[:] = marker
    state[8:16].view(np.int32)[:] = 1
    state[24 : 24 + 8 * _MT_WORDS].view(np.uint64)[:] = raw[1:].view(np.uint32)
    generator.set_state(torch.from_numpy(state))
    return marker


_STATE_BYTES, _MT_WORDS = 5056, 624


def seed_from(generator: Any, bits: np.random.SFC64) -> None:
    """Seed one generator of torch, numpy or Python.

    Raises:
        TypeError, ValueError: it cannot be seeded.
    """
    if isinstance(generator, torch.Generator):
        if generator.device.type == "cpu":
            set_torch_state(generator, bits)
        else:  # the key of a Philox generator has 64 bits
            generator.manual_seed(int(bits.random_raw(1).view(np.int64)[0]))
    elif isinstance(generator, np.random.Generator):
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(_words(bits)).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(_words(bits))
    else:
        generator.seed(_integer(bits))


def device_generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """The global generator of a device other than the CPU, if it has one."""
    if device.type == "cpu":
        return ()
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", None)  # torch 2.13.0: cuda and xpu have one for each device
    if not generators:
        return ()
    return (generators[module.current_device() if device.index is None else device.index],)
