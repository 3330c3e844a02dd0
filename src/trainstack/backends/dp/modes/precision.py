"""Float32 that is float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_float32() -> Iterator[None]:
    """No autocast, and products and convolutions of float32 tensors without TF32 or bfloat16, whatever is allowed."""
    cudnn, mkldnn = torch.backends.cudnn, torch.backends.mkldnn
    places: list[Any] = [cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul, mkldnn.conv, mkldnn.matmul]  # type: ignore[attr-defined]
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "ieee"
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision
