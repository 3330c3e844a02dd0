"""`LoggedValues` computes means of the values that a module logs in the steps of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from trainstack.trainer.tracking.history import checked_value

Weighted = tuple[list[float], list[float]]
"""Values times their weights, and the weights."""

MeansOfLoaders = dict[str, list[list[float]]]
"""By name, the mean and the weight for each loader."""


@dataclass(slots=True)
class LoggedValue:
    """A value that a step has logged; its weight is known after the step."""

    name: str
    value: float | Tensor
    weight: float = 0.0


@dataclass(slots=True)
class LoggedValues:
    """The values that were logged in a pass over one loader, on this process.

    Attributes:
        values: the values in the order in which they were logged.
        weighted: the number of values with a weight.
    """

    values: list[LoggedValue] = field(default_factory=list)
    weighted: int = 0

    def add(self, name: str, value: float | Tensor) -> None:
        """Keep a value of the current step. A tensor is copied, and read after the pass.

        Raises:
            ConfigurationError: the value is not one number.
        """
        checked = checked_value(value, name)
        self.values.append(LoggedValue(name, checked.clone() if isinstance(checked, Tensor) else checked))

    @property
    def waits_for_weight(self) -> bool:
        """Whether values were logged since `weigh`."""
        return self.weighted < len(self.values)

    def weigh(self, weight: float) -> None:
        """Set the weight of the values of the current step, at its end."""
        for one in self.values[self.weighted :]:
            one.weight = weight
        self.weighted = len(self.values)

    def tensors(self) -> list[Tensor]:
        """The values that must be read from a device."""
        return [one.value for one in self.values if isinstance(one.value, Tensor)]

    def by_name(self, read: Sequence[float]) -> dict[str, Weighted]:
        """The values by name. `read` has the numbers of `tensors`. Values of weight 0 are omitted, also nan."""
        found, numbers = dict[str, Weighted](), iter(read)
        for one in self.values:
            number = next(numbers) if isinstance(one.value, Tensor) else one.value
            if one.weight:
                products, weights = found.setdefault(one.name, ([], []))
                products.append(number * one.weight)
                weights.append(one.weight)
        return found


def means_of(by_rank: Iterable[Mapping[str, Weighted]]) -> dict[str, tuple[float, float]]:
    """The mean and the weight of each name over all processes, as one sum and one weight."""
    joined = dict[str, Weighted]()
    for mine in by_rank:
        for name, (products, weights) in mine.items():
            all_products, all_weights = joined.setdefault(name, ([], []))
            all_products.extend(products)
            all_weights.extend(weights)
    totals = {name: math.fsum(weights) for name, (_, weights) in joined.items()}
    return {name: (divided_sum(joined[name][0], total), total) for name, total in totals.items()}


def add_loader(logged: MeansOfLoaders, means: Mapping[str, tuple[float, float]]) -> None:
    """Add the means over another loader, each with its weight, to `logged`."""
    for name, mean in means.items():
        logged.setdefault(name, []).append(list(mean))


def mean_of_loaders(means: Iterable[Sequence[float]]) -> float:
    """The mean over several loaders, each given as its mean and its weight."""
    means = list(means)
    if len(means) == 1:
        return means[0][0]
    return divided_sum([mean * weight for mean, weight in means], math.fsum(weight for _, weight in means))


def divided_sum(parts: Sequence[float], divisor: float) -> float:
    """The exact sum of `parts` over `divisor`; nan for inf and -inf together."""
    try:
        return math.fsum(parts) / divisor
    except ValueError:
        return math.nan
    except OverflowError:  # the sum exceeds the largest float; the quotient may not
        return sum(part / divisor for part in parts)
