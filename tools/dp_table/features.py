"""ScatterNet features of a data set, and their private normalization."""

from __future__ import annotations

import functools
import os
import secrets
from pathlib import Path

import numpy as np
import torch

from tools.dp_table.images import digits
from tools.dp_table.scattering import CHANNELS, Scattering
from trainstack.backends.dp import SpendLedger

SIDE = 7
NORMALIZATION = "normalization"
"""The id of the two released statistics in the ledger."""


def scattered(images: torch.Tensor, path: Path) -> np.ndarray:
    """The features of uint8 `images`, float16 of shape (records, 81, 7, 7), stored in the file `path`."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished, transform = path.with_suffix(".part"), Scattering()
        out = np.lib.format.open_memmap(
            unfinished, mode="w+", dtype=np.float16, shape=(len(images), CHANNELS, SIDE, SIDE)
        )
        for begin in range(0, len(images), 250):
            out[begin : begin + 250] = transform(images[begin : begin + 250].float() / 255).numpy()
        out.flush()
        os.replace(unfinished, path)
    return np.load(path, mmap_mode="r")


def private_statistics(
    features: np.ndarray, noise_multiplier: float, path: Path, ledger: SpendLedger
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of each channel over all records, released by two Gaussian mechanisms.

    Each record gives the mean of its channels over the image, and the mean of their squares, each a vector of 81
    clipped to a norm. The sums get noise of `noise_multiplier` times this norm, and are divided by the number of
    records, which is public. They are drawn once for each run and stored in the file `path`: a killed run continues
    with the same ones. `ledger` is charged before they are drawn.

    The limits of Tramer and Boneh are medians of the norms of the private data, which leak, as they write. Here the
    limits are medians over scikit-learn's digits, which are public.
    """
    if not path.is_file():
        limits = _public_limits()
        sums = np.zeros((2, CHANNELS))
        for begin in range(0, len(features), 2000):
            moments = _moments(features[begin : begin + 2000])
            norms = np.linalg.norm(moments, axis=2, keepdims=True)
            sums += (moments / np.maximum(norms / limits[:, None, None], 1.0)).sum(axis=1)
        ledger.carry(NORMALIZATION, [(noise_multiplier, 1.0, len(sums))])
        noise = np.random.Generator(np.random.SFC64(secrets.randbits(256))).standard_normal(sums.shape)
        mean, square = (sums + noise_multiplier * limits[:, None] * noise) / len(features)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"unfinished-{path.name}")
        np.savez(unfinished, mean=mean, variance=np.maximum(square - mean**2, 0.0))
        os.replace(unfinished, path)
    with np.load(path) as kept:
        return kept["mean"], kept["variance"]


def _moments(features: np.ndarray) -> np.ndarray:
    """Means of the channels and of their squares over each image: float64 of shape (2, records, channels)."""
    values = features.reshape(len(features), CHANNELS, -1).astype(np.float64)
    return np.stack([values.mean(axis=2), (values**2).mean(axis=2)])


@functools.cache
def _public_limits() -> np.ndarray:
    """Medians of the norms of both moments over public images: float64 of shape (2,)."""
    public = Scattering()(digits().train[:500].float() / 255).numpy()
    return np.median(np.linalg.norm(_moments(public), axis=2), axis=1)
