"""`Trace` records calls of user code, with copies of their values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Bits(NamedTuple):
    """The bits of a tensor or array."""

    dtype: str
    shape: tuple[int, ...]
    contiguous: bool
    data: bytes

    def __repr__(self) -> str:
        kind = getattr(torch, self.dtype.removeprefix("torch."), None)
        text = self.data.hex()
        if isinstance(kind, torch.dtype) and self.data:
            text = str(torch.frombuffer(bytearray(self.data), dtype=kind)[:6].tolist())
        return f"<{self.dtype} {list(self.shape)} {text}{'' if self.contiguous else ' not contiguous'}>"


def bits_of(value: Any) -> Any:
    """A copy of `value` for comparison bit by bit: tensors as bits, nan equal to itself, objects by attributes."""
    if isinstance(value, Tensor):
        kept = value.detach()
        kept = kept.full_tensor() if hasattr(kept, "full_tensor") else kept  # gathers a sharded one
        kept = kept.clone()  # torch does not free memory that numpy shares
        data = kept.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() if kept.numel() else b""
        return Bits(str(kept.dtype), tuple(kept.shape), kept.is_contiguous(), data)
    if isinstance(value, np.ndarray):
        return Bits(str(value.dtype), value.shape, value.flags.c_contiguous, value.tobytes())
    if isinstance(value, float):
        return repr(value)  # nan is equal to itself, 0.0 is not equal to -0.0
    if isinstance(value, Mapping):
        return {key: bits_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits_of(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: bits_of(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, SimpleNamespace):  # a dataclass of another rank
        return bits_of(vars(value))
    if value is None or isinstance(value, str | int):
        return value
    return type(value).__name__


class Trace:
    """The calls, in order.

    Attributes:
        entries: a tuple for each call: its kind, its name, and its arguments.
        muted: whether calls are neither recorded nor counted, as in a trial before the training.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []
        self.muted = False

    def add(self, kind: str, name: str, *given: Any) -> None:
        """Record a call."""
        if not self.muted:
            self.entries.append((kind, name, *map(bits_of, given)))

    @contextmanager
    def mute(self) -> Iterator[None]:
        """A block in which calls are not recorded."""
        before, self.muted = self.muted, True
        try:
            yield
        finally:
            self.muted = before
