"""What an evaluation gives: outputs by loader, and the values of its metrics."""

from __future__ import annotations

from typing import Any


class EvaluationOutputs(dict[str, Any]):
    """Outputs of the steps by loader, joined in data set order.

    Attributes:
        metrics: losses and metrics of the evaluation by name, as the history has them when they are recorded, such as
            "val/loss"; also what is not one number, as the metric gave it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, Any] = {}
