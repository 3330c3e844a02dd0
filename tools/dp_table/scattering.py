"""The scattering transform of images, by FFT: the features of Tramer and Boneh 2021.

Two layers of Morlet wavelets at scales `2^0` and `2^1` in 8 directions, each followed by the modulus, then a Gaussian
low-pass filter and subsampling by 4: Bruna and Mallat 2013 (arXiv 1203.1513), Oyallon and Mallat 2015 (arXiv
1412.8659). Filters, padding and subsampling are those of `kymatio.torch.Scattering2D(J=2, shape=(28, 28))` 0.3.0. Its
features of random images in [0, 1], which are at most 0.7, differ by at most 2e-5: kymatio writes 3.1415 for pi.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

SCALES, DIRECTIONS, PADDED = 2, 8, 36
"""J, L, and the side of the padded image: a multiple of 4 with at least 4 pixels on each side of 28."""
CHANNELS = 1 + SCALES * DIRECTIONS + DIRECTIONS**2  # = 81


def _gabor(sigma: float, theta: float, xi: float, slant: float) -> np.ndarray:
    """A Gaussian envelope times a plane wave, made periodic: complex of shape (36, 36)."""
    cos, sin = math.cos(theta), math.sin(theta)
    rotation = np.array([[cos, -sin], [sin, cos]])
    curve = rotation @ np.diag([1.0, slant**2]) @ rotation.T / (2 * sigma**2)
    line = np.arange(-2 * PADDED, 3 * PADDED)
    x, y = np.meshgrid(line, line, indexing="ij")
    exponent = -(curve[0, 0] * x * x + 2 * curve[0, 1] * x * y + curve[1, 1] * y * y) + 1j * xi * (x * cos + y * sin)
    tiles = np.exp(exponent).reshape(5, PADDED, 5, PADDED)
    return tiles.sum(axis=(0, 2)) / (2 * math.pi * sigma**2 / slant)


def _morlet(scale: int, direction: int) -> np.ndarray:
    """The Fourier transform of a wavelet: a Gabor function minus a multiple of its envelope, with mean zero."""
    theta = (DIRECTIONS // 2 - 1 - direction) * math.pi / DIRECTIONS
    sigma, xi, slant = 0.8 * 2**scale, 0.75 * math.pi / 2**scale, 4 / DIRECTIONS
    wave, envelope = _gabor(sigma, theta, xi, slant), _gabor(sigma, theta, 0.0, slant)
    return np.fft.fft2(wave - envelope * (wave.sum() / envelope.sum())).real


def _at_half_resolution(spectrum: np.ndarray) -> np.ndarray:
    """The filter for images subsampled by 2: its low frequencies."""
    quarter, half = PADDED // 4, PADDED // 2
    low = np.r_[0:quarter, PADDED - half + quarter : PADDED]
    return spectrum[np.ix_(low, low)]


class Scattering:
    """Computes features of images."""

    def __init__(self) -> None:
        psi = np.stack([[_morlet(scale, direction) for direction in range(DIRECTIONS)] for scale in range(SCALES)])
        phi = np.fft.fft2(_gabor(0.8 * 2 ** (SCALES - 1), 0.0, 0.0, 1.0)).real
        self._psi = torch.from_numpy(psi).float()
        self._phi = [torch.from_numpy(part).float() for part in (phi, _at_half_resolution(phi))]

    def __call__(self, images: Tensor) -> Tensor:
        """Features of `images`.

        Args:
            images: float32 of shape (records, 28, 28), values in [0, 1].

        Returns:
            Float32 of shape (records, 81, 7, 7).
        """
        margin = (PADDED - 28) // 2
        padded = torch.nn.functional.pad(images[:, None], (margin,) * 4, mode="reflect")
        spectrum = torch.fft.fft2(padded)
        fine = torch.fft.fft2(_filtered(spectrum, self._psi[0], 1).abs())
        coarse = torch.fft.fft2(_filtered(spectrum, self._psi[1], 2).abs())
        second = [torch.fft.fft2(_filtered(fine[:, n : n + 1], self._psi[1], 2).abs()) for n in range(DIRECTIONS)]
        orders = [
            _filtered(spectrum, self._phi[0], 4),
            _filtered(fine, self._phi[0], 4),
            _filtered(coarse, self._phi[1], 2),
            *(_filtered(part, self._phi[1], 2) for part in second),
        ]
        return torch.cat([order.real for order in orders], dim=1)[:, :, 1:-1, 1:-1].contiguous()


def _filtered(spectrum: Tensor, filters: Tensor, step: int) -> Tensor:
    """The image of `spectrum`, filtered and subsampled by `step`, which folds its spectrum."""
    product = spectrum * filters
    *lead, height, width = product.shape
    folded = product.reshape(*lead, step, height // step, step, width // step).mean(dim=(-4, -2))
    return torch.fft.ifft2(folded)
