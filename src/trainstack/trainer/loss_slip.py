"""A step of evaluation that returns a plain number where its loss is looked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from numbers import Real
from typing import Any

from trainstack.stage import Stage

Look = Callable[[Any, Any], None]


def looking_at_the_first(also: Look | None, stage: Stage, say: Callable[[str], None]) -> Look | None:
    """`also`, called with outputs and batch, that says at the first batch what is wrong with the step's loss.

    Nothing is said of a step that returns no loss at all, nor of predictions.
    """
    if stage is Stage.PREDICT:
        return also
    looked = False

    def look(outputs: Any, batch: Any) -> None:
        nonlocal looked
        if not looked:
            looked, loss = True, _in_place_of_loss(outputs)
            if isinstance(loss, Real) and not isinstance(loss, bool):
                name = stage.name.lower()
                say(
                    f"{name}_step returned a {type(loss).__name__} where its loss is looked for, and only a tensor is "
                    f"taken: no {name}/loss is recorded. Return the tensor itself, without .item() or float()."
                )
        if also is not None:
            also(outputs, batch)

    return look


def _in_place_of_loss(outputs: Any) -> Any:
    if isinstance(outputs, dict):
        return outputs.get("loss")
    if isinstance(outputs, tuple | list):
        return outputs[0] if outputs else None
    return getattr(outputs, "loss", None) if is_dataclass(outputs) else outputs
