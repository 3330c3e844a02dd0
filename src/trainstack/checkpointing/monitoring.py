"""Which checkpoint is the best: by a metric that lies in its manifest, and a direction."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trainstack.errors import ConfigurationError

if TYPE_CHECKING:
    from trainstack.checkpointing.directory import CheckpointInfo

Direction = Literal["min", "max"]

DEFAULT_MONITOR = "val/loss"

# What is long enough to mean one thing only counts anywhere in a word; the rest only as a whole, perhaps with a number.
_NAMES: dict[Direction, str] = {
    "min": ".*(perplexity|error|entropy|distance).*"
    "|(ppl|err|wer|cer|ter|eer|mae|mse|rmse|mape|nll|bpc|bpb|ece|fid)[0-9]*",
    "max": ".*(accuracy|precision|recall|rouge|bleu|ndcg|jaccard).*"
    "|(acc|auc|auroc|auprc|f1|f1score|m?ap|m?iou|dice|mrr|mcc|kappa|r2|chrf|psnr|ssim)[0-9]*",
}
_TURNED = frozenset({"neg", "negative", "inv", "inverse"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitor:
    """A metric, and whether low or high values of it are good. Make one with `Monitor.of`."""

    name: str
    mode: Direction

    @classmethod
    def of(cls, name: str, mode: str) -> Monitor:
        """Make one; `"auto"` reads the direction off the metric's name.

        Raises:
            ConfigurationError: the mode is none, or the name does not tell.
        """
        if mode not in ("auto", "min", "max"):
            raise ConfigurationError(f"mode={mode!r}: no such mode. Write 'min', 'max' or 'auto'.")
        direction = _direction_of(name) if mode == "auto" else mode
        if direction is None:
            raise ConfigurationError(
                f"monitor={name!r}: its name does not tell whether a low or a high value is good. Write mode='min' or "
                "mode='max' as well."
            )
        return cls(name=name, mode="min" if direction == "min" else "max")

    def value_of(self, info: CheckpointInfo) -> float | None:
        """The monitored value of a checkpoint; None if it has none, or one that is inf or nan and so never wins."""
        value = info.metrics.get(self.name)
        return value if value is not None and math.isfinite(value) else None

    def rank(self, infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
        """Those that have a value, the best first; of equal ones the older first."""
        sign = 1 if self.mode == "min" else -1
        valued = [(sign * value, info.sequence, info) for info in infos if (value := self.value_of(info)) is not None]
        return [info for *_, info in sorted(valued, key=lambda entry: entry[:2])]


def _direction_of(name: str) -> Direction | None:
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    if _TURNED & set(words):
        return None
    if any("loss" in word for word in words):  # the loss of an accuracy is a loss
        return "min"
    found: list[Direction] = [d for d in ("min", "max") if any(re.fullmatch(_NAMES[d], word) for word in words)]
    return found[0] if len(found) == 1 else None
