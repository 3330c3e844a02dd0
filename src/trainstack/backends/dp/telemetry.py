"""`Telemetry` releases metrics of the training as further coordinates of the clipped sum.

The vector of a record is its clipped gradient, of norm at most C, and for each metric k the number `a_k C s_k` with s_k
in [-1, 1]. Its norm is at most `C sqrt(1 + sum a_k^2)`. Gaussian noise of sigma times that on every coordinate is one
Gaussian mechanism with multiplier sigma, so the account does not change. The count of adaptive clipping is such a
coordinate: Andrew et al.: Differentially Private Learning with Adaptive Clipping (2019, arXiv 1905.03871), theorem 1.

The sums are divided by the expected batch size, a constant. Everything else here is computed from the noisy values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from trainstack.backends.base import Window
from trainstack.backends.dp.arguments import SMALLEST_LIMIT, DifferentialPrivacyArguments, PrivacyPlan
from trainstack.backends.dp.clipping import AdaptiveClipper, Clipper
from trainstack.backends.dp.modes.base import GradientMode, Run
from trainstack.errors import PrivacyError

_MEDIAN = "grad_norm_p50"


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinate:
    """One number of a record, in [-1, 1].

    Attributes:
        name: of the metric that it becomes.
        source: "loss", "grad_norm", or a key of the outputs of `train_step`.
        low, high: the range that becomes [-1, 1]. Of the norm: `low` is 0 and `high` 1, for a share.
        threshold: of the norm; the number is 1 up to it and -1 above.
    """

    name: str
    source: str
    low: float
    high: float
    threshold: float | None = None

    def value(self, mean: float) -> float:
        """The mean in the units of the metric."""
        return (self.low + self.high) / 2 + mean * (self.high - self.low) / 2


def coordinates_of(args: DifferentialPrivacyArguments) -> tuple[Coordinate, ...]:
    """The coordinates for `args.telemetry`."""
    found = []
    for name, values in args.telemetry.items():
        if name == "grad_norm":
            for threshold in values:
                label = f"grad_norm_below_{threshold:g}"
                found.append(Coordinate(name=label, source=name, low=0.0, high=1.0, threshold=float(threshold)))
        else:
            found.append(Coordinate(name=name, source=name, low=float(values[0]), high=float(values[1])))
    return tuple(found)


def released_names(args: DifferentialPrivacyArguments) -> tuple[str, ...]:
    """The names of the metrics that a run with `args` releases with noise."""
    names = [one.name for one in coordinates_of(args)]
    return tuple([*names, _MEDIAN] if len(args.telemetry.get("grad_norm", ())) > 1 else names)


class Telemetry:
    """Metrics of single records on their way through the mechanism of one run.

    Args:
        args: the metrics, and their share of the sensitivity.
        plan: the noise and the expected batch size.
        clipper: of the gradients; an `AdaptiveClipper` has a count, which becomes the first coordinate.
        one_by_one: whether each record's outputs are computed from it alone.

    Attributes:
        stretch: the joint sensitivity over that of the gradients alone.

    Raises:
        PrivacyError: there is telemetry, and in this mode a record might change the values of others.
    """

    stretch: float

    def __init__(
        self, args: DifferentialPrivacyArguments, plan: PrivacyPlan, clipper: Clipper, *, one_by_one: bool
    ) -> None:
        self._args, self._plan, self._coordinates = args, plan, coordinates_of(args)
        if self._coordinates and not one_by_one:
            raise PrivacyError(
                f"telemetry with grad_mode={args.grad_mode!r}: train_step sees the whole batch there, so a record "
                "might change the values of others. Write grad_mode='vmap'."
            )
        self._adaptive = clipper if isinstance(clipper, AdaptiveClipper) else None
        weight, sigma = args.telemetry_weight, plan.noise_multiplier
        weights = [weight] * len(self._coordinates)
        deviations = [sigma / weight] * len(self._coordinates)
        if self._adaptive is not None:
            # A twentieth of the batch, as Andrew et al. recommend; at least sigma, since it must be above half of that.
            count_noise = args.count_noise_multiplier or max(plan.expected_batch_size / 20, sigma)
            alone = math.sqrt(4 * count_noise**2 - sigma**2)  # of 2 (count - records / 2), before the stretch
            weights.insert(0, sigma / alone)
            deviations.insert(0, alone if sigma else 0.0)
        self.stretch = math.sqrt(1 + sum(weight**2 for weight in weights))
        self._deviations = [self.stretch * deviation for deviation in deviations]
        self._sums, self._observed = torch.zeros(len(self._coordinates)), 0
        self._windows = {window: _Window(len(self._coordinates)) for window in ("interval", "epoch")}

    @property
    def is_observing(self) -> bool:
        """Whether anything of a record is wanted but its gradient."""
        return bool(self._coordinates)

    @property
    def deviations(self) -> list[float]:
        """The standard deviation of the noise on each coordinate of `pop_sums`, whose values are in [-1, 1]."""
        return self._deviations

    def try_out(self, mode: GradientMode, run: Run, batch: Any, records: int) -> None:
        """Check that `train_step` returns the values of `args.telemetry`; the sums are forgotten.

        Raises:
            PrivacyError: it does not, or they are not those of single records.
        """
        if not self._coordinates:
            return
        mode.observer = self.observe
        try:
            mode.add(run, batch, records)
            self.check_observed(records)
        finally:
            mode.observer = None
            mode.pop_sums()
            self.pop_sums(torch.device("cpu"))

    def observe(self, losses: Tensor, norms: Tensor, outputs: Any) -> None:
        """Add the values of a micro-batch to the sums of the step: an `Observer`.

        A value that is nan adds 0, one that is inf counts as the end of its range.
        """
        records = len(losses)
        rows = []
        for one, values in zip(self._coordinates, self.values(losses, norms, outputs), strict=True):
            if one.threshold is not None:
                rows.append(torch.where(values <= one.threshold, 1.0, -1.0))
            else:
                half = (one.high - one.low) / 2
                rows.append(((values.float() - one.low) / half - 1.0).clamp(-1.0, 1.0).nan_to_num(nan=0.0))
        self._sums = self._sums.to(norms.device) + torch.stack(rows).sum(1)
        self._observed += records

    def values(self, losses: Tensor, norms: Tensor, outputs: Any) -> list[Tensor]:
        """The values of a micro-batch in the units of the metrics, `(records,)` for each coordinate."""
        found = {"loss": losses, "grad_norm": norms}
        return [
            found[one.source] if one.source in found else _values(outputs, one.source, len(losses), norms.device)
            for one in self._coordinates
        ]

    def check_observed(self, records: int) -> None:
        """Refuse a micro-batch of which a record was not observed, or twice.

        Raises:
            PrivacyError: without the two numbers, which would show the size of a sample.
        """
        observed, self._observed = self._observed, 0
        if self._coordinates and observed != records:
            raise PrivacyError(
                f"telemetry does not see each record of a micro-batch once with grad_mode={self._args.grad_mode!r}. "
                "Write grad_mode='vmap'."
            )

    def pop_sums(self, device: torch.device) -> Tensor:
        """The sums over the records of the step, float32, one for each of `deviations`; they begin at zero again."""
        sums, self._sums, self._observed = self._sums.to(device), torch.zeros(len(self._coordinates)), 0
        if self._adaptive is None:
            return sums
        return torch.cat([2 * self._adaptive.pop_counts().to(device).reshape(1), sums])

    def release(self, means: Tensor) -> None:
        """Take the noisy sums of a step over the expected batch size, which may be read by anybody."""
        if self._adaptive is not None:
            unclipped = 0.5 + float(means[0]) / 2
            factor = math.exp(-self._args.clip_learning_rate * (unclipped - self._args.target_quantile))
            self._adaptive.limit = max(self._adaptive.limit * factor, SMALLEST_LIMIT)
            means = means[1:]
        if self._coordinates:
            for window in self._windows.values():
                window.add(means)

    def pop(self, window: Window) -> dict[str, float]:
        """The metrics over the steps since the last call for this window, by name; empty if there was none."""
        means = self._windows[window].pop()
        if means is None:
            return {}
        found = {one.name: one.value(mean) for one, mean in zip(self._coordinates, means, strict=True)}
        shares = [(one.threshold, found[one.name]) for one in self._coordinates if one.threshold is not None]
        return found if len(shares) < 2 else {**found, _MEDIAN: _median(shares)}

    def plan_rows(self) -> list[tuple[str, str]]:
        """The cost and the standard errors of telemetry, for the printed plan; no row without telemetry."""
        if not self._coordinates:
            return []
        batch, lines = self._plan.expected_batch_size, []
        noise, drawn = self._deviations[-1] / batch, math.sqrt((1 - self._plan.sample_rate) / batch)
        for name, values in self._args.telemetry.items():
            half = 0.5 if name == "grad_norm" else (values[1] - values[0]) / 2
            numbers = ", ".join(f"{value:g}" for value in values)
            title = f"shares of gradient norms up to {numbers}" if name == "grad_norm" else f"{name} in ({numbers})"
            lines.append(f"{title}: +- {half * noise:.2g} a step by noise, at most +- {half * drawn:.2g} by sampling")
        lines.append(f"raises the noise of the gradient by {100 * (self.stretch - 1):.2g} %")
        return [("telemetry", "\n".join(lines))]

    def get_state(self) -> dict[str, Any]:
        """The running sums of noisy values."""
        windows = {name: window.get_state() for name, window in self._windows.items()}
        return {"names": [one.name for one in self._coordinates], **windows}

    def update_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of `get_state`, if it is about the same metrics."""
        if state.get("names") == [one.name for one in self._coordinates]:
            for name, window in self._windows.items():
                window.update_state(state[name])


class _Window:
    """A running sum of noisy values over steps."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._clear()

    def _clear(self) -> None:
        self._sums, self._steps = torch.zeros(self._count), 0

    def add(self, means: Tensor) -> None:
        self._sums, self._steps = self._sums.to(means.device) + means, self._steps + 1

    def pop(self) -> list[float] | None:
        sums, steps = self._sums, self._steps
        self._clear()
        return [value / steps for value in sums.tolist()] if steps else None

    def get_state(self) -> dict[str, Any]:
        return {"sums": self._sums.tolist(), "steps": self._steps}

    def update_state(self, state: Mapping[str, Any]) -> None:
        self._sums, self._steps = torch.tensor(state["sums"]), int(state["steps"])


def _values(outputs: Any, key: str, records: int, device: torch.device) -> Tensor:
    """The values under `key` in the outputs of `train_step`, of shape `(records,)`.

    Raises:
        PrivacyError: there is no such key, or not one number for each record.
    """
    found = outputs.get(key) if isinstance(outputs, Mapping) else getattr(outputs, key, None)
    if not isinstance(found, Tensor):
        has = f"a dict with the keys {list(outputs)}" if isinstance(outputs, Mapping) else f"a {type(outputs).__name__}"
        raise PrivacyError(
            f"telemetry={{{key!r}: ...}}, but train_step returns {has}. Let it return a dict with the loss and a "
            f"tensor with one value for each record: {{'loss': loss, {key!r}: ...}}."
        )
    if found.numel() != records or found.is_complex():
        raise PrivacyError(
            f"telemetry={{{key!r}: ...}}: train_step returns a tensor of shape {tuple(found.shape[1:])} for each "
            "record. Return one real number for each record, such as (scores.argmax(1) == labels)."
        )
    return found.detach().reshape(records).to(device)


def _median(shares: Sequence[tuple[float, float]]) -> float:
    """The norm that half of the records have at most, between the thresholds, on a logarithmic scale.

    Noisy shares may fall: each counts for at least the one before.
    """
    rising, most = [], 0.0
    for threshold, share in shares:
        most = max(most, share)
        rising.append((math.log(threshold), most))
    if rising[0][1] >= 0.5:
        return shares[0][0]
    for (left, low), (right, high) in pairwise(rising):
        if high >= 0.5:
            return math.exp(left + (right - left) * (0.5 - low) / (high - low))
    return shares[-1][0]
