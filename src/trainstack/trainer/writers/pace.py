"""When to look at the clock and when to paint, so that a progress display costs next to nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LOOKS_PER_SECOND = 40
# A look costs about half a microsecond, so a longer stride would save nothing; it would only make the display
# stand still for longer when steps suddenly become slow.
_LONGEST_STRIDE = 128
_SHARE_OF_TIME = 0.01


class Pace:
    """Names the step to look at next (`next_look`) and says at a look whether painting is due.

    Two paints lie at least `interval` seconds apart, and so far that painting takes at most 1 % of the time.
    `clock` returns seconds. `due_at_once` makes the first look paint; otherwise it waits for `interval`.
    """

    def __init__(self, interval: float, *, due_at_once: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.next_look = 0
        self._interval = interval
        self._due = clock() + (0.0 if due_at_once else interval)
        self.start(0)

    def start(self, done: int) -> None:
        """A new count of steps begins, at `done`; when to paint next is not changed by it."""
        self._stride = 1
        self._last_done = done
        self._last_time = self.clock()
        self.next_look = done + 1

    def look(self, done: int) -> bool:
        """Set `next_look` to the step that is due in a 40th of a second; return whether to paint now."""
        now = self.clock()
        elapsed = now - self._last_time
        steps = done - self._last_done
        wanted = steps / (elapsed * _LOOKS_PER_SECOND) if elapsed > 0 else _LONGEST_STRIDE
        self._stride = max(1, min(int(wanted), 2 * self._stride, _LONGEST_STRIDE))
        self._last_time = now
        self._last_done = done
        self.next_look = done + self._stride
        return now >= self._due

    def is_due(self) -> bool:
        """Whether to paint now, asked outside the count of steps."""
        return self.clock() >= self._due

    @contextmanager
    def painting(self) -> Iterator[None]:
        """Time what is painted inside, and put off the next paint accordingly."""
        start = self.clock()
        try:
            yield
        finally:
            end = self.clock()
            self._due = end + max(self._interval, (end - start) / _SHARE_OF_TIME)
            self._last_time = end
