"""The table for the terminal and the page."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tools.conformance.adapter import Verdict
from tools.conformance.case import all_cases

HEAD = """\
# Conformance

This page shows the results of small deterministic tests for any trainer. The requirement of each test is below the
table. A cell says pass, **wrong**, or n.a. if the trainer has no such feature or leaves it to the loop of the user.
Each trainer runs in its documented way, which the docstring of its file in `tools/conformance/adapters` names. A cell
is the result of one small run on the CPU. If you think that a cell is unfair, please open an issue.

`adapters/naive.py`, a loop by hand with the usual mistakes, fails every case, and a test checks this. The tests also
run the column of trainstack.

```
make conformance-peers                           # .venv-peers, with the other trainers at pinned releases
make conformance                                 # all of them: prints the table and writes this page
make conformance ARGS="--trainer trainstack"     # one column; --case torn for one row
```

To add a trainer, write `adapters/NAME.py` with a class `Peer` (`adapter.py` lists its methods) and add its name to
`TRAINERS`. To add a case, write a function with `@case` in a file of `cases/`, and a mistake for `naive` to make.
"""


@dataclass(frozen=True)
class Row:
    """One trainer: its version, that of torch, and a verdict for each case."""

    versions: Mapping[str, str]
    cells: Mapping[str, Verdict]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Row:
        """The row that `tools.conformance.row` wrote."""
        return cls(values["versions"], {case: Verdict(**cell) for case, cell in values["cells"].items()})


def table(rows: Mapping[str, Row]) -> str:
    """A table in Markdown, with a row for each case and a column for each trainer."""
    lines = [_line(["", *rows]), _line(["---"] * (len(rows) + 1))]
    for case in all_cases():
        if any(case.id in row.cells for row in rows.values()):
            cells = [row.cells[case.id].status if case.id in row.cells else "" for row in rows.values()]
            lines.append(_line([case.title, *(f"**{cell}**" if cell == "wrong" else cell for cell in cells)]))
    counts = [[cell.status for cell in row.cells.values()] for row in rows.values()]
    lines.append(_line(["passes", *(f"{c.count('pass')} of {len(c) - c.count('n.a.')}" for c in counts)]))
    return "\n".join(lines)


def page(rows: Mapping[str, Row]) -> str:
    """The whole of docs/conformance.md."""
    versions = ", ".join(f"{name} {row.versions['trainer']}" for name, row in rows.items())
    torches = sorted({row.versions["torch"] for row in rows.values()})
    system = f"Python {platform.python_version()}, {platform.system()}, CPU"
    made = f"`make conformance` wrote this page on {datetime.date.today().isoformat()}: {versions}; "
    parts = [HEAD, f"{made}torch {', '.join(torches)}; {system}.\n", table(rows), "\n## Requirements\n"]
    parts += [f"- **{case.title}** (`{case.id}`): {case.demand}" for case in all_cases()]
    parts.append("\n## Results")
    for name, row in rows.items():
        others = [(case, row.cells[case.id]) for case in all_cases() if row.cells[case.id].status != "pass"]
        if others:
            parts.append(f"\n### {name} {row.versions['trainer']}\n")
            parts += [f"- {case.title}: {cell.status}, {_plain(cell.seen)}" for case, cell in others]
    return "\n".join(parts) + "\n"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """`text` with escapes for Markdown."""
    for mark in "\\`*_[]<>|":
        text = text.replace(mark, f"\\{mark}")
    return text
