"""A chart as inline SVG."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainstack.trainer.reporting.report.markup import Markup, join_markup, tag
from trainstack.trainer.reporting.report.panels import Panel, Series

WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 58, 20, 10, 26
COLOURS = 8
_MOST_MARKERS = 20
_MOST_EPOCHS = 40
_LOG_FROM = 2.0  # powers of ten between the lowest and the highest value
_FROM_ZERO = ("steps a second", "memory", "throughput/")
_LINEAR = ("learning rate", "lr", "schedule/", "gradient norm", "train/grad_norm", *_FROM_ZERO)


@dataclass(frozen=True, slots=True)
class Scale:
    """From numbers between `low` and `high` to pixels between `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log10(n) if self.log else n for n in (self.low, self.high, value))
        return round(self.start + (at - low) / (high - low) * (self.end - self.start), 1)

    def ticks(self, wanted: int) -> list[float]:
        """About `wanted` round numbers within; on a logarithmic scale powers of ten, if few with 2 and 5."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            factors = (1, 2, 5) if len(powers) <= wanted // 2 + 1 else (1,)
            every = max(1, round(len(powers) / wanted))
            found = [factor * 10.0**power for power in powers[::every] for factor in factors]
            return [value for value in found if self.low <= value <= self.high]
        rough = (self.high - self.low) / wanted
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]


def chart(panel: Panel) -> Markup:
    """`panel` with its title and legend. Values that are inf or nan are gaps, and counted in the legend."""
    finite = [v for one in panel.series for v in one.values if math.isfinite(v)]
    steps = [step for one in panel.series for step in one.steps]
    low, high = min(steps, default=0), max(steps, default=1)
    room = 1 if low == high else 0
    x, y = Scale(low - room, high + room, LEFT, WIDTH - RIGHT), _value_scale(panel.title, finite)
    drawing = tag(
        "svg",
        *_grid(x, y, panel.epoch_ends),
        *(_curve(one, x, y) for one in panel.series),
        tag("line", class_="cursor", x1=0, x2=0, y1=TOP, y2=HEIGHT - BOTTOM),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{panel.title} over global steps",
        data_scale=json.dumps([x.low, x.high, x.start, x.end]),
    )
    caption = tag("figcaption", panel.title, tag("small", " log scale") if y.log else None)
    return tag("figure", caption, drawing, tag("div", *map(_legend_entry, panel.series), class_="legend"))


def number(value: float) -> str:
    """`value` with four digits."""
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e7 else f"{value:.4g}"


def _value_scale(title: str, values: Sequence[float]) -> Scale:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if not title.startswith(_LINEAR) and low > 0 and math.log10(high) - math.log10(low) >= _LOG_FROM:
        return Scale(low / 1.1, high * 1.1, HEIGHT - BOTTOM, TOP, log=True)
    room = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    if not math.isfinite(room) or low - room == low:
        return Scale(-1.0, 1.0, HEIGHT - BOTTOM, TOP)
    from_zero = 0 <= low <= 0.3 * high or (low >= 0 and title.startswith(_FROM_ZERO))
    bottom = 0.0 if from_zero else low - room  # a scale that nearly reaches 0 begins there
    return Scale(bottom, high + room, HEIGHT - BOTTOM, TOP)


def _grid(x: Scale, y: Scale, epoch_ends: Sequence[int]) -> Iterator[Markup]:
    for value in y.ticks(5):
        yield tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y(value), y2=y(value))
        yield tag("text", number(value), class_="y", x=LEFT - 8, y=y(value) + 3.5)
    for value in x.ticks(6):
        if float(value).is_integer():
            yield tag("text", number(value), class_="x", x=x(value), y=HEIGHT - 8)
    for step in epoch_ends if len(epoch_ends) <= _MOST_EPOCHS else ():
        if x.low < step < x.high:
            yield tag("line", class_="epoch", x1=x(step), x2=x(step), y1=TOP, y2=HEIGHT - BOTTOM)
    yield tag("line", class_="axis", x1=LEFT, x2=WIDTH - RIGHT, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM)


def _curve(one: Series, x: Scale, y: Scale) -> Markup:
    shown = [math.isfinite(v) and y.low <= v <= y.high for v in one.values]
    points = [(x(s), y(v)) if ok else None for s, v, ok in zip(one.steps, one.values, shown, strict=True)]
    stretches: list[list[tuple[float, float]]] = [[]]
    for point in points:
        stretches[-1].append(point) if point is not None else stretches.append([])
    path = "".join("M" + "L".join(f"{a:g},{b:g}" for a, b in stretch) for stretch in stretches if len(stretch) > 1)
    few = sum(shown) <= _MOST_MARKERS
    alone = [p for stretch in stretches for p in stretch if few or len(stretch) == 1]
    return tag(
        "g",
        tag("path", d=path) if path else None,
        *(tag("circle", cx=a, cy=b, r=2.6) for a, b in alone),
        class_=f"curve c{one.colour % COLOURS}{' dashed' if one.colour // COLOURS % 2 else ''}",
        data_steps=json.dumps(one.steps),
        data_values=json.dumps([float(f"{v:.6g}") if math.isfinite(v) else None for v in one.values]),
    )


def _legend_entry(one: Series) -> Markup:
    finite = [value for value in one.values if math.isfinite(value)]
    last = number(finite[-1]) if finite else "-"
    return tag(
        "span",
        tag("i", class_=f"c{one.colour % COLOURS}"),
        join_markup(one.label, " "),
        tag("b", last, data_last=last),
        tag("em", f" {one.not_finite} not finite") if one.not_finite else None,
    )
