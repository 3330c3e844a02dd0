"""`bind_borrowed_pass` runs a micro-batch that does not change the state of this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from trainstack.backends import Borrowed, Workload
from trainstack.backends.losses import find_loss, loss_item
from trainstack.stage import Stage
from trainstack.trainer.core.borrowing import muted_log, restored_after
from trainstack.trainer.core.module_snapshot import ModuleSnapshot
from trainstack.trainer.core.state import RunState
from trainstack.trainer.evaluation.collector import OutputCollector

BorrowedPass = Callable[[Borrowed, Workload, bool, Callable[..., Any], Callable[..., Any]], None]


def bind_borrowed_pass(
    accumulate: Callable[[Workload, bool], AbstractContextManager[Any]],
    work: Workload,
    state: RunState,
    collectors: Sequence[OutputCollector],
    end_backward: Callable[..., Any] | None,
) -> BorrowedPass:
    """Return a function that runs a borrowed micro-batch.

    It runs the passes, hooks and collectives of a real micro-batch, with weight 0. Buffers, random states, logs and
    outputs are restored. Plain attributes that user code writes are not.

    Args:
        accumulate: the verb.
        work, state: the workload and the counters of the loop.
        collectors: receive the structure of the outputs, without rows.
        end_backward: called after the backward pass; may be None.
    """
    snapshot = ModuleSnapshot(work.module)

    def run(
        borrowed: Borrowed, work: Workload, last: bool, forward: Callable[..., Any], backward: Callable[..., Any]
    ) -> None:
        number = state.global_step + 1
        with muted_log(work.module, state):
            with restored_after(work, state, snapshot) as begin, accumulate(work, last):
                outputs = forward(work, Stage.TRAIN, Borrowed(borrowed.batch, begin), number)
                loss = _loss_of(outputs)
                backward(work, loss, 0.0)
            for collector in collectors:
                collector.collect_structure(outputs)
            if end_backward is not None:  # in the last pass, its gradients are the same on all ranks
                end_backward(number, loss)
        state.micro_batch += 1

    return run


def _loss_of(outputs: Any) -> Tensor:
    """The loss. A layer that computes gradients of single records returns it without a graph."""
    loss = loss_item(outputs)
    if isinstance(loss, Tensor) and not loss.requires_grad:
        return loss.mean() if loss.dim() else loss
    return find_loss(outputs)
