"""In which arguments runs differ, from each other or from the defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainstack.trainer.report.markup import Markup, tag
from trainstack.trainer.report.run_on_disk import ReportedRun

_NOT_SET = "-"


def flat(arguments: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested arguments as ("outer.inner", value in words)."""
    for name, value in arguments.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", in_words(value)


def in_words(value: Any) -> str:
    """A value as one would write it in Python, long lists included."""
    return repr(list(value)) if isinstance(value, list | tuple) else repr(value)


def differing_rows(runs: Sequence[ReportedRun]) -> list[tuple[str | Markup, ...]]:
    """One row for each argument, and line of the plan and environment, that is not the same in all `runs`.

    `output_dir` is always another.
    """
    described = [_described(run) for run in runs]
    names = [name for name in dict.fromkeys(name for one in described for name in one) if name != "output_dir"]
    rows = [(name, *(one.get(name, _NOT_SET) for one in described)) for name in names]
    return [(tag("code", name), *values) for name, *values in rows if len(set(values)) > 1]


def _described(run: ReportedRun) -> dict[str, str]:
    facts = run.facts
    extra = {f"{part}: {what}": value for part in ("plan", "environment") for what, value in getattr(facts, part)}
    parameters = {"module: parameters": f"{facts.model[0][2]:,}"} if facts.model else {}
    return {"module": facts.name, **parameters, **dict(flat(facts.arguments)), "backend": facts.backend, **extra}
