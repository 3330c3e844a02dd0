"""Capture, restore and isolation of random states."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from trainstack.errors import CheckpointMismatchError
from trainstack.trainer.core.order import mix


def seed_everything(seed: int) -> None:
    """Seed python's, numpy's and torch's global generators (all devices)."""
    random.seed(seed)
    np.random.seed(mix(seed) & 0xFFFFFFFF)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # which would keep the request, and the stack it came from, for devices that are not there
        torch.default_generator.manual_seed(seed)


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
def isolated_rng(seed: int, device: torch.device) -> Iterator[None]:
    """A block that draws from generators seeded with `seed` and leaves the outer ones as they were."""
    saved = capture_rng(device)
    try:
        seed_everything(seed)
        yield
    finally:
        restore_rng(saved, device)


@contextmanager
def preserve_host_rng() -> Iterator[None]:
    """A block after which the generators of the host are what they were; for loading samples in this process."""
    host = torch.device("cpu")
    saved = capture_rng(host)
    try:
        yield
    finally:
        restore_rng(saved, host)


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed the host's generators for one sample, so that its augmentation depends on nothing else.

    Whatever process, worker or micro-batch loads sample `index` in `epoch`, it draws the same numbers. The generators
    are those of the process: another thread that draws from them at the same time changes the numbers.
    """
    key = mix(seed, epoch, index)
    # Shifted by one: a seed of 63 bits is the same number whether it is read with a sign or without.
    torch.default_generator.manual_seed(key >> 1)
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)
