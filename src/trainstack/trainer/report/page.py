"""A report as one HTML page that needs nothing else: no file, no font, no request to the outside."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import datetime

from trainstack.trainer.report.chart import COLOURS, chart
from trainstack.trainer.report.differing import differing_rows
from trainstack.trainer.report.markup import Markup, joined, table, tag
from trainstack.trainer.report.panels import panels_of
from trainstack.trainer.report.run_on_disk import ReportedRun
from trainstack.trainer.report.sections import details_of, duration, status_of, tiles_of
from trainstack.trainer.report.style import SCRIPT, STYLE


def page_of(runs: Sequence[ReportedRun]) -> str:
    """The page of one run, or the comparison of several."""
    title = f"{runs[0].facts.name}: run report" if len(runs) == 1 else f"{len(runs)} runs compared"
    body = _one(runs[0]) if len(runs) == 1 else _several(runs)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy()),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Markup(STYLE)),
    )
    made = f"Made by trainstack on {datetime.now():%Y-%m-%d at %H:%M}. Nothing is loaded from anywhere."
    main = tag("main", body, tag("footer", made))
    return "<!doctype html>\n" + tag("html", head, tag("body", main, tag("script", Markup(SCRIPT))), lang="en") + "\n"


def _policy() -> str:
    """Browsers load nothing, and run no script but ours."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _one(run: ReportedRun) -> Markup:
    facts = run.facts
    place = f"{facts.backend} on {facts.device}" if facts.backend else "known by its metrics alone"
    return joined(
        tag("div", tag("h1", facts.name), status_of(run), class_="head"),
        tag("p", place, class_="soft"),
        tiles_of(run),
        _charts([run]),
        details_of(run),
    )


def _several(runs: Sequence[ReportedRun]) -> Markup:
    rows = [
        (
            joined(tag("i", class_=f"c{number % COLOURS}"), run.label),
            run.facts.name,
            f"{run.facts.backend} on {run.facts.device}" if run.facts.backend else "-",
            status_of(run) or "-",
            duration(run) or "-",
        )
        for number, run in enumerate(runs)
    ]
    differing = differing_rows(runs)
    return joined(
        tag("h1", f"{len(runs)} runs compared"),
        tag("h2", "Runs"),
        table(("run", "module", "backend", "status", "time"), rows),
        tag("h2", "Arguments that differ"),
        table(("argument", *(run.label for run in runs)), differing) if differing else tag("p", "None.", class_="soft"),
        _charts(runs),
    )


def _charts(runs: Sequence[ReportedRun]) -> Markup:
    panels = panels_of(runs)
    left_out = any(run.facts.private for run in runs)
    note = "The training loss of a private run is not protected by noise and is left out." if left_out else None
    return joined(
        tag("h2", "Curves", tag("small", " over global steps; dotted lines end epochs") if len(runs) == 1 else None),
        tag("p", note, class_="soft") if note else None,
        tag("div", *map(chart, panels), class_="charts") if panels else tag("p", "No metrics.", class_="soft"),
    )
