"""A step of evaluation that returns a plain number where its loss is looked for."""

from __future__ import annotations

from dataclasses import is_dataclass
from numbers import Real
from typing import Any

from trainstack.stage import Stage


def what_is_no_loss(outputs: Any, stage: Stage) -> str | None:
    """What to say of a number that stands in the place of the loss; None where none does, and for predictions."""
    loss = _in_place_of_loss(outputs)
    if stage is Stage.PREDICT or isinstance(loss, bool) or not isinstance(loss, Real):
        return None
    name = stage.name.lower()
    return (
        f"{name}_step returned a {type(loss).__name__} where its loss is looked for, and only a tensor is taken: no "
        f"{name}/loss is recorded. Return the tensor itself, without .item() or float()."
    )


def _in_place_of_loss(outputs: Any) -> Any:
    if isinstance(outputs, dict):
        return outputs.get("loss")
    if isinstance(outputs, tuple | list):
        return outputs[0] if outputs else None
    return getattr(outputs, "loss", None) if is_dataclass(outputs) else outputs
