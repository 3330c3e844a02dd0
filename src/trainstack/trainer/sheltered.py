"""What signals do in the workers of a loader: nothing, as long as the training process has not stopped."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType


class Sheltered:
    """A `worker_init_fn` for loaders: a worker lives until the training process has stopped.

    Terminals, torchrun and schedulers send signals to whole groups of processes. A worker that died of one would make
    its loader raise in the middle of the step after which the run was to stop. So the first SIGTERM is let pass; the
    second, with which a loader ends a worker that does not hear, is obeyed.

    Args:
        then: the loader's own `worker_init_fn`.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        for name in ("SIGINT", "SIGUSR1"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _let_one_pass)
        if self._then is not None:
            self._then(worker)


def _let_one_pass(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
