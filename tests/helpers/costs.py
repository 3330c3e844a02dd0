"""Comparing CPU times so that noise alone cannot fail a test.

Noise adds to a CPU time and never subtracts from it: other processes empty the caches, and a virtual machine counts the
time that its host takes away. So the least of several rounds is nearest to the cost, and more rounds come nearer.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable

FEWEST, MOST = 4, 40
"""Rounds: a lucky first one does not pass a test, and only the last one fails it."""


def cpu_s(function: Callable[[], object]) -> float:
    """CPU seconds of all threads of this process during one call."""
    gc.collect()
    began = time.process_time()
    function()
    return time.process_time() - began


def least_ratio(mine: Callable[[], float], base: Callable[[], float], bound: float) -> float:
    """The cost of `mine` as a multiple of the cost of `base`: the least of each over interleaved rounds.

    Args:
        mine, base: run once and return a cost, such as `cpu_s` does.
        bound: ends the rounds as soon as the ratio is not above it. A ratio above it comes from 40 rounds.
    """
    least = {mine: math.inf, base: math.inf}
    for number in range(1, MOST + 1):
        for contender in (mine, base) if number % 2 else (base, mine):
            least[contender] = min(least[contender], contender())
        if number >= FEWEST and least[mine] <= bound * least[base]:
            break
    return least[mine] / least[base]


def least(cost: Callable[[], float], bound: float) -> float:
    """The least cost over rounds, which end as soon as it is below `bound`; for bounds far above the cost."""
    found = math.inf
    for _ in range(MOST):
        found = min(found, cost())
        if found < bound:
            break
    return found
