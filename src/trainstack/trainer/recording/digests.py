"""Digests of batches, random states, gradients, weights and optimizer states, 64 bits each."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from xxhash import xxh3_64_intdigest

from trainstack._tensor_bytes import bytes_of
from trainstack.step_log.format import ABSENT
from trainstack.trainer.core.fingerprints import (
    checksums,
    hash_around_tensors,
    hash_value,
    read_checksums,
    start_checksums,
)
from trainstack.trainer.core.random_state import capture_rng

_MASK = (1 << 64) - 1  # makes a signed checksum unsigned, as the log stores it


def combine(numbers: Sequence[int]) -> int:
    """One number of 64 bits that depends on each of `numbers` and on their order."""
    return xxh3_64_intdigest(struct.pack(f"<{len(numbers)}Q", *(number & _MASK for number in numbers)))


class BatchDigest:
    """The digest of the micro-batches of a step. Checksums are computed on their devices, and read by `value`."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, list[int | Tensor]]] | None = []

    def add(self, batch: Any) -> None:
        """Add a collated micro-batch. The digest becomes None if a micro-batch has unknown contents."""
        if self._parts is None:
            return
        try:
            text, tensors = hash_around_tensors(batch)
            self._parts.append((text, [_start_digest(tensor) for tensor in tensors]))
        except Exception:  # raised by a user's class; the training continues without the digest
            self._parts = None

    def value(self) -> int | None:
        """The digest; None if it is not known."""
        if self._parts is None:
            return None
        digests = [one for _, digests in self._parts for one in digests]
        on_devices = iter(read_checksums([one for one in digests if isinstance(one, Tensor)]))
        known = [next(on_devices) if isinstance(one, Tensor) else one for one in digests]
        return combine([*(int(text, 16) for text, _ in self._parts), *known])


def _start_digest(tensor: Tensor) -> int | Tensor:
    """A digest of the elements of a tensor on the CPU, or else a checksum on its device, to be read later.

    On the CPU the checksum would take ten times as long as the digest.
    """
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return start_checksums([tensor])[0]
    return xxh3_64_intdigest(bytes_of(tensor.detach().resolve_conj().resolve_neg()).numpy().data)


def digest_generators(device: torch.device) -> dict[str, int]:
    """Digests of the states of the global generators that training on `device` may use, by name."""
    return {name: _digest_generator(state) for name, state in capture_rng(device).items()}


def _digest_generator(state: Any) -> int:
    if isinstance(state, Tensor):
        return xxh3_64_intdigest(state.cpu().numpy().tobytes())
    if isinstance(state, tuple):  # of Python: a version, 625 integers of 32 bits, and the next value of `gauss`
        version, numbers, kept = state
        return xxh3_64_intdigest(array("I", numbers).tobytes() + repr((version, kept)).encode())
    inner = state["state"]
    if set(inner) != {"key", "pos"}:  # not the state of numpy's MT19937
        return int(hash_value(state), 16)
    rest = {name: value for name, value in state.items() if name != "state"}
    return xxh3_64_intdigest(inner["key"].tobytes() + repr((inner["pos"], rest)).encode())


def digest_indices(steps: Sequence[Sequence[Tensor]]) -> list[int]:
    """A digest of the indices of each step. It does not depend on the split into micro-batches.

    Args:
        steps: for each step, int64 tensors of indices on the CPU.
    """
    parts = [part for step in steps for part in step]
    data = memoryview(torch.cat(parts).numpy().tobytes() if parts else b"")
    digests, begin = [], 0
    for step in steps:
        end = begin + 8 * sum([part.numel() for part in step])  # 8 bytes in an int64
        digests.append(xxh3_64_intdigest(data[begin:end]))
        begin = end
    return digests


def digest_rates(rates: Sequence[float | Tensor]) -> int:
    """A digest of learning rates. Rates that are tensors are read from their device."""
    return xxh3_64_intdigest(struct.pack(f"<{len(rates)}d", *map(float, rates)))


def digest_tensors(tensors: Iterable[Tensor | None]) -> list[int]:
    """A digest of each tensor, `ABSENT` for None. For a sharded tensor it is the digest of this process's rows."""
    listed = list(tensors)
    sums = iter(checksums(one for one in listed if one is not None))
    return [ABSENT if one is None else next(sums) & _MASK for one in listed]


def digest_states(optimizers: Sequence[Optimizer], parameters: Sequence[nn.Parameter]) -> list[int]:
    """A digest of the optimizer states of each parameter, `ABSENT` without one."""
    kept = [[one.state[p] for one in optimizers if one.state.get(p)] for p in parameters]
    around = [hash_around_tensors(_sorted(states)) for states in kept]
    sums = iter(checksums(tensor for _, tensors in around for tensor in tensors))
    return [
        combine([int(text, 16), *(next(sums) for _ in tensors)]) if states else ABSENT
        for states, (text, tensors) in zip(kept, around, strict=True)
    ]


def _sorted(states: Sequence[Mapping[Any, Any]]) -> list[Any]:
    """`states` with sorted keys, because their order may differ in a resumed optimizer."""
    return [[(str(key), state[key]) for key in sorted(state, key=str)] for state in states]
