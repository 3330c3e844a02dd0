"""The results of a measurement: kept in a file, counted, printed."""

from __future__ import annotations

import difflib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.mutants.changes import Change

DETECTED = ("killed", "timed out")
_NORMAL_95 = 1.959964
"""The 97.5 % quantile of the normal distribution."""


class Results:
    """Results by the key of the change, in a file that is complete after each.

    Attributes:
        seed: of the sample.
        by_key: what `Judge.judge` has returned.
        passing, unreliable: of `Judge`.
    """

    def __init__(self, path: Path) -> None:
        kept = json.loads(path.read_text()) if path.is_file() else {}
        self._path = path
        self.seed: int | None = kept.get("seed")
        self.by_key: dict[str, dict[str, Any]] = kept.get("results", {})
        self.passing: set[str] = set(kept.get("passing", ()))
        self.unreliable: set[str] = set(kept.get("unreliable", ()))

    def forget_tests(self) -> None:
        """Forget which tests pass without a change, because the tests have changed."""
        self.passing.clear()
        self.unreliable.clear()
        self.write()

    def write(self) -> None:
        """Replace the file."""
        content = {
            "seed": self.seed,
            "results": self.by_key,
            "passing": sorted(self.passing),
            "unreliable": sorted(self.unreliable),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(content, indent=1))
        temporary.replace(self._path)


def score_line(
    sample: Sequence[Change], results: Mapping[str, Mapping[str, Any]], equivalent: Mapping[str, str]
) -> str:
    """The counts of a sample and its score in one line."""
    counts = Counter(
        "equivalent" if change.key in equivalent else results[change.key]["status"]
        for change in sample
        if change.key in equivalent or change.key in results
    )
    detected = sum(counts[status] for status in DETECTED)
    judged = detected + counts["survived"] + counts["not run"]
    parts = [f"{counts[status]} {status}" for status in (*DETECTED, "survived", "not run", "equivalent")]
    line = f"{sum(counts.values())} of {len(sample)} changes: {', '.join(parts)}"
    if not judged:
        return line
    low, high = wilson(detected, judged)
    return f"{line}; detected {detected / judged:.1%}, 95 % interval {low:.1%} to {high:.1%}"


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion."""
    square = _NORMAL_95**2
    middle = (successes + square / 2) / (trials + square)
    half = _NORMAL_95 / (trials + square) * math.sqrt(successes * (trials - successes) / trials + square / 4)
    return middle - half, middle + half


def diff(root: Path, change: Change) -> str:
    """The change as a unified diff."""
    source = (root / change.path).read_bytes()
    before, after = source.decode().splitlines(), change.apply(source).decode().splitlines()
    return "\n".join(difflib.unified_diff(before, after, change.path, change.place, lineterm="", n=2))
