from __future__ import annotations

import io
import re
import sys
import threading
from collections.abc import Callable

import pytest

from tests.helpers.costs import cpu_s, least
from tools.terminal import Screen
from trainstack.errors import ConfigurationError
from trainstack.trainer.tracking.progress import (
    NEVER,
    NoProgress,
    PacedProgress,
    Phase,
    PlainProgress,
    ProgressDisplay,
    RichProgress,
    build_progress,
    format_plan_table,
)
from trainstack.trainer.tracking.writers.console import Pace, QuietStream

KINDS = ("rich", "plain", "none")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """A clock whose time the test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now


class SlowPainter(PacedProgress):
    """Paints for `cost` seconds of a fake clock."""

    def __init__(self, clock: Clock, cost: float) -> None:
        super().__init__(QuietStream(io.StringIO()), Pace(0.1, due_at_once=True, clock=clock))
        self.clock = clock
        self.cost = cost
        self.paints: list[tuple[int, float | None]] = []

    def paint(self, phase: Phase, loss: float | None) -> None:
        self.clock.now += self.cost
        self.paints.append((phase.done, loss))

    def end_epoch(self, summary: str) -> None: ...


def drive(display: ProgressDisplay, clock: Clock, steps: int, seconds: float) -> int:
    """Run `steps` steps of `seconds` each; return the number of polls."""
    looks = 0
    for done in range(1, steps + 1):
        clock.now += seconds
        if done >= display.next_poll:
            display.poll(done, lambda: 0.5)
            looks += 1
    return looks


def run_steps(display: ProgressDisplay, steps: int, loss: Callable[[], float | None]) -> None:
    done = 0
    while done < steps:
        done += 1
        if done >= display.next_poll:
            display.poll(done, loss)


# --- cost of a step


@pytest.mark.spec("F124")
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_costs_less_than_a_microsecond(kind: str) -> None:
    steps = 100_000
    display = build_progress(kind, Terminal())
    display.start_epoch(1, 1, steps, 0)
    seconds = least(lambda: cpu_s(lambda: run_steps(display, steps, lambda: 0.5)), 1e-6 * steps)
    display.close()
    assert seconds / steps < 1e-6  # 0.07 us with the loop itself; a repaint a step would be 400 us


@pytest.mark.spec("HZ-29")
@pytest.mark.parametrize("kind", KINDS)
def test_a_display_starts_no_thread(kind: str) -> None:
    before = threading.active_count()
    display = build_progress(kind, Terminal())
    display.start_epoch(1, 1, 10, 0)
    run_steps(display, 10, lambda: 0.5)
    assert threading.active_count() == before
    display.close()


@pytest.mark.parametrize(
    ("seconds", "steps", "most"), [(0.0001, 100_000, 1000), (0.001, 20_000, 1000), (0.1, 100, 100)]
)
def test_the_clock_is_read_about_forty_times_a_second(seconds: float, steps: int, most: int) -> None:
    clock = Clock()
    display = SlowPainter(clock, 0.0)
    display.start_epoch(1, 1, steps, 0)
    looks = drive(display, clock, steps, seconds)
    duration = steps * seconds
    assert looks <= most
    assert looks >= min(steps, 30 * duration)


def test_at_most_128_steps_pass_between_polls() -> None:
    clock = Clock()
    display = SlowPainter(clock, 0.0)
    display.start_epoch(1, 1, 10_000, 0)
    assert drive(display, clock, 10_000, 1e-6) < 10_000 / 100
    assert display.next_poll <= 10_000 + 128


@pytest.mark.parametrize("cost", [0.0, 0.0005, 0.02, 0.5])
def test_painting_has_a_maximum_rate_and_share_of_time(cost: float) -> None:
    clock = Clock()
    display = SlowPainter(clock, cost)
    start = clock.now
    display.start_epoch(1, 1, 200_000, 0)
    drive(display, clock, 200_000, 0.001)
    duration = clock.now - start
    pause = max(
        0.1, min(100 * cost, max(1.0, 10 * cost))
    )  # a hundredth of the time, but once a second if that is a tenth
    assert len(display.paints) <= duration / (pause + cost) + 2
    assert len(display.paints) >= 0.8 * duration / (pause + cost)


def test_short_epochs_do_not_increase_the_painting_rate() -> None:
    clock = Clock()
    display = SlowPainter(clock, 0.005)
    start = clock.now
    for epoch in range(1000):
        display.start_epoch(epoch, 1000, 3, 0)
        drive(display, clock, 3, 0.001)
        display.start_validation("val", 2)
        drive(display, clock, 2, 0.001)
        display.end_validation()
    assert 0.005 * len(display.paints) <= 0.011 * (clock.now - start) + 0.005


def test_the_loss_is_fetched_only_to_be_painted() -> None:
    clock = Clock()
    display = SlowPainter(clock, 0.002)
    fetched = 0

    def fetch() -> float:
        nonlocal fetched
        fetched += 1
        return 1.5

    display.start_epoch(1, 1, 5000, 0)
    for done in range(1, 5001):
        clock.now += 0.001
        if done >= display.next_poll:
            display.poll(done, fetch)
    assert fetched == len([loss for _, loss in display.paints if loss == 1.5])
    assert fetched <= 26


def test_an_error_in_fetching_the_loss_is_raised() -> None:
    clock = Clock()
    painter = SlowPainter(clock, 0.0)
    painter.start_epoch(1, 1, 10, 0)
    clock.now += 1

    def fetch() -> float:
        raise ValueError("device lost")

    with pytest.raises(ValueError, match="device lost"):
        painter.poll(1, fetch)


# --- phases


def test_the_epoch_continues_after_a_validation() -> None:
    clock = Clock()
    display = SlowPainter(clock, 0.0)
    display.start_epoch(2, 3, 100, 40)
    assert display.next_poll == 41
    display.poll(41, lambda: None)
    display.start_validation("val", 5)
    assert display.next_poll == 1
    assert display.phase is not None
    assert (display.phase.label, display.phase.total) == ("validation val", 5)
    display.end_validation()
    assert display.phase is not None
    assert (display.phase.label, display.phase.done, display.next_poll) == ("epoch 2/3", 41, 42)


@pytest.mark.parametrize("kind", KINDS)
def test_a_display_supports_validation_alone_and_repeated_close(kind: str) -> None:
    display = build_progress(kind, Terminal())
    display.start_validation("val", None)
    run_steps(display, 3, lambda: None)
    display.end_validation()
    assert display.next_poll == NEVER
    display.close()
    display.close()
    assert display.next_poll == NEVER


# --- plain lines


@pytest.mark.spec("FN-26")
def test_plain_progress_prints_lines_at_intervals_and_epoch_ends() -> None:
    clock = Clock()
    stream = io.StringIO()
    display = PlainProgress(stream)
    display.pace = Pace(30.0, due_at_once=False, clock=clock)
    display.start_epoch(1, 2, 1000, 0)
    drive(display, clock, 1000, 0.125)
    display.end_epoch("epoch 1: train/loss 0.5")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[0] == "epoch 1/2  240/1000 (24%)  loss 0.5  8 steps/s  1:35 left"
    assert lines[-1] == "epoch 1: train/loss 0.5"
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()


def test_an_unknown_length_has_no_percentage() -> None:
    stream = io.StringIO()
    display = PlainProgress(stream, interval=0.0)
    display.paint(Phase("epoch 1/1", None, 0, 7, display.pace.clock() - 1.0), None)
    assert stream.getvalue().startswith("epoch 1/1  7  ")
    assert "%" not in stream.getvalue()


# --- the bar


@pytest.mark.spec("FN-26")
def test_the_bar_shows_counts_loss_and_summaries() -> None:
    terminal = Terminal()
    display = build_progress("rich", terminal)
    assert isinstance(display, RichProgress)
    display.start_epoch(1, 2, 8, 2)
    assert display.phase is not None
    display.phase.done = 5
    display.paint(display.phase, 0.25)
    display.end_epoch("epoch 1: [loss] 0.5")
    display.close()
    text = terminal.getvalue()
    assert "epoch 1/2" in text
    assert "5/8" in text
    assert "loss 0.25" in text
    assert "epoch 1: [loss] 0.5\n" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_the_bar_does_not_interpret_brackets_in_names() -> None:
    terminal = Terminal()
    display = build_progress("rich", terminal)
    display.start_validation("[red]val[/blue]", 3)
    display.close()
    assert "[red]val[/blue]" in terminal.getvalue()


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    display = build_progress("rich", terminal)
    display.start_epoch(1, 2, 8, 2)
    display.close()
    assert "\x1b[3" not in terminal.getvalue()
    assert "2/8" in terminal.getvalue()


def test_closing_the_bar_restores_the_standard_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    display = build_progress("rich", terminal)
    display.start_epoch(1, 1, 2, 0)
    print("said by a hook")
    display.close()
    assert sys.stdout is terminal
    assert "said by a hook\n" in terminal.getvalue()


# --- a terminal that closes


class Broken(Terminal):
    """A terminal whose other end closes once `gone` is set."""

    gone: Exception | None = None

    def write(self, text: str) -> int:
        if self.gone is not None:
            raise self.gone
        return super().write(text)

    def flush(self) -> None:
        if self.gone is not None:
            raise self.gone


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(5, "I/O error"), None])
def test_a_display_stops_when_its_terminal_has_closed(kind: str, error: Exception | None) -> None:
    terminal = Broken()
    display = build_progress(kind, terminal)
    display.start_epoch(1, 2, 10, 0)
    if error is None:
        terminal.close()  # every call raises ValueError
    else:
        terminal.gone = error
    if isinstance(display, PacedProgress):
        assert display.phase is not None
        display.paint(display.phase, 0.5)
        display.poll(3, lambda: 0.5)
        assert display.next_poll == NEVER
    display.start_validation("val", 3)
    display.end_validation()
    display.end_epoch("epoch 1: loss 0.5")
    display.start_epoch(2, 2, 10, 0)
    assert display.next_poll == NEVER
    display.close()


# --- choosing


@pytest.mark.spec("FN-26")
def test_auto_is_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for build, display_class in (
        ("", RichProgress),
        ("false", RichProgress),
        ("1", PlainProgress),
        ("true", PlainProgress),
    ):
        monkeypatch.setenv("CI", build)
        assert isinstance(build_progress("auto", Terminal()), display_class)
    monkeypatch.delenv("CI")
    assert isinstance(build_progress("auto", Terminal()), RichProgress)
    assert isinstance(build_progress("auto", io.StringIO()), PlainProgress)
    closed = Terminal()
    closed.close()
    display = build_progress("auto", closed)
    display.end_epoch("not printed")
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(build_progress("auto", Terminal()), PlainProgress)


@pytest.mark.spec("FN-26")
def test_none_shows_nothing_and_a_wrong_kind_is_refused() -> None:
    stream = Terminal()
    for kind in ("none", None):
        display = build_progress(kind, stream)
        assert isinstance(display, NoProgress)
        display.start_epoch(1, 1, 5, 0)
        assert display.next_poll == NEVER
        display.end_epoch("summary")
        display.close()
    assert stream.getvalue() == ""
    with pytest.raises(
        ConfigurationError, match=r"'Ritch'\. Did you mean 'rich'\? Known: auto, rich, plain, notebook, none"
    ):
        build_progress("Ritch", stream)


def test_the_display_goes_to_standard_error_unless_told(capsys: pytest.CaptureFixture[str]) -> None:
    build_progress("plain").end_epoch("summary")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "summary\n")


# --- the plan


def test_the_plan_is_a_table_of_two_aligned_columns() -> None:
    rows = [
        ("backend", "ddp-amp"),
        ("global batch", "64 = 2 processes × 32"),
        ("notes", "one\ntwo"),
        ("empty", ""),
    ]
    assert format_plan_table(rows) == (
        "backend       ddp-amp\nglobal batch  64 = 2 processes × 32\nnotes         one\n              two\nempty"
    )
    assert format_plan_table([]) == ""


# --- estimates


def test_speed_and_remaining_time_include_all_steps_of_the_run() -> None:
    clock, stream = Clock(), io.StringIO()
    display = PlainProgress(stream)
    display.pace = Pace(0.0, due_at_once=False, clock=clock)
    for epoch in (1, 2):
        display.show_run(20 * (epoch - 1), 160)
        display.start_epoch(epoch, 8, 20, 0)
        drive(display, clock, 20, 0.5)  # 10 s of training
        display.start_validation("val", 4)
        drive(display, clock, 4, 0.5)
        display.end_validation()
        display.end_epoch()
        clock.now += 1.0  # a save; 13 s in all
    display.show_run(40, 160)
    display.start_epoch(3, 8, 20, 0)
    assert display.phase is not None
    assert str(display.words(display.phase, None)) == "0/20  2 steps/s  0:10 left in epoch, 1:18 in all"
    drive(display, clock, 10, 0.5)
    assert str(display.words(display.phase, 1.5)) == "10/20  loss 1.5  2 steps/s  0:05 left in epoch, 1:08 in all"
    display.start_validation("val", 4)
    drive(display, clock, 2, 0.5)
    assert str(display.words(display.phase, None)) == "2/4  2 batches/s  0:01 left, 1:10 in all"
    display.end_validation()
    assert display.words(display.phase, None).speed == "2 steps/s"  # without the second of the validation


def test_without_a_run_length_only_the_epoch_is_estimated() -> None:
    clock = Clock()
    display = PlainProgress(io.StringIO())
    display.pace = Pace(0.0, due_at_once=False, clock=clock)
    display.start_epoch(1, 8, 20, 0)
    drive(display, clock, 10, 0.5)
    assert display.phase is not None
    assert str(display.words(display.phase, None)) == "10/20  2 steps/s  0:05 left"
    display.start_epoch(1, 8, None, 0)
    assert str(display.words(display.phase, None)) == "0"


# --- pauses, and lines on the screen


def test_one_slow_paint_does_not_stop_the_bar() -> None:
    clock = Clock()
    pace = Pace(0.1, due_at_once=True, clock=clock)
    for cost, longest in ((0.1, 1.0), (0.001, 1.0), (0.001, 0.1), (0.001, 0.1), (5.0, 0.1)):
        with pace.painting():
            clock.now += cost
        clock.now += longest + 1e-6
        assert pace.is_due(), cost


def screen_of(terminal: Terminal, width: int = 80) -> list[str]:
    screen = Screen(width)
    screen.feed(terminal.getvalue().replace("\n", "\r\n"))
    return screen.lines


def test_the_bar_is_removed_after_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    display = build_progress("rich", terminal)
    assert isinstance(display, RichProgress)
    display.show_run(0, 16)
    display.start_epoch(1, 2, 8, 0)
    assert display.phase is not None
    display.phase.done = 4
    display.paint(display.phase, 0.25)
    assert screen_of(terminal)[-1].startswith("epoch 1/2  ━")
    print("said by a hook")
    assert [row[:14] for row in screen_of(terminal)] == ["said by a hook", "epoch 1/2  ━━━"]
    display.end_epoch()
    print("the line of epoch 1")
    assert screen_of(terminal) == ["said by a hook", "the line of epoch 1"]
    display.start_epoch(2, 2, 8, 0)
    display.paint(display.phase, 0.25)
    display.close()
    assert screen_of(terminal) == ["said by a hook", "the line of epoch 1"]


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (120, "epoch 3/8  BAR  14/23  loss 1.15  2 steps/s  0:04 left in epoch, 1:02 in all"),
        (80, "epoch 3/8  BAR  14/23  loss 1.15  2 steps/s  0:04 left, 1:02 in all"),
        (60, "epoch 3/8  BAR  14/23  0:04 left, 1:02 in all"),
        (40, "epoch 3/8  BAR  14/23"),
        (20, "epoch 3/8  14/23"),
    ],
)
def test_a_bar_fits_into_its_terminal(width: int, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    terminal, clock = Terminal(), Clock()
    display = build_progress("rich", terminal)
    assert isinstance(display, RichProgress)
    display.pace = Pace(0.1, due_at_once=False, clock=clock)
    display.show_run(46, 184)
    display.start_epoch(3, 8, 23, 0)
    assert display.phase is not None
    clock.now, display.phase.done = clock.now + 7.0, 14
    display.paint(display.phase, 1.15)
    (row,) = screen_of(terminal, width)
    assert re.sub("[━╸╺]+", "BAR", row) == shown
    assert len(row) < width
    display.close()
