"""`ClippingCheck` notices a run whose gradients are almost clipped away."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from trainstack.backends.workload import Clipping

_LEFT = 0.01
"""Of a gradient; a default that leaves less than this of nearly every gradient was probably not chosen."""
_NEARLY_EVERY = 0.9
_FEWEST_STEPS = 10
"""The first gradients of a run may be large for a good reason."""


class ClippingCheck:
    """Looks at the norms of the first log window, or of the first ten steps if it is shorter.

    Args:
        clipping: of the run.
    """

    is_over: bool

    def __init__(self, clipping: Clipping) -> None:
        self._limit = clipping.limit
        self._norms: list[float] = []
        self.is_over = clipping.kind != "norm"

    def add(self, norms: Sequence[float]) -> None:
        """Take norms before clipping, as they are read from the device at a log point."""
        self._norms += [norm for norm in norms if math.isfinite(norm)]

    def end_window(self) -> str | None:
        """The warning at the end of a log window; None where nothing is wrong or too little is known."""
        if self.is_over or len(self._norms) < _FEWEST_STEPS:
            return None
        self.is_over = True
        cut = sum(norm * _LEFT > self._limit for norm in self._norms)
        if cut < _NEARLY_EVERY * len(self._norms):
            return None
        typical = median(self._norms)
        return (
            f"the gradients are clipped to norm {self._limit:g}, and their median norm is {typical:.3g}: {cut} of the "
            f"first {len(self._norms)} global steps kept less than a hundredth of their gradient, so training may be "
            "very slow. Write clip_grads=False for no clipping, or a larger max_grad_norm."
        )
