"""Assignment of metrics to charts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from trainstack.trainer.reporting.report.runs import Arrays, ReportedRun

MOST_POINTS = 600
MOST_CURVES = 300
"""So many metrics of a run are drawn: a page of 100,000 took a minute to write, and no browser shows it."""

_MOST_RATES = 40
_LAST = {"gradient norm": 1, "learning rate": 2, "steps a second": 4, "memory, GiB": 5}
_TITLES = {"lr": "learning rate", "schedule/lr": "learning rate", "grad_norm": "gradient norm", "memory": "memory, GiB"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve: `steps` and `values` are of one length; `colour` counts from 0.

    `not_finite` counts all values that are inf or nan, whether they are among `values` or not.
    """

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    colour: int
    not_finite: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart. `epoch_ends` are steps."""

    title: str
    series: tuple[Series, ...]
    epoch_ends: tuple[int, ...] = ()


def panels_of(runs: Sequence[ReportedRun]) -> list[Panel]:
    """The charts of one run, related metrics in one; or of several, each metric in a chart with a curve a run."""
    return _of_one(runs[0]) if len(runs) == 1 else _of_several(runs)


def _of_one(run: ReportedRun) -> list[Panel]:
    curves = {**run.shown_curves, **_sampled(run)}
    groups: dict[str, dict[str, Arrays]] = {}
    for name in _drawn(curves):
        groups.setdefault(_title_of(name), {})[name] = curves[name]
    ends = next((tuple(a[0].tolist()) for n, a in run.curves.items() if n.endswith("train/loss_epoch")), ())
    return [
        Panel(
            title=title,
            series=tuple(_series(name, *groups[title][name], colour=i) for i, name in enumerate(sorted(groups[title]))),
            epoch_ends=ends,
        )
        for title in sorted(groups, key=_place)
    ]


def _of_several(runs: Sequence[ReportedRun]) -> list[Panel]:
    curves = [{**run.shown_curves, **_sampled(run)} for run in runs]
    panels = []
    for name in _drawn(set().union(*curves)):
        having = [i for i, own in enumerate(curves) if name in own]
        series = (_series(runs[i].label, *curves[i][name], colour=i) for i in having)
        panels.append(Panel(title=name, series=tuple(series)))
    return panels


def _drawn(names: Iterable[str]) -> list[str]:
    """The metrics that are drawn, in the order of their charts."""
    ordered = sorted(names, key=lambda name: (_place(_title_of(name)), name))
    kept = set(sorted(ordered, key=lambda name: _title_of(name) not in ("loss", *_LAST))[:MOST_CURVES])
    return [name for name in ordered if name in kept]


def _title_of(name: str) -> str:
    for start, title in _TITLES.items():
        if name == start or name.startswith(f"{start}/") or name.endswith(f"/{start}"):
            return title
    *before, last = name.split("/")
    if not {"train", "val", "test"} & set(before):
        return name
    return "loss" if last == "loss_epoch" else last


def _place(title: str) -> tuple[int, str]:
    return (-1 if title == "loss" else _LAST.get(title, 3 if title.startswith("throughput/") else 0), title)


def _sampled(run: ReportedRun) -> Mapping[str, Arrays]:
    """The curves of time and memory that were noted at log points; rates are those of stretches of several points."""
    speed: list[tuple[int, float]] = []
    memory: dict[str, list[tuple[int, float]]] = {"memory/host_peak": [], "memory/device_peak": []}
    for session in run.facts.sessions:
        for step, _, *gib in session.samples:
            for known, value in zip(memory.values(), gib, strict=True):
                if value is not None:
                    known.append((step, value))
        points = [(session.first_step, 0.0), *((step, seconds) for step, seconds, *_ in session.samples)]
        points = points[:: 1 + len(points) // _MOST_RATES]
        for (before, then), (step, seconds) in pairwise(points):
            if step > before and seconds > then:
                speed.append((step, (step - before) / (seconds - then)))
    found = {"steps a second": speed, **memory}
    return {
        name: (np.array([step for step, _ in points]), np.array([value for _, value in points]))
        for name, points in found.items()
        if points and name not in run.curves
    }


def _series(label: str, steps: Iterable[int], values: Iterable[float], *, colour: int) -> Series:
    xs, ys = np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=np.float64)
    kept = thin(ys, MOST_POINTS)
    lost = int(np.count_nonzero(~np.isfinite(ys)))
    return Series(label=label, steps=xs[kept].tolist(), values=ys[kept].tolist(), colour=colour, not_finite=lost)


def thin(values: np.ndarray[tuple[int], np.dtype[np.float64]], most: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """At most about `most` positions of `values`, rising: the ends, and lowest and highest of each stretch between."""
    if len(values) <= most:
        return np.arange(len(values))
    kept = {0, len(values) - 1}
    for stretch in np.array_split(np.arange(len(values)), most // 2):
        own = values[stretch]
        if np.isnan(own).any():
            kept.add(int(stretch[np.isnan(own).argmax()]))  # a gap stays one
        if not np.isnan(own).all():
            kept |= {int(stretch[np.nanargmin(own)]), int(stretch[np.nanargmax(own)])}
    return np.array(sorted(kept))
