"""What stands in the report of one run beside its curves."""

from __future__ import annotations

from datetime import datetime

from trainstack.checkpointing import CheckpointInfo
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.report.chart import number
from trainstack.trainer.report.differing import flat
from trainstack.trainer.report.facts import Session
from trainstack.trainer.report.markup import Markup, joined, table, tag
from trainstack.trainer.report.run_on_disk import ReportedRun

_MOST_METRICS = 3
_MOST_CHECKPOINTS = 10


def status_of(run: ReportedRun) -> Markup | None:
    """How the newest session ended, as a badge; None if that is not known."""
    if not run.facts.sessions:
        return None
    status = run.facts.sessions[-1].status
    words = "running, or killed" if status == "running" else status
    return tag("span", words, class_=f"status {status}")


def duration(run: ReportedRun) -> str | None:
    """How long all sessions took together, as far as they have ended; None for none."""
    known = [session.seconds for session in run.facts.sessions if session.seconds is not None]
    return _time(sum(known)) if known else None


def tiles_of(run: ReportedRun) -> Markup:
    """The few numbers that one looks for first."""
    sessions, curves = run.facts.sessions, run.shown_curves
    tiles = []
    if sessions and sessions[-1].last_step is not None:
        tiles.append(("global steps", number(sessions[-1].last_step)))
    if (time := duration(run)) is not None:
        tiles.append(("time", time))
    seconds = sum(session.seconds or 0.0 for session in sessions)
    steps = sum(session.last_step - session.first_step for session in sessions if session.last_step is not None)
    if seconds and steps:
        tiles.append(("steps a second, all in all", number(steps / seconds)))
    shown = dict.fromkeys([run.facts.monitor, "val/loss", "train/loss_epoch"])
    tiles += [(f"{name}, at the end", number(float(curves[name][1][-1]))) for name in shown if name in curves][:2]
    if run.facts.model:
        tiles.append(("parameters", number(run.facts.model[0][2])))
    return tag("div", *(tag("div", tag("b", value), tag("span", what)) for what, value in tiles), class_="tiles")


def details_of(run: ReportedRun) -> Markup:
    """Plan, stack, checkpoints, privacy, arguments, model, environment and sessions, as far as they are known."""
    facts = run.facts
    return joined(
        tag(
            "div",
            tag(
                "div",
                _section("Plan", table(("", ""), facts.plan)) if facts.plan else None,
                _section("Environment", table(("", ""), facts.environment)) if facts.environment else None,
            ),
            tag("div", _section("Stack", tag("div", tag("pre", facts.stack), class_="card")) if facts.stack else None),
            class_="two",
        ),
        _section("Checkpoints", _checkpoints(run)) if facts.sessions or run.checkpoints else None,
        _section("Privacy", tag("div", tag("pre", facts.privacy), class_="card")) if facts.privacy else None,
        _section("Arguments", _arguments(run)) if facts.arguments else None,
        _section("Model", _model(run)) if facts.model else None,
        _section("Sessions", _sessions(facts.sessions)) if facts.sessions else None,
    )


def _section(title: str, *content: Markup) -> Markup:
    return tag("section", tag("h2", title), *content)


def _checkpoints(run: ReportedRun) -> Markup:
    if not run.checkpoints:
        return tag("p", "None.", class_="soft")
    columns = ("name", "step", "measured there", "size", "written (UTC)")
    newest, older = run.checkpoints[-_MOST_CHECKPOINTS:], run.checkpoints[:-_MOST_CHECKPOINTS]
    rest = tag("summary", f"{len(older)} older"), table(columns, [_checkpoint(run, info) for info in older])
    return joined(table(columns, [_checkpoint(run, info) for info in newest]), tag("details", *rest) if older else None)


def _checkpoint(run: ReportedRun, info: CheckpointInfo) -> tuple[str, ...]:
    told = [name for name in info.metrics if not run.is_secret(name)]
    ordered = sorted(told, key=lambda name: (name != run.facts.monitor, not name.startswith("val/")))
    return (
        info.name + (" (kept for good)" if info.pinned else ""),
        "-" if info.global_step is None else number(info.global_step),
        ", ".join(f"{name} {info.metrics[name]:.4g}" for name in ordered[:_MOST_METRICS]) or "-",
        f"{info.size / 1e6:.1f} MB",
        info.created.replace("T", " ")[:19],
    )


def _arguments(run: ReportedRun) -> Markup:
    given, default = dict(flat(run.facts.arguments)), dict(flat(TrainerArguments().to_dict()))
    chosen = [(tag("code", name), value) for name, value in given.items() if default.get(name) != value]
    others = [(tag("code", name), value) for name, value in given.items() if default.get(name) == value]
    return joined(
        table(("argument", "value"), chosen) if chosen else None,
        tag("details", tag("summary", f"{len(others)} as they are by default"), table(("", ""), others)),
    )


def _model(run: ReportedRun) -> Markup:
    rows = [(tag("code", name), kind, number(size), number(trained)) for name, kind, size, trained in run.facts.model]
    whole = table(("part", "class", "parameters", "trained"), rows[:1])
    if len(rows) == 1:
        return whole
    columns = ("part", "class", "parameters", "trained")
    return joined(whole, tag("details", tag("summary", f"{len(rows) - 1} parts"), table(columns, rows[1:])))


def _sessions(sessions: tuple[Session, ...]) -> Markup:
    rows = [
        (
            f"{datetime.fromtimestamp(session.began):%Y-%m-%d %H:%M:%S}",
            number(session.first_step),
            "-" if session.last_step is None else number(session.last_step),
            "-" if session.seconds is None else _time(session.seconds),
            session.status + (f": {session.reason}" if session.reason else ""),
        )
        for session in sessions
    ]
    return table(("began", "after step", "to step", "time", "ended"), rows)


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole // 60 % 60} min"
