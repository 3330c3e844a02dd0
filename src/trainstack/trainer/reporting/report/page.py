"""The report as one self-contained HTML page."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from trainstack.checkpointing import CheckpointInfo
from trainstack.errors import TrainstackError
from trainstack.step_log import ranks_of
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.core.logs import flatten
from trainstack.trainer.reporting.report.chart import COLOURS, chart, number
from trainstack.trainer.reporting.report.facts import Session
from trainstack.trainer.reporting.report.markup import Markup, join_markup, table, tag
from trainstack.trainer.reporting.report.panels import MOST_CURVES, panels_of
from trainstack.trainer.reporting.report.runs import ReportedRun
from trainstack.trainer.reporting.run_comparison import compare_runs


def format_arguments(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Nested arguments as `{"outer.inner": value}`, each value as one would write it in Python."""
    return {name: repr(list(v) if isinstance(v, tuple) else v) for name, v in flatten(arguments)}


def differing_rows(runs: Sequence[ReportedRun]) -> list[tuple[str | Markup, ...]]:
    """One row for each argument, and line of the plan and environment, that is not the same in all `runs`.

    `output_dir` is always another.
    """
    described = [_described(run) for run in runs]
    names = [name for name in dict.fromkeys(name for one in described for name in one) if name != "output_dir"]
    rows = [(name, *(one.get(name, "-") for one in described)) for name in names]
    return [(tag("code", name), *values) for name, *values in rows if len(set(values)) > 1]


def _described(run: ReportedRun) -> dict[str, str]:
    facts = run.facts
    extra = {f"{part}: {what}": value for part in ("plan", "environment") for what, value in getattr(facts, part)}
    parameters = {"module: parameters": f"{facts.model[0][2]:,}"} if facts.model else {}
    return {"module": facts.name, **parameters, **format_arguments(facts.arguments), "backend": facts.backend, **extra}


_MOST_METRICS = 3
_MOST_CHECKPOINTS = 10


def status_of(run: ReportedRun) -> Markup | None:
    """The end of the newest session, as a badge; None if it is not known."""
    if not run.facts.sessions:
        return None
    status = run.facts.sessions[-1].status
    words = "running, or killed" if status == "running" else status
    return tag("span", words, class_=f"status {status}")


def duration(run: ReportedRun) -> str | None:
    """The time of all sessions that have ended, with the number of killed ones; None without a session."""
    sessions = run.facts.sessions
    known = [session.seconds for session in sessions if session.seconds is not None]
    killed = sum(session.status == "running" for session in sessions[:-1])
    more = f", without {killed} killed session{'s' * (killed > 1)}" if killed else ""
    return f"{_time(sum(known))}{more}" if known else None


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
    return join_markup(
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
    return join_markup(
        table(columns, [_checkpoint(run, info) for info in newest]), tag("details", *rest) if older else None
    )


def _checkpoint(run: ReportedRun, info: CheckpointInfo) -> tuple[str, ...]:
    shown = [name for name in info.metrics if not run.is_secret(name)]
    ordered = sorted(shown, key=lambda name: (name != run.facts.monitor, not name.startswith("val/")))
    return (
        info.name + (" (kept for good)" if info.pinned else ""),
        "-" if info.global_step is None else number(info.global_step),
        ", ".join(f"{name} {info.metrics[name]:.4g}" for name in ordered[:_MOST_METRICS]) or "-",
        f"{info.size / 1e6:.1f} MB",
        info.created.replace("T", " ")[:19],
    )


def _arguments(run: ReportedRun) -> Markup:
    given, default = format_arguments(run.facts.arguments), format_arguments(TrainerArguments().to_dict())
    chosen = [(tag("code", name), value) for name, value in given.items() if default.get(name) != value]
    others = [(tag("code", name), value) for name, value in given.items() if default.get(name) == value]
    return join_markup(
        table(("argument", "value"), chosen) if chosen else None,
        tag("details", tag("summary", f"{len(others)} as they are by default"), table(("", ""), others)),
    )


def _model(run: ReportedRun) -> Markup:
    rows = [(tag("code", name), kind, number(size), number(trained)) for name, kind, size, trained in run.facts.model]
    columns = ("part", "class", "parameters", "trained")
    whole = table(columns, rows[:1])
    if len(rows) == 1:
        return whole
    return join_markup(whole, tag("details", tag("summary", f"{len(rows) - 1} parts"), table(columns, rows[1:])))


def _sessions(sessions: tuple[Session, ...]) -> Markup:
    rows = [
        (
            f"{datetime.fromtimestamp(session.began):%Y-%m-%d %H:%M:%S}",
            number(session.first_step),
            "-" if session.last_step is None else number(session.last_step),
            "-" if session.seconds is None else _time(session.seconds),
            _ending(session, is_last=session is sessions[-1]),
        )
        for session in sessions
    ]
    return table(("began", "after step", "to step", "time", "ended"), rows)


def _ending(session: Session, *, is_last: bool) -> str:
    if session.status == "running":
        return "running, or killed" if is_last else "killed"
    return session.status + (f": {session.reason}" if session.reason else "")


def _time(seconds: float) -> str:
    whole = round(seconds)
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole // 60 % 60} min"


STYLE = """
:root { color-scheme: light dark; --bg: #f6f7f9; --card: #fff; --text: #1c2330; --soft: #5d6778; --line: #e2e6ec;
  --good: #157a3d; --bad: #b3261e; --mild: #8a5a00; --c0: #2563eb; --c1: #d9480f; --c2: #0b8a4b; --c3: #8b2fd6;
  --c4: #c2185b; --c5: #00788a; --c6: #7d6300; --c7: #59616e; }
@media (prefers-color-scheme: dark) {
  :root { --bg: #11151c; --card: #1a2029; --text: #e4e8ef; --soft: #98a3b5; --line: #2c3542;
    --good: #5fd38d; --bad: #ff8a80; --mild: #f0bd5a; --c0: #7aa9ff; --c1: #ff9d66; --c2: #5ed39b; --c3: #c89bff;
    --c4: #ff8db8; --c5: #55d0de; --c6: #dfc14e; --c7: #aab3c0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--text); overflow-wrap: anywhere;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 40px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0; }
h2 { font-size: 17px; margin: 34px 0 10px; }
h3 { font-size: 14px; margin: 18px 0 6px; color: var(--soft); font-weight: 600; }
p { margin: 4px 0; } .soft, small { color: var(--soft); font-weight: 400; }
.head { display: flex; flex-wrap: wrap; gap: 6px 14px; align-items: center; }
.status { border: 1px solid; border-radius: 99px; padding: 1px 12px; font-size: 13px; font-weight: 600; }
.finished { color: var(--good); } .failed { color: var(--bad); }
.stopped, .interrupted, .running { color: var(--mild); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-top: 20px; }
.tiles div, figure, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tiles div { padding: 10px 14px; } .tiles b { display: block; font-size: 19px; line-height: 1.3; }
.tiles span { color: var(--soft); font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 14px; }
figure { margin: 0; padding: 12px 14px 10px; min-width: 0; }
figcaption { font-weight: 600; margin-bottom: 4px; }
svg { display: block; width: 100%; height: auto; touch-action: pan-y; }
svg text { fill: var(--soft); font-size: 11px; font-variant-numeric: tabular-nums; }
text.y { text-anchor: end; } text.x { text-anchor: middle; }
.grid { stroke: var(--line); } .axis { stroke: var(--soft); }
.epoch { stroke: var(--soft); stroke-dasharray: 1 4; opacity: .7; }
.cursor { stroke: var(--soft); visibility: hidden; }
.curve path { fill: none; stroke: currentColor; stroke-width: 1.7; stroke-linejoin: round; }
.curve circle { fill: currentColor; } .dashed path { stroke-dasharray: 5 3; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; font-size: 13px; padding-top: 6px; min-height: 28px; }
i { display: inline-block; width: 14px; height: 3px; border-radius: 2px; background: currentColor;
  margin-right: 7px; vertical-align: middle; }
.legend b { font-variant-numeric: tabular-nums; } .legend em { color: var(--bad); font-style: normal; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); } .c6 { color: var(--c6); } .c7 { color: var(--c7); }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 0 14px; }
.two > div { min-width: 0; } .card, .scroll { padding: 10px 14px; overflow-x: auto; }
.scroll { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; white-space: nowrap; color: var(--soft); font-weight: 600; font-size: 13px; }
th, td { padding: 4px 16px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; } th:last-child, td:last-child { padding-right: 0; }
td { min-width: 70px; } td:first-child { min-width: 150px; }
pre { margin: 0; font: 12.5px/1.5 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; white-space: pre-wrap; }
details { margin-top: 10px; } summary { cursor: pointer; color: var(--soft); margin-bottom: 8px; }
footer { margin-top: 34px; color: var(--soft); font-size: 13px; }
@media (min-width: 700px) { td:first-child { white-space: nowrap; } }
@media print { body { background: #fff; } figure, section { break-inside: avoid; } }
"""

SCRIPT = """
for (const figure of document.querySelectorAll('figure')) {
  const svg = figure.querySelector('svg'), cursor = svg.querySelector('.cursor');
  const [low, high, start, end] = JSON.parse(svg.dataset.scale);
  const title = figure.querySelector('figcaption').appendChild(document.createElement('small'));
  const shown = [...figure.querySelectorAll('.legend b')];
  const curves = [...svg.querySelectorAll('.curve')].map(g => [g.dataset.steps, g.dataset.values].map(JSON.parse));
  const format = v => v === null || v === undefined ? '-' : Number(v.toPrecision(4)).toString();
  const leave = () => {
    cursor.style.visibility = 'hidden'; title.textContent = '';
    shown.forEach(b => { b.textContent = b.dataset.last; });
  };
  svg.addEventListener('pointerleave', leave);
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const step = low + (at - start) / (end - start) * (high - low);
    const off = s => Math.abs(s - step);
    const nearest = steps => steps.reduce((best, s, i) => off(s) < off(steps[best]) ? i : best, 0);
    const found = curves.map(([steps]) => nearest(steps));
    const steps = curves.map(([steps], i) => steps[found[i]]).filter(s => s !== undefined);
    if (!steps.length || at < start - 8) return leave();
    const chosen = steps[nearest(steps)], x = start + (chosen - low) / (high - low) * (end - start);
    cursor.setAttribute('x1', x); cursor.setAttribute('x2', x); cursor.style.visibility = 'visible';
    title.textContent = ', at step ' + chosen;
    curves.forEach(([, values], i) => { shown[i].textContent = format(values[found[i]]); });
  });
}
"""


def page_of(runs: Sequence[ReportedRun]) -> str:
    """The page of one run, or the comparison of several."""
    title = f"{runs[0].facts.name}: run report" if len(runs) == 1 else f"{len(runs)} runs compared"
    body = _one(runs[0]) if len(runs) == 1 else _several(runs)
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"  # no script but ours runs
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Markup(STYLE)),
    )
    made = f"Made by trainstack on {datetime.now():%Y-%m-%d at %H:%M}. Nothing is loaded from anywhere."
    main = tag("main", body, tag("footer", made))
    return "<!doctype html>\n" + tag("html", head, tag("body", main, tag("script", Markup(SCRIPT))), lang="en") + "\n"


def _one(run: ReportedRun) -> Markup:
    facts = run.facts
    place = f"{facts.backend} on {facts.device}" if facts.backend else "known by its metrics alone"
    return join_markup(
        tag("div", tag("h1", facts.name), status_of(run), class_="head"),
        tag("p", place, class_="soft"),
        tiles_of(run),
        _charts([run]),
        details_of(run),
    )


def _several(runs: Sequence[ReportedRun]) -> Markup:
    rows = [
        (
            join_markup(tag("i", class_=f"c{number % COLOURS}"), run.label),
            run.facts.name,
            f"{run.facts.backend} on {run.facts.device}" if run.facts.backend else "-",
            status_of(run) or "-",
            duration(run) or "-",
        )
        for number, run in enumerate(runs)
    ]
    differing = differing_rows(runs)
    return join_markup(
        tag("h1", f"{len(runs)} runs compared"),
        tag("h2", "Runs"),
        table(("run", "module", "backend", "status", "time"), rows),
        tag("h2", "Arguments that differ"),
        table(("argument", *(run.label for run in runs)), differing) if differing else tag("p", "None.", class_="soft"),
        _first_differences(runs),
        _charts(runs),
    )


def _first_differences(runs: Sequence[ReportedRun]) -> Markup | None:
    """The first difference of each further run from the first, by their step logs; None without two step logs."""
    folders = [(run.label, run.folder) for run in runs if run.folder is not None and ranks_of(run.folder)]
    rows = list[tuple[str, ...]]()
    for label, folder in folders[1:]:
        try:
            found = compare_runs(folders[0][1], folder)
            rows.append((label, found.summary, " ".join([found.reason, *found.notes])))
        except (TrainstackError, OSError) as error:
            rows.append((label, "cannot be compared", str(error)))
    return _section(f"First difference from {folders[0][0]}", table(("run", "step log", "why"), rows)) if rows else None


def _charts(runs: Sequence[ReportedRun]) -> Markup:
    panels = panels_of(runs)
    left_out = any(run.facts.private for run in runs)
    notes = ["The training loss of a private run is not protected by noise and is left out."] if left_out else []
    count = len(set().union(*(run.shown_curves for run in runs)))
    if count > MOST_CURVES:
        notes.append(f"{MOST_CURVES} of {count:,} metrics are drawn. trainer.history and the logs have all of them.")
    return join_markup(
        tag("h2", "Curves", tag("small", " over global steps; dotted lines end epochs") if len(runs) == 1 else None),
        *(tag("p", note, class_="soft") for note in notes),
        tag("div", *map(chart, panels), class_="charts") if panels else tag("p", "No metrics.", class_="soft"),
    )
