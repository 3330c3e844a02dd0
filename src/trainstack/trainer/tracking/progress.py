"""The progress display: a bar on a terminal, lines in a log, or nothing."""

from __future__ import annotations

import difflib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

from trainstack.errors import ConfigurationError, MissingExtraError
from trainstack.trainer.tracking.views import epochs_html
from trainstack.trainer.tracking.writers.console import Pace, QuietStream

if TYPE_CHECKING:
    from rich.console import RenderableType

NEVER = sys.maxsize


class ProgressDisplay(ABC):
    """Shows how far a run is.

    The loop calls `poll` only when a step has been reached that `next_poll` names, so that a step costs one
    comparison of integers:

        if done >= display.next_poll: display.poll(done, loss)

    No method raises because the terminal is gone: the display falls silent.
    """

    next_poll: int = NEVER

    @abstractmethod
    def start_epoch(self, epoch: int, epochs: int, total_steps: int | None, done: int) -> None:
        """Epoch `epoch` (from 1) of `epochs` begins; `done` of its `total_steps` (None: unknown) are done."""

    @abstractmethod
    def poll(self, done: int, loss: Callable[[], float | None]) -> None:
        """`done` steps are done. Paints if it is time; only then is `loss` called."""

    @abstractmethod
    def end_epoch(self, summary: str = "") -> None:
        """The epoch is over; `summary` is a line that stays on the screen."""

    def show_run(self, done: int, total: int | None) -> None:  # noqa: B027 - only for an estimate
        """`done` global steps of the run's `total` (None: unknown) are done; called right before `start_epoch`."""

    def show_epoch(self, epoch: int, values: Mapping[str, float]) -> None:  # noqa: B027 - a bar has no table
        """Keep the values of epoch `epoch` (from 0), by name, for a table; called right before `end_epoch`."""

    @abstractmethod
    def start_validation(self, key: str, total: int | None) -> None:
        """`total` validation batches of data set `key` begin; `poll` counts them until `end_validation`."""

    @abstractmethod
    def end_validation(self) -> None:
        """The validation is over; `poll` counts training steps again."""

    @abstractmethod
    def close(self) -> None:
        """Leave the terminal as it was found; calling it again does nothing."""


class NoProgress(ProgressDisplay):
    """Shows nothing: `next_poll` is never reached."""

    def start_epoch(self, epoch: int, epochs: int, total_steps: int | None, done: int) -> None: ...
    def poll(self, done: int, loss: Callable[[], float | None]) -> None: ...
    def end_epoch(self, summary: str = "") -> None: ...
    def start_validation(self, key: str, total: int | None) -> None: ...
    def end_validation(self) -> None: ...
    def close(self) -> None: ...


@dataclass
class Phase:
    """An epoch of training or one validation; `began` is the clock's time when `first` steps were done."""

    label: str
    total: int | None
    first: int
    done: int
    began: float


class RunTimes:
    """Estimates how long an epoch and the run still take, from all steps that the display has seen.

    Seconds of training and seconds in all, validations and saves included, are counted apart.
    """

    def __init__(self) -> None:
        self.done = 0
        self.total: int | None = None
        self._first = 0
        self._began: float | None = None
        self._trained_s = 0.0

    def start_epoch(self, now: float) -> None:
        """An epoch begins; before the first one nothing is counted."""
        if self._began is None:
            self._began, self._first = now, self.done

    def end_epoch(self, trained_s: float) -> None:
        """An epoch is over, with `trained_s` seconds of training."""
        self._trained_s += trained_s

    def steps_per_second(self, phase: Phase, now: float) -> float:
        """Of training; 0 before there is a step."""
        steps, seconds = self._steps(phase), self._trained_s + now - phase.began
        return steps / seconds if seconds > 0 else 0.0

    def left_in_all(self, phase: Phase, now: float) -> float | None:
        """Seconds until the run ends; None where its length is not known, or before there is a step."""
        steps = self._steps(phase)
        if self.total is None or self._began is None or steps <= 0:
            return None
        left = self.total - self.done - (phase.done - phase.first)
        return max(0.0, left * (now - self._began) / steps)

    def _steps(self, phase: Phase) -> int:
        return self.done - self._first + phase.done - phase.first


@dataclass(frozen=True, kw_only=True)
class Words:
    """The texts next to a bar, such as "14/23", "loss 1.15", "21.4 steps/s" and "0:02 left in epoch, 0:41 in all".

    Unknown texts are empty.
    """

    count: str
    loss: str
    speed: str
    left: str

    def __str__(self) -> str:
        return "  ".join(word for word in (self.count, self.loss, self.speed, self.left) if word)

    def shorter(self) -> Iterator[Words]:
        """The same in less and less room: without the speed, the loss, and at last the time."""
        words = self
        yield words
        for change in ({"left": self.left.replace(_IN_EPOCH, "")}, {"speed": ""}, {"loss": ""}, {"left": ""}):
            words = replace(words, **change)
            yield words


_VALIDATION = "validation"
_IN_EPOCH = " in epoch"
_SHORTEST_BAR, _LONGEST_BAR = 10, 40
"""Columns of the terminal."""


def _clock(seconds: float) -> str:
    whole = max(0, round(seconds))
    hours = f"{whole // 3600}:" if whole >= 3600 else ""
    return f"{hours}{whole // 60 % 60:0{2 if hours else 1}}:{whole % 60:02}"


class PacedProgress(ProgressDisplay):
    """A display that calls `paint` as often as `pace` allows."""

    def __init__(self, stream: QuietStream, pace: Pace) -> None:
        self.stream = stream
        self.pace = pace
        self.phase: Phase | None = None
        self._training: Phase | None = None
        self._times = RunTimes()

    @abstractmethod
    def paint(self, phase: Phase, loss: float | None) -> None:
        """Show `phase`."""

    def show_run(self, done: int, total: int | None) -> None:
        self._times.done, self._times.total = done, total

    def words(self, phase: Phase, loss: float | None, *, per_cent: bool = False) -> Words:
        """The texts of `phase` next to its label."""
        now, training = self.pace.clock(), phase if self._training is None else self._training
        is_validation = phase.label.startswith(_VALIDATION)
        seconds = now - phase.began
        own = (phase.done - phase.first) / seconds if seconds > 0 else 0.0
        speed = own if is_validation else self._times.steps_per_second(phase, now)
        count = str(phase.done) if phase.total is None else f"{phase.done}/{phase.total}"
        if per_cent and phase.total:
            count += f" ({100 * phase.done // phase.total}%)"
        in_all = self._times.left_in_all(training, now)
        left = []
        if phase.total is not None and speed > 0:
            left.append(f"{_clock((phase.total - phase.done) / speed)} left")
        if in_all is not None:
            left[-1:] = [f"{left[0]}{'' if is_validation else _IN_EPOCH}"] if left else []
            left.append(f"{_clock(in_all)} {'in all' if left else 'left in all'}")
        return Words(
            count=count,
            loss="" if loss is None else f"loss {loss:.4g}",
            speed=f"{speed:.3g} {'batches' if is_validation else 'steps'}/s" if speed > 0 else "",
            left=", ".join(left),
        )

    def start_epoch(self, epoch: int, epochs: int, total_steps: int | None, done: int) -> None:
        now = self.pace.clock()
        self._times.start_epoch(now)
        self._enter(Phase(f"epoch {epoch}/{epochs}", total_steps, done, done, now))

    def poll(self, done: int, loss: Callable[[], float | None]) -> None:
        if self.phase is not None:
            self.phase.done = done
            if self.pace.poll(done):
                with self.pace.painting():
                    self.paint(self.phase, loss())
        self._set_next_poll()

    def end_epoch(self, summary: str = "") -> None:
        if self.phase is not None:
            self._times.end_epoch(self.pace.clock() - self.phase.began)
        self.phase = None
        self.next_poll = NEVER

    def start_validation(self, key: str, total: int | None) -> None:
        self._training = self.phase
        self._enter(Phase(f"{_VALIDATION} {key}", total, 0, 0, self.pace.clock()))

    def end_validation(self) -> None:
        validation, self.phase, self._training = self.phase, self._training, None
        if self.phase is not None:
            if validation is not None:  # its seconds are not seconds of training
                self.phase.began += self.pace.clock() - validation.began
            self._enter(self.phase)
        self._set_next_poll()

    def close(self) -> None:
        self.phase = self._training = None
        self.next_poll = NEVER

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.pace.start(phase.done)
        self._paint_if_due()
        self._set_next_poll()

    def _paint_if_due(self) -> None:
        if self.phase is not None and self.pace.is_due():
            with self.pace.painting():
                self.paint(self.phase, None)

    def _set_next_poll(self) -> None:
        silent = self.stream.gone or self.phase is None
        self.next_poll = NEVER if silent else self.pace.next_poll


class PlainProgress(PacedProgress):
    """A line at most every `interval` seconds and one for each epoch's summary, for logs and pipes."""

    def __init__(self, stream: TextIO | None, interval: float = 30.0) -> None:
        super().__init__(QuietStream(stream), Pace(interval, due_at_once=False))

    def paint(self, phase: Phase, loss: float | None) -> None:
        self.stream.line(f"{phase.label}  {self.words(phase, loss, per_cent=True)}")

    def end_epoch(self, summary: str = "") -> None:
        super().end_epoch(summary)
        if summary:
            self.stream.line(summary)


class RichProgress(PacedProgress):
    """One bar, painted by the training thread itself at most ten times a second; no thread repaints it.

    While it is open, text printed to `sys.stdout` and `sys.stderr` appears above the bar, if these are terminals.
    Summaries wait for the next paint, so that many short epochs cost no more than a long one.
    """

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__(QuietStream(stream), Pace(0.1, due_at_once=True))
        from rich.console import Console
        from rich.live import Live

        file = cast(IO[str], self.stream)
        self._console = Console(file=file, force_terminal=True, force_jupyter=False, highlight=False)
        self._bar: RenderableType = ""
        self._live = Live(
            get_renderable=lambda: self._bar,
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=QuietStream(sys.stdout).isatty(),
            redirect_stderr=QuietStream(sys.stderr).isatty(),
        )
        self._lines: list[str] = []

    def paint(self, phase: Phase, loss: float | None) -> None:
        self._bar = self._drawn(phase, self.words(phase, loss))
        self._live.start()
        self._print_lines()
        self._live.refresh()

    def end_epoch(self, summary: str = "") -> None:
        super().end_epoch(summary)
        if summary:
            self._lines.append(summary)
        if self._live.is_started:
            self._erase()

    def close(self) -> None:
        super().close()
        self._print_lines()
        self._erase()

    def _drawn(self, phase: Phase, known: Words) -> RenderableType:
        """A line that fits: on a narrow terminal with fewer words, and at last without a bar."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        width = self._console.width - 1  # a full line would wrap on some terminals
        label, room = phase.label[: width // 2], 0
        for words in known.shorter():
            room = width - len(label) - len(str(words)) - 4  # two blanks on each side of the bar
            if room >= _SHORTEST_BAR:
                break
        grid = Table.grid(padding=(0, 2, 0, 0))
        bar = [ProgressBar(phase.total, phase.done, width=min(room, _LONGEST_BAR))] if room >= _SHORTEST_BAR else []
        grid.add_row(Text(label), *bar, Text(str(words)))
        return grid

    def _erase(self) -> None:
        """Remove the bar from the screen, and print the waiting lines."""
        self._print_lines()
        self._live.stop()

    def _print_lines(self) -> None:
        lines, self._lines = self._lines, []
        if lines:
            self._console.print("\n".join(lines), markup=False, emoji=False, soft_wrap=True)


class NotebookProgress(PacedProgress):
    """One output of the cell, updated by the training thread at most four times a second.

    Raises:
        MissingExtraError: IPython is not installed.
    """

    def __init__(self) -> None:
        try:
            from IPython.display import display  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise MissingExtraError("progress='notebook'", "ipython", "notebook") from error
        super().__init__(QuietStream(sys.stdout), Pace(0.25, due_at_once=True))
        self._display, self._handle = display, None
        self._epochs: dict[int, Mapping[str, float]] = {}

    def paint(self, phase: Phase, loss: float | None) -> None:
        total = "" if phase.total is None else f' value="{phase.done}" max="{max(1, phase.total)}"'
        label = f"{phase.label}  {self.words(phase, loss)}"
        self._show(f"<progress{total}></progress> {escape(label)}", label)

    def show_epoch(self, epoch: int, values: Mapping[str, float]) -> None:
        self._epochs[epoch] = values

    def end_epoch(self, summary: str = "") -> None:
        self._paint_if_due()
        super().end_epoch(summary)

    def close(self) -> None:
        if self._epochs or self._handle is not None:
            self._show("", f"{len(self._epochs)} epochs")
        super().close()
        self._epochs, self._handle = {}, None

    def _show(self, bar: str, text: str) -> None:
        content: dict[str, Any] = {"text/html": bar + (epochs_html(self._epochs) if self._epochs else "")}
        content["text/plain"] = text
        if self._handle is None:
            self._handle = self._display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


def is_in_kernel() -> bool:
    """Whether a kernel of Jupyter runs this process; imports nothing."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return getattr(get_ipython(), "kernel", None) is not None


DISPLAYS = ("auto", "rich", "plain", "notebook", "none")
"""The names of displays."""


def build_progress(kind: str | ProgressDisplay | None = "auto", stream: TextIO | None = None) -> ProgressDisplay:
    """A display: `kind` is one of `DISPLAYS`, or a display as it is.

    `"auto"` is `"notebook"` in a kernel of Jupyter, unless a `stream` is given. Else it is `"rich"`, a bar, where
    `stream` (default: `sys.stderr`; borrowed, never closed) is a terminal that can move its cursor, and `"plain"`,
    lines, otherwise. Builds, which set CI and keep all that a terminal gets, get lines too. The bar has no colours
    where the environment sets NO_COLOR.

    Raises:
        ConfigurationError: `kind` is none of these.
        MissingExtraError: `"notebook"` without IPython.
    """
    if isinstance(kind, ProgressDisplay):
        return kind
    if kind == "notebook" or (kind == "auto" and stream is None and is_in_kernel()):
        return NotebookProgress()
    stream = sys.stderr if stream is None else stream
    if kind == "auto":
        dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
        is_build = os.environ.get("CI", "").lower() not in ("", "0", "false")
        kind = "rich" if QuietStream(stream).isatty() and not dumb and not is_build else "plain"
    if kind == "rich":
        return RichProgress(stream)
    if kind == "plain":
        return PlainProgress(stream)
    if kind is None or kind == "none":
        return NoProgress()
    close = difflib.get_close_matches(str(kind).lower(), DISPLAYS, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigurationError(f"no progress display is called {kind!r}.{hint} Known: {', '.join(DISPLAYS)}.")


def format_plan_table(rows: Sequence[tuple[str, str]]) -> str:
    """Format `rows` of (label, value) as two aligned columns of plain text; a value may have more lines."""
    width = max((len(what) for what, _ in rows), default=0)
    lines = []
    for what, value in rows:
        first, *more = value.splitlines() or [""]
        lines.append(f"{what:<{width}}  {first}".rstrip())
        lines.extend(f"{'':<{width}}  {line}".rstrip() for line in more)
    return "\n".join(lines)
