"""How long tests wait for something that must happen."""

from __future__ import annotations

import os

_FACTOR = 6.0


def patience(seconds: float) -> float:
    """A time-out for work that takes less than `seconds` on an idle machine, so that it holds on a busy one.

    Use it for upper bounds only: they cost nothing where the work is done in time. The factor is 6, or the number of
    runnable processes per core where that is larger.
    """
    return seconds * max(_FACTOR, os.getloadavg()[0] / (os.cpu_count() or 1))
