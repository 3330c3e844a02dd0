"""`LossMeter` keeps losses and gradient norms on the device until the next log point."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from trainstack._tensor_classes import is_sharded, plain_parts
from trainstack.backends import Communicator
from trainstack.backends.fast_paths import fast_largest
from trainstack.errors import NonFiniteError
from trainstack.trainer.core.state import RunState
from trainstack.trainer.data.step_batches import StepBatches
from trainstack.trainer.tracking.history import snapshot_value

MAX_SKIPPED_IN_A_ROW = 50
"""Steps that may be skipped in a row before the run is stopped; by then amp has halved its scale of 2**16 to 2**-34."""


def _own_part(weight: Tensor) -> Tensor:
    """The values that this process has of a weight; a zero where it has no row of a sharded one."""
    part = next(plain_parts(weight.detach())) if is_sharded(weight) else weight.detach()
    return part if part.numel() or not is_sharded(weight) else part.new_zeros(1)


class StepEntry(NamedTuple):
    """The values of one global step until the next read.

    Attributes:
        step, epoch, step_in_epoch: its place in the run; steps are counted from 1.
        first_sample: the position in the epoch's order of its first sample.
        losses: of its micro-batches; 0-dim, detached, on the device, or numbers.
        weights: the share of each of them.
        items: the number of items of which its loss is the mean.
        updated: whether it moved the weights.
        norm: joint L2 norm of the gradients before clipping, if one was computed.
        rates: the learning rates that it used, if steps are recorded.
        indices: the indices of its samples on this rank, in parts; None where they are not known.
    """

    step: int
    epoch: int
    step_in_epoch: int
    first_sample: int
    losses: Sequence[Tensor | float]
    weights: Sequence[float]
    items: float
    updated: bool
    norm: Tensor | None
    rates: Sequence[float | Tensor] = ()
    indices: Sequence[Tensor] | None = None


class LossMeter:
    """Means over the steps since the last log point, and over the epoch.

    Means are weighted by items and leave out steps that moved nothing; those are counted by `RunState`. Sums are exact,
    so that they depend neither on when the device is read nor on how many processes there are.

    Args:
        read: the verb of the stack that brings values to the host.
        per_record_clipped: a non-finite loss is not an error, because it had no influence; it counts as 0.
        hide_loss: losses are not recorded.
        comm: the communicator of the run.
        weights: the trained parameters by name, for a check where not every step's gradients are measured.
        fast_paths: whether the weights may be checked in one call.

    Attributes:
        rates: a global step and the learning rates that it used, of the last step that was due for anything.
        on_norms: called with the norms that were read; None for no call.
        on_entries: called with the entries, the losses and the norms that were read; None for no call.
        find_samples: the dataset's indices of a micro-batch on this rank, by epoch, first sample of the step and
            position; None where that is not known or must not be said.
    """

    interval: WeightedMean
    epoch: WeightedMean
    skipped_in_a_row: Any

    def __init__(
        self,
        read: Callable[[Sequence[Tensor]], list[float]],
        *,
        per_record_clipped: bool = False,
        hide_loss: bool = False,
        comm: Communicator | None = None,
        weights: Callable[[], Mapping[str, Tensor]] | None = None,
        fast_paths: bool = True,
    ) -> None:
        self._read_values = read
        self._per_record_clipped, self._hide_loss = per_record_clipped, hide_loss
        self._comm, self._weights, self._fast_paths = comm or Communicator(), weights, fast_paths
        self.entries: list[StepEntry] = []
        self.rates: tuple[int, list[float | Tensor]] | None = None
        self.on_norms: Callable[[Sequence[float]], None] | None = None
        self.on_entries: Callable[[Sequence[StepEntry], Sequence[float], Sequence[float]], None] | None = None
        self.find_samples: Callable[[int, int, int], list[int] | None] = lambda epoch, first, position: None
        self.interval, self.epoch = WeightedMean(), WeightedMean()
        self.last_norm: float | None = None
        self.skipped_in_a_row = 0

    def add_step(
        self,
        state: RunState,
        step_batches: StepBatches,
        losses: Sequence[Tensor | float],
        updated: bool,
        norm: Tensor | None,
        rates: Sequence[float | Tensor] = (),
    ) -> None:
        """Remember a global step that `state` counts already; nothing is read."""
        first = state.samples_in_epoch - step_batches.samples
        place = (state.global_step, state.epoch, state.steps_in_epoch, first)
        shares, items, indices = step_batches.weights, step_batches.items, step_batches.indices
        self.entries.append(StepEntry(*place, losses, shares, items, updated, norm, rates, indices))

    def keep_rates(self, step: int, optimizers: Iterable[Optimizer]) -> None:
        """Keep the learning rates that global step `step` is about to use."""
        self.rates = step, learning_rates(optimizers)

    def flush(self) -> None:
        """Read pending values from the device, and settle the means over all processes; all call it at the same step.

        Raises:
            NonFiniteError: a loss is inf or nan, or the gradients of a step that moved the weights are, or too many
                steps in a row moved nothing, or the losses add up to more than a float holds. All processes raise the
                same one: the first in time, and of the same step a loss before a norm, which has inf or nan on every
                process.
        """
        error: NonFiniteError | None = None
        try:
            self._read()
        except NonFiniteError as raised:
            error = raised
        report = None if error is None else [*getattr(error, "order", _LAST), str(error)]
        everyone = self._comm.gather(
            (report, self.interval.local.parts, self.epoch.local.parts), "the losses of a log point"
        )
        reports = [[*report[:2], rank, report[2]] for rank, (report, _, _) in enumerate(everyone) if report is not None]
        if reports:
            *_, rank, message = min(reports)
            if rank == self._comm.rank and error is not None:
                raise error
            raise NonFiniteError(message)
        self.interval.sync([interval for _, interval, _ in everyone])
        self.epoch.sync([epoch for _, _, epoch in everyone])

    def _read(self) -> None:
        weights = {} if self._weights is None else self._weights()
        maxima = fast_largest([_own_part(weight) for weight in weights.values()], enabled=self._fast_paths)
        largest = dict(zip(weights, self._read_values(maxima), strict=True))
        losses = self._read_losses([loss for entry in self.entries for loss in entry.losses])
        grad_norms = self._read_values([entry.norm for entry in self.entries if entry.norm is not None])
        entries, self.entries = self.entries, []
        if self.on_norms is not None:
            self.on_norms(grad_norms)
        if self.on_entries is not None:
            self.on_entries(entries, losses, grad_norms)
        if all(map(math.isfinite, [*losses, *grad_norms])) and all(entry.updated for entry in entries):
            self._count_all(entries, losses, grad_norms)
        else:
            left, norms_left = iter(losses), iter(grad_norms)
            for entry in entries:
                values = list(islice(left, len(entry.losses)))
                self._count(entry, values, next(norms_left) if entry.norm is not None else None)
        for name, value in largest.items():
            if entries and not math.isfinite(value):
                error = NonFiniteError(
                    f"the weight {name!r} is inf or nan after {_place(entries[-1])}: in that step or in one before it, "
                    f"its gradient was. {_ADVICE}"
                )
                raise _at(entries[-1].step, 2, error)

    def _read_losses(self, losses: Sequence[Tensor | float]) -> list[float]:
        tensors = [loss for loss in losses if isinstance(loss, Tensor)]
        values = iter(self._read_values(tensors) if tensors else ())
        return [next(values) if isinstance(loss, Tensor) else loss for loss in losses]

    def get_state(self) -> dict[str, Any]:
        """The values settled by the last `flush`, since the last log point and over the epoch."""
        return {
            "interval": self.interval.get_state(),
            "epoch": self.epoch.get_state(),
            "last_norm": self.last_norm,
            "skipped_in_a_row": self.skipped_in_a_row,
            "rates": None if self.rates is None else [self.rates[0], [float(rate) for rate in self.rates[1]]],
        }

    def update_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `get_state`."""
        self.entries = []
        self.interval, self.epoch = WeightedMean(*state["interval"]), WeightedMean(*state["epoch"])
        self.last_norm, self.skipped_in_a_row = state["last_norm"], state["skipped_in_a_row"]
        rates = state.get("rates")
        self.rates = None if rates is None else (rates[0], rates[1])

    def _count(self, entry: StepEntry, values: list[float], norm: float | None) -> None:
        if self._per_record_clipped:
            values = [value if math.isfinite(value) else 0.0 for value in values]
        if entry.updated:
            for position, (value, weight) in enumerate(zip(values, entry.weights, strict=True)):
                if weight and not math.isfinite(value):
                    raise self._nonfinite_loss(entry, value, position)
        if not entry.updated:
            self.skipped_in_a_row += entry.items > 0
            if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
                raise NonFiniteError(
                    f"{self.skipped_in_a_row} global steps in a row, the last of them {_place(entry)}, had gradients "
                    "that are inf or nan and were skipped. Lower the learning rate, check the loss for division by "
                    "zero or log(0), or train in bfloat16: backend='sp-bf16'."
                )
            return
        self.skipped_in_a_row = 0
        self.last_norm = norm
        if norm is not None and not math.isfinite(norm):
            error = NonFiniteError(f"the norm of the gradients is {norm} at {_place(entry)}. {_ADVICE}")
            raise _at(entry.step, 1, error)
        if self._hide_loss:
            return
        part = step_loss(entry.weights, values) * entry.items
        self.interval.add_all([part], entry.items)
        self.epoch.add_all([part], entry.items)

    def _nonfinite_loss(self, entry: StepEntry, value: float, position: int) -> NonFiniteError:
        where = f"{_place(entry)}, micro-batch {position}"
        if self._comm.size > 1:
            where = f"rank {self._comm.rank}, {where}"
        indices = self.find_samples(entry.epoch, entry.first_sample, position)
        samples = "" if indices is None else f", with the samples {shown_indices(indices)} of the training data set"
        cause = "" if self._weights is None else _UNMEASURED
        return _at(entry.step, 0, NonFiniteError(f"the loss is {value} at {where}{samples}. {cause}{_ADVICE}"))

    def _count_all(self, entries: Sequence[StepEntry], losses: Sequence[float], norms: Sequence[float]) -> None:
        """The same as `_count`, for many steps without a non-finite value."""
        if not entries:
            return
        self.skipped_in_a_row = 0
        self.last_norm = norms[-1] if entries[-1].norm is not None else None
        if self._hide_loss:
            return
        left = iter(losses)
        parts = [step_loss(entry.weights, islice(left, len(entry.losses))) * entry.items for entry in entries]
        items = sum(entry.items for entry in entries)
        self.interval.add_all(parts, items)
        self.epoch.add_all(parts, items)


def learning_rates(optimizers: Iterable[Optimizer]) -> list[float | Tensor]:
    """The learning rates of all parameter groups as they are now; rates that are tensors are copied, not read."""
    return [
        rate if type(rate := group["lr"]) is float else snapshot_value(rate)
        for one in optimizers
        for group in one.param_groups
        if "lr" in group
    ]


_UNMEASURED = (
    "Gradients are measured at log points only, since clip_grads=False: the cause may be the gradient of an earlier "
    "step since the last one. "
)
_ADVICE = (
    "No checkpoint was written after it. Write nonfinite='skip' to skip such steps and count them, or "
    "log_every=1 to stop before the next step."
)


_LAST = (1 << 62, 0)


def _at(step: int, kind: int, error: NonFiniteError) -> NonFiniteError:
    """`error` with its global step and the rank of its kind, by which processes choose the one to raise."""
    error.order = (step, kind)  # type: ignore[attr-defined]
    return error


def shown_indices(indices: Sequence[int], most: int = 64) -> str:
    """The indices for a message, which more of them would hide."""
    return ", ".join(map(str, indices[:most])) + (f", ... ({len(indices)} in all)" if len(indices) > most else "")


def _place(entry: StepEntry) -> str:
    return f"global step {entry.step} (epoch {entry.epoch}, step {entry.step_in_epoch} of the epoch)"


def step_loss(weights: Sequence[float], values: Iterable[float]) -> float:
    """The loss of a step, of micro-batches with these shares and losses; on several ranks, the part of this one."""
    return sum([value * weight for value, weight in zip(values, weights, strict=True) if weight])  # a list is faster


class ExactSum:
    """A sum of floats without rounding, so that neither the order of adding nor the number of processes matters.

    Shewchuk: Adaptive Precision Floating-Point Arithmetic (1997), as in `math.fsum`, but open to more.
    """

    parts: list[float]
    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[float] = ()) -> None:
        self.parts = list(parts)

    def add_all(self, values: Sequence[float]) -> None:
        """Add many values."""
        self.parts = _parts_of([*self.parts, *values])

    def value(self) -> float:
        """The sum, rounded once."""
        return math.fsum(self.parts)


def _parts_of(values: Sequence[float]) -> list[float]:
    """The sum of `values`: the sum rounded to a float, the rounded rest, and so on until nothing is left.

    Raises:
        NonFiniteError: one of them is inf or nan, or they are too large together.
    """
    left, parts = list(values), []
    try:
        while rest := math.fsum(left):
            if math.isnan(rest):  # of which something would be left for ever
                raise ValueError
            parts.append(rest)
            left.append(-rest)
    except (OverflowError, ValueError):
        largest = max(values, key=lambda value: math.inf if math.isnan(value) else abs(value))
        raise NonFiniteError(
            f"losses, each times the items it is a mean over, add up to more than a float holds: one is {largest}. Let "
            "train_step return a loss that is smaller."
        ) from None
    return parts


class WeightedMean:
    """A mean of values over all processes: the weighted sum, and the number of items.

    Attributes:
        synced: the sum of all processes, up to the last `sync`.
        local: the sum of this process since then.
        items: on all processes together, every item once; the same number everywhere.
    """

    local: ExactSum
    items: float
    synced: ExactSum
    __slots__ = ("items", "local", "synced")

    def __init__(self, synced: Sequence[float] = (), items: float = 0.0) -> None:
        self.synced, self.local, self.items = ExactSum(synced), ExactSum(), items

    def add_all(self, parts: Sequence[float], items: float) -> None:
        """Add this process's parts of a mean over `items` items more."""
        self.local.add_all(parts)
        self.items += items

    def sync(self, everyone: Sequence[Sequence[float]]) -> None:
        """Add the `local` sums of all processes."""
        for parts in everyone:
            self.synced.add_all(parts)
        self.local = ExactSum()

    def pop(self) -> float | None:
        """The mean of the settled values, which are then cleared; None if there are none."""
        mean = self.synced.value() / self.items if self.items else None
        self.synced, self.items = ExactSum(), 0.0
        return mean

    def get_state(self) -> list[Any]:
        """The settled sum, in parts that depend on the sum alone, not on the order of its terms."""
        return [_parts_of(self.synced.parts), self.items]
