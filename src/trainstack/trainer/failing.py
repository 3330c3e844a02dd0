"""Where in a run something failed: epoch, step, micro-batch, and which samples that held."""

from __future__ import annotations

from trainstack.trainer.run_state import RunState
from trainstack.trainer.training_data import TrainingData

_MOST_SHOWN = 64


def place_of_failure(state: RunState, data: TrainingData, position: int | None) -> str:
    """Where the step stood in which an exception was raised, worked out only now that it was.

    Args:
        state: of the run.
        data: of the run.
        position: the micro-batch in its step, from 0; None outside of forward and backward passes.
    """
    plan = data.plan
    place = f"in epoch {state.epoch}, global step {state.current_step}"
    if position is None:
        return place
    if plan.accumulation > 1:
        place += f", micro-batch {position} of {plan.accumulation}"
    indices = data.indices_under_way(state, position)
    if indices is None:
        return place
    shown = ", ".join(map(str, indices[:_MOST_SHOWN]))
    more = f", ... ({len(indices)} in all)" if len(indices) > _MOST_SHOWN else ""
    return f"{place}, with the samples {shown}{more} of the training data set"
