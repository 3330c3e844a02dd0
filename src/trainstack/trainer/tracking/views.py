"""Recorded metrics as a table, a data frame, a plot and HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from trainstack.errors import ConfigurationError, MissingExtraError

Records = Iterable[tuple[str, float, int, int]]
"""Name, value, step and epoch of each."""

_MOST_ROWS = 50
"""Epochs in a table of HTML, which a notebook gets again at each update."""


def by_epoch(records: Records) -> dict[int, dict[str, float]]:
    """The last value of each metric in each epoch: by epoch, then by name."""
    epochs: dict[int, dict[str, float]] = {}
    for name, value, _, epoch in records:
        epochs.setdefault(epoch, {})[name] = value
    return dict(sorted(epochs.items()))


def epochs_html(epochs: Mapping[int, Mapping[str, float]]) -> str:
    """A table in HTML with a row for each epoch, counted from 1; of many, the last ones."""
    names = sorted({name for values in epochs.values() for name in values})
    shown = list(epochs)[-_MOST_ROWS:]
    rows = [[str(epoch + 1), *(_number(epochs[epoch].get(name)) for name in names)] for epoch in shown]
    left_out = f"<p>the last {len(shown)} of {len(epochs)} epochs</p>" if len(shown) < len(epochs) else ""
    return left_out + table_html(["epoch", *names], rows)


def table_html(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in HTML; all texts are escaped."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def frame_of(records: Records) -> Any:
    """A `pandas.DataFrame`: a row for each global step, with the epoch and the last value of each metric at the step.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    try:
        from pandas import DataFrame, Index  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise MissingExtraError("history.to_frame()", "pandas", "plot") from error
    rows: dict[int, dict[str, float]] = {}
    for name, value, step, epoch in records:
        rows.setdefault(step, {}).update({"epoch": epoch, name: value})
    steps = sorted(rows)
    return DataFrame([rows[step] for step in steps], index=Index(steps, name="step", dtype="int64"))


def plot_series(series: Mapping[str, tuple[Any, Any]]) -> list[Any]:
    """Plot steps and values by name; metrics that end alike, such as "train/loss" and "val/loss", share axes.

    Returns:
        The axes of matplotlib, one for each group, in one figure.

    Raises:
        ConfigurationError: there is nothing to plot.
        MissingExtraError: matplotlib is not installed.
    """
    if not series:
        raise ConfigurationError("history.plot(): nothing has been recorded yet. Train first.")
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtraError("history.plot()", "matplotlib", "plot") from error
    groups: dict[str, list[str]] = {}
    for name in series:
        groups.setdefault(name.rpartition("/")[2].removesuffix("_epoch"), []).append(name)
    _, axes = pyplot.subplots(
        len(groups), squeeze=False, figsize=(7, 2.5 * len(groups)), sharex=True, layout="constrained"
    )
    for place, (group, names) in zip(axes[:, 0], groups.items(), strict=True):
        for name in names:
            steps, values = series[name]
            place.plot(steps, values, label=name, marker="." if len(steps) < _FEW else None)
        place.set_ylabel(group)
        place.legend()
    axes[-1, 0].set_xlabel("global step")
    return list(axes[:, 0])


_FEW = 30
"""Points of a curve up to which each of them is marked, so that a single one is seen."""
