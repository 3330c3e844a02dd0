"""A step of evaluation that returns a plain number where its loss is looked for."""

from __future__ import annotations

from typing import Any

from trainstack.backends.losses import RETURN_THE_TENSOR, is_number, loss_item
from trainstack.stage import Stage


def what_is_no_loss(outputs: Any, stage: Stage) -> str | None:
    """The warning for a plain number in the place of the loss; None where there is none, and for predictions."""
    loss = loss_item(outputs)
    if stage is Stage.PREDICT or not is_number(loss):
        return None
    name = stage.name.lower()
    return (
        f"{name}_step returned a {type(loss).__name__} where its loss is looked for, and only a tensor is taken: no "
        f"{name}/loss is recorded. {RETURN_THE_TENSOR}"
    )
