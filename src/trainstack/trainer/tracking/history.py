"""`RunHistory` records metrics with step and epoch."""

from __future__ import annotations

import difflib
import math
import operator
import unicodedata
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch

from trainstack.backends.single_process import read_numbers
from trainstack.errors import CheckpointDamagedError, ConfigurationError, ModuleContractError
from trainstack.trainer.tracking.provenance import MetricGuard, Provenance
from trainstack.trainer.tracking.record_log import RecordLog
from trainstack.trainer.tracking.views import by_epoch, epochs_html, frame_of, plot_series

Array = np.ndarray[Any, Any]


class Record(NamedTuple):
    """One value of one metric. `step` counts global steps, `epoch` is the epoch it was measured in."""

    name: str
    value: float
    step: int
    epoch: int


class MetricColumn:
    """The records of one metric as three packed arrays: 24 bytes a record.

    Attributes:
        number: the number of metrics that had a record before this one.
        flushed: the number of records that `flush` has returned.
    """

    name: str
    number: int
    epochs: array[int]
    steps: array[int]
    values: array[float]
    flushed: int
    __slots__ = ("epochs", "flushed", "name", "number", "steps", "values")

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number, self.flushed = name, number, 0
        self.values, self.steps, self.epochs = array("d"), array("q"), array("q")

    def append(self, value: float, step: int, epoch: int) -> None:
        """Add a record."""
        self.values.append(value)
        self.steps.append(step)
        self.epochs.append(epoch)

    def extend(self, values: Array, steps: Array, epochs: Array) -> None:
        """Add records that were flushed before."""
        self.values.frombytes(values.tobytes())
        self.steps.frombytes(steps.tobytes())
        self.epochs.frombytes(epochs.tobytes())
        self.flushed = len(self.values)

    def record(self, index: int) -> Record:
        """The record at `index`."""
        return Record(self.name, self.values[index], self.steps[index], self.epochs[index])


_MOST_SHOWN = 8  # metrics in a repr
# Controls, surrogates and line separators break a line of a log, or cannot be encoded at all.
_FORBIDDEN_IN_NAMES = frozenset({"Cc", "Cs", "Zl", "Zp"})


class RunHistory:
    """Records metrics without reading them from the device, and answers questions about them.

    A tensor given to `update_metric` is read on the first request for values (a reader, `get_state` or `flush`), all
    pending tensors in one transfer per device and dtype. Until then it is kept alive, so `flush` at log points. The
    trainer sets `current_step` and `current_epoch`; a record takes them unless it is given its own.

    Nothing is ever thrown away: a record takes about 34 bytes of memory, and 4 to 10 bytes of each checkpoint.

    Attributes:
        metric_name_prefix: put before the name of each metric recorded from now on, such as `"fold-2/"`. Those who
            ask may leave it out. It is not part of the state.
        guard: of a private run: decides which values are recorded. None records all.

    Examples:
        >>> history = ts.RunHistory()
        >>> history.update_metric("val/loss", 0.5, step=4, epoch=0)
        >>> history.update_metric("val/loss", 0.25, step=8, epoch=1)
        >>> history.get_metric_values("val/loss")
        [0.5, 0.25]
        >>> steps, values = history.arrays("val/loss")
    """

    metric_name_prefix: str
    guard: MetricGuard | None
    current_step: Any
    current_epoch: Any

    def __init__(self, metric_name_prefix: str = "", guard: MetricGuard | None = None) -> None:
        self.metric_name_prefix, self.guard = metric_name_prefix, guard
        self.reset()

    def reset(self) -> None:
        """Forget every record, read or not, and count steps and epochs from 0 again."""
        self.current_step = 0
        self.current_epoch = 0
        self._columns: dict[str, MetricColumn] = {}
        self._log = RecordLog()
        # Records whose values may still be on a device: column, value, version of the tensor when given, step, epoch.
        self._pending: list[tuple[MetricColumn, float | torch.Tensor, int, int, int]] = []
        self._arrived: list[MetricColumn] = []

    def update_metric(
        self,
        name: str,
        value: float | torch.Tensor,
        *,
        step: int | None = None,
        epoch: int | None = None,
        provenance: Provenance = Provenance.PRIVATE,
    ) -> None:
        """Add a value of metric `name`; a second value for the same step is a second record.

        `value` is a number or a tensor with one element, on any device. A tensor is detached and not read here; it must
        not be changed in place before it is read, which is noticed then.

        `provenance` matters in private runs. They do not record a value that is `PRIVATE`, unless
        `DifferentialPrivacyArguments(log_train_loss=True)` asks for it. Declare another provenance only if it is true.

        Raises:
            ConfigurationError: the name, the value, the step or the epoch cannot be recorded.
        """
        if self.metric_name_prefix and isinstance(name, str):
            name = self.metric_name_prefix + name
        step = self.current_step if step is None else _whole(step, "step", name)
        epoch = self.current_epoch if epoch is None else _whole(epoch, "epoch", name)
        version = -1
        if isinstance(value, torch.Tensor):
            value, version = _keep(value, name)
        elif type(value) is not float:
            value = _number(value, name)
        if self.guard is not None and not self.guard.admit(name, provenance):
            return
        column = self._columns.get(name)
        if column is None:
            column = self._columns[check_name(name)] = MetricColumn(name, len(self._columns))
        if version < 0 and not self._pending:
            self._append(column, value, step, epoch)  # type: ignore[arg-type]
        else:
            self._pending.append((column, value, version, step, epoch))
        self._arrived.append(column)

    def flush(self) -> list[Record]:
        """Read pending values; return the records new since the last flush, in order of arrival."""
        self._read_pending()
        records = []
        for column in self._arrived:
            records.append(column.record(column.flushed))
            column.flushed += 1
        self._arrived = []
        return records

    def get_metric_names(self) -> set[str]:
        """The names of all metrics that have a record."""
        return set(self._columns)

    def get_metric_values(self, name: str) -> list[float]:
        """All values of `name` in order of arrival; ConfigurationError (a ValueError) when there is none."""
        return self._column(name).values.tolist()

    def get_latest_metric(self, name: str) -> float:
        """The last value of `name`; ConfigurationError (a ValueError) when there is none."""
        return self._column(name).values[-1]

    def latest_record(self, name: str) -> Record:
        """The last record of the metric `name`.

        Raises:
            ConfigurationError: nothing was recorded under that name.
        """
        column = self._column(name)
        return column.record(len(column.values) - 1)

    def values_at(self, step: int) -> dict[str, float]:
        """The newest value of each metric whose newest record belongs to `step`, by name."""
        self._read_pending()
        return {name: c.values[-1] for name, c in sorted(self._columns.items()) if c.steps and c.steps[-1] == step}

    def usable_values_at(self, step: int) -> dict[str, float]:
        """`values_at`; in a private run those that are public or covered."""
        values = self.values_at(step)
        return values if self.guard is None else self.guard.usable(values)

    def require_usable(self, name: str, who: str) -> None:
        """Refuse that `who` decides about the training by the metric `name`, if a private run must not allow that.

        Raises:
            PrivacyError: the metric was computed from records without noise.
        """
        if self.guard is not None:
            full = f"{self.metric_name_prefix}{name}"
            self.guard.require(full if full in self._columns or full in self.guard.hidden else name, who)

    def provenance_of(self, name: str) -> Provenance:
        """The origin of the values of `name`, for values derived from them; private if it is not known."""
        if self.guard is None:
            return Provenance.PRIVATE
        full = f"{self.metric_name_prefix}{name}"
        return self.guard.provenance_of(full if full in self._columns else name)

    def records(self, name: str, first: int = 0) -> list[Record]:
        """The records of `name` in order of arrival, from number `first` on; ConfigurationError when there is none."""
        column = self._column(name)
        return [column.record(index) for index in range(first, len(column.values))]

    def arrays(self, name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Steps (int64) and values (float64) of `name`, ready for `plt.plot(*history.arrays(name))`; copies.

        Raises:
            ConfigurationError: nothing was recorded under that name.
        """
        column = self._column(name)
        return np.array(column.steps), np.array(column.values)

    def all_arrays(self, *, read_device: bool = True) -> dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """`arrays` by name; without `read_device` only values that were read from the device before."""
        if read_device:
            self._read_pending()
        return {name: (np.array(c.steps), np.array(c.values)) for name, c in self._columns.items() if c.values}

    def all_records(self) -> Iterator[Record]:
        """The records of all metrics in order of arrival, which is the order in which writers get them."""
        self._read_pending()
        names = list(self._columns)
        for metrics, steps, epochs, values in self._log.arrays():
            rows = zip(metrics.tolist(), values.tolist(), steps.tolist(), epochs.tolist(), strict=True)
            yield from (Record(names[metric], value, step, epoch) for metric, value, step, epoch in rows)

    def to_dict(self) -> dict[str, dict[str, list[Any]]]:
        """All records by name, as plain lists `value`, `step` and `epoch`."""
        self._read_pending()
        return {
            name: {"value": c.values.tolist(), "step": c.steps.tolist(), "epoch": c.epochs.tolist()}
            for name, c in self._columns.items()
        }

    def to_frame(self) -> Any:
        """All records as a `pandas.DataFrame`: a row for each global step, with the epoch and the metrics as columns.

        Of two values of a metric at one step it has the last, and NaN where there is none.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return frame_of(self.all_records())

    def plot(self, *names: str) -> list[Any]:
        """Plot metrics over the global step with matplotlib.

        Args:
            names: of the metrics; all by default. Those that end alike, such as "train/loss" and "val/loss", share
                axes.

        Returns:
            The axes, all in one figure.

        Raises:
            ConfigurationError: nothing was recorded, or nothing under one of the names.
            MissingExtraError: matplotlib is not installed.
        """
        return plot_series({name: self.arrays(name) for name in names} if names else self.all_arrays())

    def __repr__(self) -> str:
        """Names and newest values; values that are still on a device are not read."""
        shown = [f"{name}={column.values[-1]:.4g}" for name, column in sorted(self._columns.items()) if column.values]
        more = [f"... {len(shown) - _MOST_SHOWN} more"] if len(shown) > _MOST_SHOWN else []
        return f"RunHistory({len(self._log)} records: {', '.join(shown[:_MOST_SHOWN] + more) or 'none'})"

    def _repr_html_(self) -> str:
        """A table of epochs for notebooks: the last value of each metric in each epoch."""
        return epochs_html(by_epoch(self.all_records()))

    @property
    def flushed_count(self) -> int:
        """The number of flushed records."""
        return sum(column.flushed for column in self._columns.values())

    def get_state(self) -> dict[str, Any]:
        """Everything recorded, in order of arrival. Few records are converted, however many there are.

        Records that have not been flushed count as flushed once restored, so flush and write before taking a state.
        """
        self._read_pending()
        counters = {"current_step": self.current_step, "current_epoch": self.current_epoch}
        state = {**counters, "names": list(self._columns), "records": self._log.get_state()}
        return state if self.guard is None else {**state, "provenance": self.guard.get_state()}

    def update_state(self, state: Mapping[str, Any]) -> None:
        """Replace everything by the result of `get_state`; restored records are not flushed again.

        Raises:
            CheckpointDamagedError: `state` is not a result of `get_state`; nothing has been changed then.
        """
        log = RecordLog()
        try:
            step, epoch = int(state["current_step"]), int(state["current_epoch"])
            columns = {check_name(name): MetricColumn(name, place) for place, name in enumerate(state["names"])}
            if len(columns) != len(state["names"]):
                raise ValueError("a name is there twice")
            log.update_state(state["records"], len(columns))
            _fill(list(columns.values()), log)
            if self.guard is not None:
                self.guard.update_state(state.get("provenance", {}))
                private = self.guard.take_private(columns)
                columns, log = _without(private, columns, log) if private else (columns, log)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CheckpointDamagedError(
                f"the state of the run history is damaged ({type(error).__name__}: {error}). "
                "Pass the unchanged result of RunHistory.get_state()."
            ) from error
        self.reset()
        self.current_step, self.current_epoch, self._columns, self._log = step, epoch, columns, log

    def mark(self) -> tuple[Any, ...]:
        """The current end of the records, for `back_to`."""
        self._read_pending()
        lengths = {name: len(column.values) for name, column in self._columns.items()}
        return self.current_step, self.current_epoch, lengths, self._columns, self._log, self._arrived

    def back_to(self, mark: tuple[Any, ...]) -> None:
        """Forget the records since `mark`, and a state that was loaded since then."""
        self._read_pending()
        self.current_step, self.current_epoch, lengths, self._columns, self._log, arrived = mark
        self._log.truncate(sum(lengths.values()))
        for name, column in list(self._columns.items()):
            length = lengths.get(name, 0)
            del column.values[length:], column.steps[length:], column.epochs[length:]
            column.flushed = min(column.flushed, length)
            if name not in lengths:
                del self._columns[name]
        waiting = {name: len(column.values) - column.flushed for name, column in self._columns.items()}
        self._arrived = []
        for column in arrived:
            if waiting.get(column.name, 0) > 0:
                waiting[column.name] -= 1
                self._arrived.append(column)

    def hint_for(self, name: str) -> str:
        """The names to write in place of `name`, which was not recorded: similar ones, and all recorded ones."""
        close = [known for known in sorted(self._columns) if known.endswith(f"/{name}")]
        close = close or difflib.get_close_matches(str(name), self._columns, n=1)
        return (f"Did you mean {close[0]!r}? " if close else "") + self._recorded()

    def _recorded(self) -> str:
        return f"Recorded: {', '.join(sorted(self._columns)) or 'nothing yet'}."

    def _column(self, name: str) -> MetricColumn:
        self._read_pending()
        column = self._columns.get(f"{self.metric_name_prefix}{name}") or self._columns.get(name)
        if column is None:
            hint = self.hint_for(name)
            if self.guard is not None and {name, f"{self.metric_name_prefix}{name}"} & self.guard.hidden:
                hint = (
                    "The run is private and does not record it: it is computed from training data without noise. "
                    "DifferentialPrivacyArguments(log_train_loss=True) records such values, and "
                    f"telemetry={{'loss': (0, 10)}} records noisy ones. {self._recorded()}"
                )
            raise ConfigurationError(f"no metric {name!r} has been recorded. {hint}")
        return column

    def _append(self, column: MetricColumn, value: float, step: int, epoch: int) -> None:
        self._log.append(column.number, value, step, epoch)  # first: it refuses a step that is too large
        column.append(value, step, epoch)

    def _read_pending(self) -> None:
        """Move pending values into the columns, reading the device once per device and dtype."""
        if not self._pending:
            return
        pending = self._pending
        read = iter(read_numbers([entry[1] for entry in pending if isinstance(entry[1], torch.Tensor)]))
        self._pending = []
        spoilt: list[tuple[str, int]] = []
        for column, value, version, step, epoch in pending:
            number = next(read) if isinstance(value, torch.Tensor) else value
            if isinstance(value, torch.Tensor) and value._version != version:
                spoilt.append((column.name, step))
                number = math.nan
            self._append(column, number, step, epoch)
        if spoilt:
            name, step = spoilt[0]
            raise ModuleContractError(
                f"metric {name!r}: the tensor given at step {step} was changed in place before it was read, "
                "so its value is lost (recorded as nan). Give a copy: tensor.clone()."
            )


def _fill(columns: Sequence[MetricColumn], log: RecordLog) -> None:
    """Give the empty `columns` the records of `log`, and refuse one that has none."""
    for metrics, steps, epochs, values in log.arrays():
        order = np.argsort(metrics, kind="stable")
        numbers, begins = np.unique(metrics[order], return_index=True)
        ends = [*begins[1:].tolist(), len(order)]
        for number, begin, end in zip(numbers.tolist(), begins.tolist(), ends, strict=False):
            mine = order[begin:end]
            columns[number].extend(values[mine], steps[mine], epochs[mine])
    for column in columns:
        if not column.values:
            raise ValueError(f"the metric {column.name!r} has no record")


def _without(
    names: set[str], columns: Mapping[str, MetricColumn], log: RecordLog
) -> tuple[dict[str, MetricColumn], RecordLog]:
    """`columns` and `log` without the metrics of these names."""
    kept = {name: MetricColumn(name, place) for place, name in enumerate(name for name in columns if name not in names)}
    places = {place: kept[name].number for place, name in enumerate(columns) if name in kept}
    left = RecordLog()
    for arrays in log.arrays():
        for number, step, epoch, value in zip(*(values.tolist() for values in arrays), strict=True):
            if number in places:
                left.append(places[number], value, step, epoch)
    _fill(list(kept.values()), left)
    return kept, left


def snapshot_value(value: float | torch.Tensor) -> float | torch.Tensor:
    """The value to record if it may be changed in place later, such as a rate in a tensor: a copy of tensors."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _keep(value: torch.Tensor, name: str) -> tuple[torch.Tensor, int]:
    """`value` detached, and its version; a view is copied, since it would keep its whole base alive."""
    if value.numel() != 1 or value.is_complex():
        raise ConfigurationError(
            f"metric {name!r} was given a tensor of shape {tuple(value.shape)} and {value.dtype}; "
            "a metric is one real number. Give for example tensor.mean()."
        )
    # torch 2.13.0: `_is_view` and `_version` have no public counterpart.
    if value._is_view() or value.is_inference():  # inference tensors do not count their versions
        with torch.inference_mode(False):
            value = value.clone()
    value = value.detach()
    return value, value._version


def checked_value(value: float | torch.Tensor, name: str) -> float | torch.Tensor:
    """`value` as it can be recorded under `name`: a float, or a detached tensor, not read.

    Raises:
        ConfigurationError: it is not one real number.
    """
    return _keep(value, name)[0] if isinstance(value, torch.Tensor) else _number(value, name)


def _number(value: object, name: str) -> float:
    with suppress(OverflowError):
        if isinstance(value, Real):
            return float(value)
    if hasattr(value, "compute"):
        raise ConfigurationError(
            f"metric {name!r} was given a {type(value).__name__}, which is a metric object and not yet a number. Write "
            f"log({name!r}, metric.compute()) where its value is wanted, and metric.reset() after it. For validation "
            "write metrics={'name': metric} in the module instead: docs/validation.md."
        )
    raise ConfigurationError(
        f"metric {name!r} was given {value!r} ({type(value).__name__}); "
        "give a number that a float can hold, or a tensor with one element."
    )


def _whole(value: int, what: str, name: str) -> int:
    with suppress(TypeError):
        if -(2**63) <= (whole := operator.index(value)) < 2**63:
            return whole
    raise ConfigurationError(f"metric {name!r} was given {what}={value!r}; give a whole number of 64 bits.")


def check_name(name: object) -> str:
    """`name`, if a metric can have it.

    Raises:
        ConfigurationError: it is not a string, is empty, or would break a log.
    """
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"a metric was named {name!r}; give a string such as 'train/loss'.")
    if any(unicodedata.category(character) in _FORBIDDEN_IN_NAMES for character in name):
        raise ConfigurationError(f"metric name {name!r} holds a control character; remove it.")
    if name[0] in "=+-@":
        raise ConfigurationError(
            f"metric name {name!r} begins with {name[0]!r}: a spreadsheet would execute it as a formula. Begin it with "
            "a letter."
        )
    return name
