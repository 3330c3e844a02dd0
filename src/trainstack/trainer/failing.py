"""Where in a run something failed: epoch, step, micro-batch, and which samples that held."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainstack.trainer.run import Run

_MOST_SHOWN = 64


def place_of_failure(run: Run) -> str:
    """Where the step stood in which an exception was raised, worked out only now that it was."""
    state, plan, position = run.state, run.data.plan, run.loop.failed_in
    place = f"in epoch {state.epoch}, global step {state.current_step}"
    if position is None:  # not in a forward or backward pass
        return place
    if plan.accumulation > 1:
        place += f", micro-batch {position} of {plan.accumulation}"
    indices = run.data.indices_under_way(state, position)
    if indices is None:
        return place
    shown = ", ".join(map(str, indices[:_MOST_SHOWN]))
    more = f", ... ({len(indices)} in all)" if len(indices) > _MOST_SHOWN else ""
    return f"{place}, with the samples {shown}{more} of the training data set"
