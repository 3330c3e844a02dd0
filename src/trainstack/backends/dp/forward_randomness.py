"""`ForwardRandomness` gives a private forward pass random numbers that no outsider can compute.

Why one secret stream for a batch is enough: give each record the same random numbers in two neighbouring datasets. Then
the clipped sums differ by the one clipped gradient, and the noisy sums are two Gaussians at a distance of C or less.
The hockey-stick divergence is jointly convex, so the mixture over the random numbers has the same (epsilon, delta). The
mixture is the real run if the numbers are independent of the data and of each other: then it does not matter which part
of the stream a record gets. An adversary who can compute the numbers sees no mixture. To him, each record after the one
that is left out has another mask.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from trainstack.backends.dp.modes.base import Run
from trainstack.backends.dp.random_functions import RANDOM_FUNCTIONS
from trainstack.backends.dp.record_streams import RecordStreams
from trainstack.backends.generator_search import find_generators
from trainstack.backends.generators import get_generator_state, set_generator_state
from trainstack.backends.random_streams import RandomStreams, device_generators, seed_from, set_bits, set_torch_state
from trainstack.errors import PrivacyError

_INSTEAD = (
    "The seed determines each mask, and if a record is removed, all records after it get other masks: "
    "clipping then does not bound its influence. Remove the seed; debug_seed in DifferentialPrivacyArguments makes "
    "a run repeatable for tests."
)


_seed_random = random.seed
_get_bits, _set_bits = np.random.get_bit_generator, np.random.set_bit_generator  # type: ignore[attr-defined]
_torch_random: Any = torch.random


class _Kept(float):
    """A normal number for `random.gauss` to return first. `random.seed` drops it without a use."""

    used = False

    def __mul__(self, other: Any) -> float:
        self.used = True
        return float(self) * float(other)

    __rmul__ = __mul__


class _TorchGenerator:
    """In the place of torch's generator in `torch.random`, whose functions call it by this name (torch 2.10 to 2.13).

    A state that was read in the same forward pass may be set: gradient checkpointing does so before it repeats a part.
    Then the number of the call goes back as well, which the lowest bits of the seed in the state tell.
    """

    def __init__(self, streams: RecordStreams | None) -> None:
        self.marker, self._streams = 0, streams
        self._state = torch.default_generator.get_state()

    def manual_seed(self, seed: int) -> NoReturn:
        raise PrivacyError(f"train_step calls torch.manual_seed({seed!r}). {_INSTEAD}")

    def get_state(self) -> torch.Tensor:
        state = torch.default_generator.get_state()
        if self._streams is not None:
            _bytes_of(state)[:8].view(np.uint64)[:] = self.marker + self._streams.calls % (1 << 20)
        return state

    def set_state(self, state: torch.Tensor) -> None:
        written = _bytes_of(self._state)
        written[:] = _bytes_of(state)
        seed = written[:8].view(np.uint64)
        if int(seed[0]) & ~0xFFFFF != self.marker:
            raise PrivacyError(f"train_step sets a random state that was not read in the same call. {_INSTEAD}")
        if self._streams is not None:
            self._streams.calls = int(seed[0]) & 0xFFFFF
        seed[:] = self.marker
        torch.default_generator.set_state(self._state)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.default_generator, name)


def _bytes_of(state: torch.Tensor) -> Any:
    """The memory of a state; under `vmap` any function of torch, `numpy` too, would give a tensor of each record."""
    memory: Any = (ctypes.c_uint8 * state.nbytes).from_address(state.data_ptr())
    return np.frombuffer(memory, dtype=np.uint8)


class _NumpyBits(np.random.SFC64):
    """For numpy's global functions. `np.random.seed` makes another one of its class (numpy 1.26 to 2.4)."""

    def __init__(self, seed: Any = None) -> None:
        if seed is not None:
            raise PrivacyError(f"train_step calls np.random.seed({seed!r}). {_INSTEAD}")
        super().__init__()


class ForwardRandomness:
    """The generators of a private forward pass, and of its backward pass, on one process.

    In a block each generator has a new state, so that seeds of hooks, callbacks and scripts have no effect. A seed in
    the block is refused. With a debug seed, torch's random numbers are those of `RecordStreams`, and those of Python
    and numpy are a function of the step.

    Args:
        module: may hold generators.
        device: of the forward pass.
        streams: of the run.
        debug_seed: of the run, if it has one.
        records: the records of a global step on this process, in order; asked with a debug seed only.

    Raises:
        PrivacyError: a generator of the module's cannot be seeded.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        streams: RandomStreams,
        *,
        debug_seed: int | None = None,
        records: Callable[[int], torch.Tensor],
    ) -> None:
        self._device, self._streams, self._records = device, streams, records
        own = module_generators(module)
        self._own = [one for one in own if isinstance(one, torch.Generator)]
        self._shared = [one for one in own if not isinstance(one, torch.Generator)]
        self._bits, self._numpy = np.random.SFC64(0), _NumpyBits()
        self._process = -1  # in which the generators have got a secret
        self._kept = _Kept()
        self._record_streams = None if debug_seed is None else RecordStreams(debug_seed)
        self._torch = _TorchGenerator(self._record_streams)
        self._outer_bits: Any = None
        self._outer_seeds: list[Any] = []
        self._check = _DrawCheck(self)
        self._step = self._done = self._drawn = 0
        self._step_key, self._pass_bits, self._is_first = b"", np.random.SFC64(0), True
        self.markers: list[tuple[torch.Generator, int]] = []
        """The generators of torch that may be drawn from, each with its `initial_seed`."""

    def begin(self, run: Run, batch: Any, records: int, step: int) -> tuple[Run, Any]:
        """Make the next block that of a micro-batch of `records` records in global step `step`.

        Returns:
            the function and the batch for the gradient mode.
        """
        if self._record_streams is None:
            if self._process != os.getpid():  # a forked process has the secret of its parent
                set_bits(self._bits, os.urandom(32))
                self._process, self._step = os.getpid(), 0
            if step != self._step:
                self._step, self._step_key = step, self._bits.random_raw(4).tobytes()
            return partial(self._run_alike, run), batch
        drawn = self._records(step)
        if step != self._step or self._done == self._drawn:  # an audit takes the same step again
            self._step, self._done, self._drawn = step, 0, len(drawn)
        index = drawn[self._done : self._done + records]
        self._done += records

        self._bits = self._streams.at("forward", step)
        self._step_key = self._bits.random_raw(4).tobytes()
        return self._record_streams.attach(partial(self._run_alike, run), batch, index, step)

    def _run_alike(self, run: Run, model: nn.Module, batch: Any) -> Any:
        """With the same numbers of Python and numpy in each pass of a step: which records a pass runs may depend on
        other records."""
        if not self._is_first:
            self._check_python()
            self._seed_python()
        self._is_first = False
        with self._check:  # here alone, since a mode costs about a microsecond for each call of torch
            return run(model, batch)

    def discard(self) -> None:
        """The current step has ended, or was interrupted and begins again."""
        self._step = self._done = 0

    def __enter__(self) -> None:
        self.seed()
        self._outer_bits = _get_bits()
        _set_bits(self._numpy)
        self._outer_seeds = [getattr(place, name) for place, name, _ in _SEEDS]
        for place, name, refuse in _SEEDS:
            setattr(place, name, refuse)
        _torch_random.default_generator = self._torch
        if self._record_streams is not None:  # in the backward pass too, in which checkpointing repeats a forward pass
            self._record_streams.__enter__()  # type: ignore[no-untyped-call]

    def seed(self) -> None:
        """Give all generators their next states."""
        bits = self._bits
        default = torch.default_generator
        self._torch.marker = set_torch_state(default, bits)
        self.markers = [(default, self._torch.marker)]
        self._seed_python()
        self._is_first = True
        for generator in device_generators(self._device):
            generator.manual_seed(int(bits.random_raw(1).view(np.int64)[0]))
            self.markers.append((generator, generator.initial_seed()))
        for generator in self._own:
            seed_from(generator, bits)
            self.markers.append((generator, generator.initial_seed()))

    def _seed_python(self) -> None:
        """Seed the generators of Python and numpy, those of the module too."""
        bits = self._pass_bits
        set_bits(bits, self._step_key)
        _seed_random(int.from_bytes(bits.random_raw(4).tobytes(), "little"))
        self._kept = random._inst.gauss_next = _Kept(random.gauss(0.0, 1.0))  # type: ignore[attr-defined]
        set_bits(self._numpy, bits.random_raw(4).tobytes())
        for generator in self._shared:
            seed_from(generator, bits)

    def _check_python(self) -> None:
        if random._inst.gauss_next is not self._kept and not self._kept.used:  # type: ignore[attr-defined]
            raise PrivacyError(f"train_step seeds Python's random numbers. {_INSTEAD}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._record_streams is not None:
            self._record_streams.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        _torch_random.default_generator = torch.default_generator
        for (place, name, _), function in zip(_SEEDS, self._outer_seeds, strict=True):
            setattr(place, name, function)
        _set_bits(self._outer_bits)
        try:
            if error is None:
                self.check()
                self._check_python()
        finally:
            random._inst.gauss_next = None  # type: ignore[attr-defined]  # no state outside holds an object of ours

    def check(self) -> None:
        """Refuse a generator of torch that was seeded in the block.

        Raises:
            PrivacyError: one was.
        """
        for generator, marker in self.markers:
            if generator.initial_seed() != marker:
                raise PrivacyError(f"train_step seeds a generator of torch ({generator.device}). {_INSTEAD}")


class _DrawCheck(TorchFunctionMode):
    """Looks, before each draw of torch, at the generator from which it comes."""

    def __init__(self, owner: ForwardRandomness) -> None:
        super().__init__()
        self._owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs:
            if func in RANDOM_FUNCTIONS:
                self._owner.check()
            return func(*args)
        generator = kwargs.get("generator")
        if generator is not None and all(generator is not known for known, _ in self._owner.markers):
            raise PrivacyError(
                f"train_step gives {getattr(func, '__name__', func)} a torch.Generator that the run cannot seed from "
                "the operating system, so its random numbers may be known outside. Remove generator=, or make the "
                "generator in the module's __init__ and keep it in an attribute."
            )
        if func in RANDOM_FUNCTIONS:
            self._owner.check()
        return func(*args, **kwargs)


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise PrivacyError(f"train_step calls {name}. {_INSTEAD}")

    return refuse


_SEEDS = ((random, "seed", _refusal("random.seed")), (np.random, "set_state", _refusal("np.random.set_state")))


def module_generators(module: nn.Module) -> tuple[Any, ...]:
    """The generators that a module holds, all of which can be seeded. Their states are not changed.

    Raises:
        PrivacyError: one cannot.
    """
    found = find_generators(module).by_path
    for path, generator in found.items():
        state = get_generator_state(generator)
        try:
            seed_from(generator, np.random.SFC64(0))
        except Exception as error:  # a class of the user may raise any error
            raise PrivacyError(
                f"{path} ({type(generator).__name__}) cannot be seeded ({type(error).__name__}: {error}), so its "
                "random numbers may be known outside. Use torch.Generator(), numpy.random.default_rng() or "
                "random.Random()."
            ) from error
        set_generator_state(generator, state)
    return tuple(found.values())
