"""Warm-up schedules as plain torch schedulers in closed form.

`total_steps` and `warmup` count steps of the scheduler: global steps, unless its interval is another. A whole number
is so many steps; a float below 1 is a fraction of `total_steps`, rounded. The k-th update uses the value at step k - 1.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from trainstack.errors import ConfigurationError

_DESCENTS: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)),
    "sqrt": lambda x: 1.0 - math.sqrt(x),
}


@dataclass
class _WarmupThenDescent:
    """Up from `start_ratio` over `warmup` steps, level, and down to `final_ratio` over the last `decay` steps.

    A callable object, so that `LambdaLR` keeps its numbers in the state dict.
    """

    total_steps: int
    warmup: int
    decay: int
    start_ratio: float
    final_ratio: float
    shape: str

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.start_ratio + (1.0 - self.start_ratio) * step / self.warmup
        done = step - (self.total_steps - self.decay)
        if done <= 0:
            return 1.0
        if done >= self.decay:
            return self.final_ratio
        return self.final_ratio + (1.0 - self.final_ratio) * _DESCENTS[self.shape](done / self.decay)


@dataclass
class _WarmupThenInverseRoot:
    warmup: int
    start_ratio: float

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.start_ratio + (1.0 - self.start_ratio) * step / self.warmup
        return math.sqrt(self.warmup / step)


def warmup_cosine(
    optimizer: Optimizer, total_steps: int, *, warmup: float = 0, start_ratio: float = 0.0, final_ratio: float = 0.0
) -> LambdaLR:
    """Linear warm-up, then half a cosine (SGDR without restarts, Loshchilov and Hutter 2017).

    Args:
        optimizer: its learning rates are the peaks.
        total_steps: after which `final_ratio` is reached and kept.
        warmup: steps, or a fraction of `total_steps`.
        start_ratio: of the peak, in the first update.
        final_ratio: of the peak, at the end.

    Raises:
        ConfigurationError: a number is out of range.
    """
    return _descending(optimizer, total_steps, warmup, None, start_ratio, final_ratio, "cosine")


def warmup_linear(
    optimizer: Optimizer, total_steps: int, *, warmup: float = 0, start_ratio: float = 0.0, final_ratio: float = 0.0
) -> LambdaLR:
    """Linear warm-up, then a straight line down; arguments as in `warmup_cosine`."""
    return _descending(optimizer, total_steps, warmup, None, start_ratio, final_ratio, "linear")


def warmup_stable_decay(
    optimizer: Optimizer,
    total_steps: int,
    *,
    warmup: float = 0,
    decay: float = 0.1,
    start_ratio: float = 0.0,
    final_ratio: float = 0.0,
    shape: Literal["linear", "cosine", "sqrt"] = "linear",
) -> LambdaLR:
    """Linear warm-up, a plateau at the peak, and a descent at the end (WSD, Hu et al. 2024).

    Args:
        optimizer: its learning rates are the peaks.
        total_steps: after which `final_ratio` is reached and kept.
        warmup: steps, or a fraction of `total_steps`.
        decay: length of the descent; likewise.
        start_ratio: of the peak, in the first update.
        final_ratio: of the peak, at the end.
        shape: of the descent; "sqrt" is 1 - sqrt(x) (Hägele et al. 2024).

    Raises:
        ConfigurationError: a number is out of range, or warm-up and descent overlap.
    """
    if shape not in _DESCENTS:
        raise ConfigurationError(f"shape={shape!r}: write one of {', '.join(map(repr, _DESCENTS))}.")
    return _descending(optimizer, total_steps, warmup, decay, start_ratio, final_ratio, shape)


def inverse_sqrt(optimizer: Optimizer, *, warmup: int, start_ratio: float = 0.0) -> LambdaLR:
    """Linear warm-up over `warmup` steps, then the peak times sqrt(warmup / step) without end (Vaswani et al. 2017).

    Raises:
        ConfigurationError: `warmup` is not a whole number of at least 1, or `start_ratio` is out of range.
    """
    steps = _whole("warmup", warmup)
    return LambdaLR(optimizer, _WarmupThenInverseRoot(steps, _ratio("start_ratio", start_ratio)))


def _descending(
    optimizer: Optimizer, total_steps: Any, warmup: Any, decay: Any, start_ratio: Any, final_ratio: Any, shape: str
) -> LambdaLR:
    total = _whole("total_steps", total_steps)
    up = _part("warmup", warmup, total)
    down = total - up if decay is None else _part("decay", decay, total)
    if up + down > total:
        raise ConfigurationError(
            f"warmup={warmup!r} ({up} steps) and decay={decay!r} ({down} steps) do not fit into total_steps={total}."
        )
    ratios = _ratio("start_ratio", start_ratio), _ratio("final_ratio", final_ratio)
    return LambdaLR(optimizer, _WarmupThenDescent(total, up, down, *ratios, shape))


def _whole(name: str, value: Any) -> int:
    if not _is_whole(value) or operator.index(value) < 1:
        hint = " The plan has none where the length of an epoch is unknown." if value is None else ""
        raise ConfigurationError(f"{name}={value!r}: write a whole number of steps, 1 or more.{hint}")
    return operator.index(value)


def _is_whole(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _part(name: str, value: Any, total: int) -> int:
    """Steps, from steps or a fraction of `total`."""
    if isinstance(value, float) and 0.0 <= value < 1.0:
        return round(value * total)
    if not _is_whole(value) or not 0 <= operator.index(value) <= total:
        raise ConfigurationError(
            f"{name}={value!r}: write a whole number of steps from 0 to total_steps={total}, or a fraction of them as "
            "a float from 0.0 to below 1.0."
        )
    return operator.index(value)


def _ratio(name: str, value: Any) -> float:
    number = float(value)
    if not 0.0 <= number <= 1.0:
        raise ConfigurationError(f"{name}={value!r}: write a multiple of the peak learning rate from 0.0 to 1.0.")
    return number
