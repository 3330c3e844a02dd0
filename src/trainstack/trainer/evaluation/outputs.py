"""`EvaluationOutputs`: the outputs and metrics of an evaluation, and the processes that keep them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal, TypeAlias

from trainstack.errors import ConfigurationError
from trainstack.trainer.tracking.views import table_html

Kept: TypeAlias = bool | Literal["main", "own"]
"""The processes that get the outputs of an evaluation: True for all, False for none, "main" for the main process, "own"
for the part of each process."""


def check_kept(asked: Any) -> None:
    """Refuse other values than those of `Kept`.

    Raises:
        ConfigurationError: `asked` is another value.
    """
    if not (isinstance(asked, bool) or asked in ("main", "own")):
        raise ConfigurationError(
            f"keep_outputs={asked!r}. Write True for all outputs on each process, 'main' for all on the main process, "
            "'own' for the part that each process has evaluated, or False."
        )


class EvaluationOutputs(dict[str, Any]):
    """Outputs of the steps by loader, joined in data set order.

    The outputs of a single loader are also found under their own keys or positions: `outputs["correct"]` is
    `outputs["default"]["correct"]`.

    Attributes:
        metrics: losses and metrics of the evaluation by the names of the history, such as "val/loss"; also results of
            metrics that are not one number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, Any] = {}

    def __missing__(self, key: Any) -> Any:
        """The item of the outputs of the only loader.

        Raises:
            KeyError: there are several loaders, or their outputs have no such item.
        """
        if len(self) == 1:
            with suppress(KeyError, IndexError, TypeError):
                return next(iter(self.values()))[key]
        raise KeyError(f"there is no {key!r}: the outputs are those of the loaders {', '.join(map(repr, self))}")

    def _repr_html_(self) -> str:
        """A table of the metrics, for notebooks."""
        return table_html(("metric", "value"), [(name, str(value)) for name, value in self.metrics.items()])
