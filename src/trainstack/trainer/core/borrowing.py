"""Borrowed micro-batches must not change logs, buffers and random states; the blocks here restore them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

from torch import nn

from trainstack.backends import Workload
from trainstack.trainer.core.module_snapshot import ModuleSnapshot
from trainstack.trainer.core.random_state import capture_rng, restore_rng
from trainstack.trainer.core.state import RunState


def muted_log(module: nn.Module, state: RunState) -> AbstractContextManager[None]:
    """Return a context manager in which `log` of `module` records nothing."""
    sink = getattr(module, "_log_sink", None)
    return nullcontext() if sink is None else cast(AbstractContextManager[None], sink.mute(state))


@contextmanager
def restored_after(work: Workload, state: RunState, snapshot: ModuleSnapshot) -> Iterator[Callable[[], None]]:
    """Context manager around a borrowed micro-batch; it restores random states and buffers at its end.

    It yields a function that saves the buffers. Call it after a layer has shared its buffers and before the module
    gets the batch.
    """
    device, kept = work.world.device, False
    rng = capture_rng(device)
    state.borrowed = True

    def begin() -> None:
        nonlocal kept
        snapshot.keep()
        kept = True

    try:
        yield begin
    finally:
        state.borrowed = False
        if kept:
            snapshot.restore()
        restore_rng(rng, device)
