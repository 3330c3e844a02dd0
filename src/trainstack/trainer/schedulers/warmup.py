"""Warm-up schedules in closed form, as `LambdaLR` of torch.

`total_steps` and `warmup` count steps of the scheduler: global steps, unless its `SchedulerConfig` has another
interval. A whole number is a number of steps; a float below 1 is a fraction of `total_steps`, rounded. The k-th update
uses the value at step k - 1.
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
    """Rise from `start_ratio` over `warmup` steps, plateau, descent to `final_ratio` over the last `decay` steps.

    `k_decay` is the exponent of the progress of the descent. It is a callable object and not a function, because
    `LambdaLR` stores the attributes of callable objects in its state dict.
    """

    total_steps: int
    warmup: int
    decay: int
    start_ratio: float
    final_ratio: float
    shape: str
    k_decay: float = 1.0

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.start_ratio + (1.0 - self.start_ratio) * step / self.warmup
        done = step - (self.total_steps - self.decay)
        if done <= 0:
            return 1.0
        if done >= self.decay:
            return self.final_ratio
        return self.final_ratio + (1.0 - self.final_ratio) * _DESCENTS[self.shape]((done / self.decay) ** self.k_decay)


@dataclass
class _WarmupThenInverseRoot:
    warmup: int
    start_ratio: float

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.start_ratio + (1.0 - self.start_ratio) * step / self.warmup
        return math.sqrt(self.warmup / step)


def warmup_cosine(
    optimizer: Optimizer,
    total_steps: int,
    *,
    warmup: float = 0,
    cooldown: float = 0,
    start_ratio: float = 0.0,
    final_ratio: float = 0.0,
    start_lr: float | None = None,
    final_lr: float | None = None,
    k_decay: float = 1.0,
) -> LambdaLR:
    """Linear warm-up, then half a cosine (SGDR without restarts, Loshchilov and Hutter 2017), then constant.

    Args:
        optimizer: its learning rates are the peaks.
        total_steps: number of steps after which the rate stays at `final_ratio`.
        warmup: steps, or a fraction of `total_steps`.
        cooldown: steps at the end with the rate `final_ratio`, or a fraction of `total_steps`.
        start_ratio: rate of the first update as a fraction of the peak.
        final_ratio: rate at the end as a fraction of the peak.
        start_lr: a learning rate for all parameter groups, in place of `start_ratio`.
        final_lr: a learning rate for all parameter groups, in place of `final_ratio`.
        k_decay: exponent of the descent's progress (k-decay, Zhang and Li 2020); above 1 the rate stays high longer.

    Raises:
        ConfigurationError: a number is out of range, no step is left between warm-up and cool-down, or a rate is given
            twice.

    Examples:
        >>> optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        >>> scheduler = ts.schedulers.warmup_cosine(
        ...     optimizer, total_steps=100, warmup=10
        ... )
        >>> scheduler.get_last_lr()
        [0.0]
    """
    descent = _Descent("cosine", k_decay=k_decay, cooldown=cooldown, start_lr=start_lr, final_lr=final_lr)
    return _descending(optimizer, total_steps, warmup, None, start_ratio, final_ratio, descent)


def warmup_linear(
    optimizer: Optimizer,
    total_steps: int,
    *,
    warmup: float = 0,
    cooldown: float = 0,
    start_ratio: float = 0.0,
    final_ratio: float = 0.0,
    start_lr: float | None = None,
    final_lr: float | None = None,
) -> LambdaLR:
    """Linear warm-up, then a linear descent, then constant; arguments as in `warmup_cosine`.

    Examples:
        >>> optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        >>> scheduler = ts.schedulers.warmup_linear(
        ...     optimizer, total_steps=100, warmup=0.1, final_ratio=0.1
        ... )
    """
    descent = _Descent("linear", cooldown=cooldown, start_lr=start_lr, final_lr=final_lr)
    return _descending(optimizer, total_steps, warmup, None, start_ratio, final_ratio, descent)


def warmup_stable_decay(
    optimizer: Optimizer,
    total_steps: int,
    *,
    warmup: float = 0,
    decay: float = 0.1,  # as in Hu et al.
    start_ratio: float = 0.0,
    final_ratio: float = 0.0,
    shape: Literal["linear", "cosine", "sqrt"] = "linear",
) -> LambdaLR:
    """Linear warm-up, a plateau at the peak, and a descent at the end (WSD, Hu et al. 2024).

    Args:
        optimizer: its learning rates are the peaks.
        total_steps: number of steps after which the rate stays at `final_ratio`.
        warmup: steps, or a fraction of `total_steps`.
        decay: steps of the descent, or a fraction of `total_steps`.
        start_ratio: rate of the first update as a fraction of the peak.
        final_ratio: rate at the end as a fraction of the peak.
        shape: shape of the descent; "sqrt" is 1 - sqrt(x) (Hägele et al. 2024).

    Raises:
        ConfigurationError: a number is out of range, or warm-up and descent overlap.

    Examples:
        >>> optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        >>> scheduler = ts.schedulers.warmup_stable_decay(
        ...     optimizer, total_steps=100, warmup=10, decay=0.2, shape="sqrt"
        ... )
    """
    if shape not in _DESCENTS:
        raise ConfigurationError(f"shape={shape!r}: write one of {', '.join(map(repr, _DESCENTS))}.")
    return _descending(optimizer, total_steps, warmup, decay, start_ratio, final_ratio, _Descent(shape))


def inverse_sqrt(optimizer: Optimizer, *, warmup: int, start_ratio: float = 0.0) -> LambdaLR:
    """Linear warm-up over `warmup` steps, then the peak times sqrt(warmup / step) without end (Vaswani et al. 2017).

    Args:
        optimizer: its learning rates are the peaks.
        warmup: steps, 1 or more.
        start_ratio: rate of the first update as a fraction of the peak.

    Raises:
        ConfigurationError: `warmup` is not a whole number above 0, or `start_ratio` is out of range.

    Examples:
        >>> optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        >>> scheduler = ts.schedulers.inverse_sqrt(optimizer, warmup=10)
    """
    steps = _whole("warmup", warmup)
    return LambdaLR(optimizer, _WarmupThenInverseRoot(steps, _ratio("start_ratio", start_ratio)))


@dataclass(frozen=True)
class _Descent:
    """The arguments of a schedule's function that describe the descent."""

    shape: str
    k_decay: Any = 1.0
    cooldown: Any = 0
    start_lr: Any = None
    final_lr: Any = None


def _descending(
    optimizer: Optimizer, total_steps: Any, warmup: Any, decay: Any, start_ratio: Any, final_ratio: Any, how: _Descent
) -> LambdaLR:
    whole = _whole("total_steps", total_steps)
    up, level = _part("warmup", warmup, whole), _part("cooldown", how.cooldown, whole)
    total = whole - level
    if level and up >= total:
        raise ConfigurationError(
            f"warmup={warmup!r} ({up} steps) and cooldown={how.cooldown!r} ({level} steps) leave no step of "
            f"total_steps={whole} for the descent."
        )
    down = total - up if decay is None else _part("decay", decay, total)
    if up + down > total:
        raise ConfigurationError(
            f"warmup={warmup!r} ({up} steps) and decay={decay!r} ({down} steps) do not fit into total_steps={total}."
        )
    if isinstance(how.k_decay, bool) or not isinstance(how.k_decay, int | float) or not how.k_decay > 0:
        raise ConfigurationError(f"k_decay={how.k_decay!r}: write a number above 0.")
    peaks = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    starts = _ratios("start", start_ratio, how.start_lr, peaks)
    finals = _ratios("final", final_ratio, how.final_lr, peaks)
    shapes = [
        _WarmupThenDescent(total, up, down, start, final, how.shape, float(how.k_decay))
        for start, final in zip(starts, finals, strict=True)
    ]
    return LambdaLR(optimizer, shapes)  # type: ignore[arg-type]  # torch 2.13.0: annotated as a list of functions


def _ratios(name: str, ratio: Any, rate: Any, peaks: list[Any]) -> list[float]:
    """Return the fraction of the peak for each parameter group, from one fraction for all or from a learning rate."""
    if rate is None:
        return [_ratio(f"{name}_ratio", ratio)] * len(peaks)
    if ratio != 0.0:
        raise ConfigurationError(f"{name}_ratio={ratio!r} and {name}_lr={rate!r} contradict each other. Write one.")
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0.0 <= rate <= min(map(float, peaks)):
        raise ConfigurationError(
            f"{name}_lr={rate!r}: write a learning rate from 0.0 to that of the optimizer, {min(map(float, peaks))}."
        )
    return [rate / float(peak) if peak else 0.0 for peak in peaks]


def _whole(name: str, value: Any) -> int:
    if not _is_whole(value) or operator.index(value) < 1:
        hint = " The plan has no such number if the length of an epoch is unknown." if value is None else ""
        raise ConfigurationError(f"{name}={value!r}: write a whole number of steps, 1 or more.{hint}")
    return operator.index(value)


def _is_whole(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _part(name: str, value: Any, total: int) -> int:
    """Convert a number of steps or a fraction of `total` to steps."""
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
