"""`DifferentialPrivacyArguments` with PyMarlin's order and defaults."""

from __future__ import annotations

import math
from typing import Any

import trainstack as ts
from trainstack.compat.pymarlin.utils.mutable import Mutable
from trainstack.errors import ConfigurationError


class DifferentialPrivacyArguments(Mutable, ts.DifferentialPrivacyArguments):
    """`trainstack.DifferentialPrivacyArguments` by position as in PyMarlin.

    Args:
        noise_multiplier: None where `target_epsilon` is given.
        sample_rate: 0.0 derives it from batch and data set; another value is compared with that.
        delta: has to be given, below one over the number of records.
        target_delta: another name of `delta`.
        **more: other arguments of trainstack's class.
    """

    def __init__(
        self,
        noise_multiplier: float | None = 1.0,
        per_sample_max_grad_norm: Any = 1.0,
        sample_rate: float | None = 0.0,
        delta: float | None = None,
        **more: Any,
    ) -> None:
        if more.get("target_epsilon") is not None and noise_multiplier == 1.0:  # PyMarlin's default
            noise_multiplier = None
        super().__init__(
            noise_multiplier=noise_multiplier,
            per_sample_max_grad_norm=per_sample_max_grad_norm,
            sample_rate=sample_rate or None,
            delta=math.nan if delta is None else delta,
            **more,
        )


class NoDPWrap:
    """PyMarlin's mark of an optimizer without noise. It cannot be made, since its parameters would not be private."""

    def __init__(self, optimizer: Any) -> None:
        raise ConfigurationError(
            "NoDPWrap leaves an optimizer without noise, so its parameters reveal the records. Leave these parameters "
            "out of training, with requires_grad_(False), or let the optimizer step privately without NoDPWrap."
        )
