"""`trainstack doctor FILE.py` finds the mistakes of a script, without false alarms."""

from __future__ import annotations

import ast
import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest

import trainstack as ts
from tests.helpers import script_mistakes
from tests.helpers.modules import arguments
from tests.helpers.script_mistakes import Good
from trainstack.verifying.script_checks.examine import examine
from trainstack.verifying.script_checks.findings import CHECKS, ScriptReport
from trainstack.verifying.script_checks.sources import Source
from trainstack.verifying.script_checks.trainer_messages import _EXPECTED, _ROWS

FILE = Path(script_mistakes.__file__)
ROOT = FILE.parent.parent.parent


def report(kind: type[Good], folder: Path, **changes: Any) -> ScriptReport:
    ts.seed_everything(0)
    source = Source.read(FILE)
    args = arguments(folder, **{"epochs": 2, "train_batch_size": 8, "val_batch_size": 8, **changes})
    return examine(kind.__name__, kind(), args, source)


def ids(found: ScriptReport) -> set[str]:
    return {finding.id for finding in found.findings}


MISTAKES = [
    kind
    for kind in vars(script_mistakes).values()
    if inspect.isclass(kind) and issubclass(kind, Good) and (kind.__doc__ or "").startswith("D")
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.processes] if "num_workers" in kind.options else []) for kind in MISTAKES],
    ids=lambda kind: kind.__name__,
)
def test_each_mistake_is_found_and_no_other(kind: type[Good], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    found = report(kind, tmp_path)
    assert ids(found) == set((kind.__doc__ or "").split()), "\n".join(found.lines())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [Good, script_mistakes.KeepsState, script_mistakes.Draws])
def test_a_good_module_has_no_finding(kind: type[Good], tmp_path: Path) -> None:
    found = report(kind, tmp_path)
    assert not found.findings, "\n".join(found.lines())
    assert (found.steps, found.validated, found.ended) == (3, True, "")


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        (script_mistakes.Summed, {"gpu_batch_size_limit": 4}, {"D302"}),
        (Good, {"train_batch_size": 1}, {"D109"}),
        (Good, {"train_batch_size": 100}, {"D114"}),
        (Good, {"monitor": "val/acc", "monitor_mode": "max"}, {"D504"}),
        (Good, {"checkpointer_args": ts.DefaultCheckpointerArguments(monitor="val/acc")}, {"D504"}),
        (script_mistakes.LastOfOne, {"train_batch_size": 9}, {"D207"}),
        (script_mistakes.LastOfOne, {"train_batch_size": 10}, set()),
        (script_mistakes.Schedule, {"epochs": 1, "max_train_steps_per_epoch": 1}, set()),
        (script_mistakes.LongWarmup, {"max_steps": 2000}, set()),
        (script_mistakes.Logs, {}, {"D602"}),
    ],
)
def test_findings_depend_on_the_arguments(
    kind: type[Good], changes: dict[str, Any], expected: set[str], tmp_path: Path
) -> None:
    found = report(kind, tmp_path, **changes)
    assert ids(found) == expected, "\n".join(found.lines())


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": "ddp-bf16", "backend_options": {"ddp": {"bucket_cap_mb": 1}}},
        {"resume": "auto", "record": "full", "report": True, "writers": ["csv"], "compile": True},
        {"validate_every": 1, "fast_dev_run": True, "sanity_val_steps": 2},
        {
            "backend": "sp-dp",
            "differential_privacy_args": ts.DifferentialPrivacyArguments(delta=1e-4, noise_multiplier=1.0),
        },
    ],
    ids=str,
)
def test_the_dry_run_writes_nothing_and_needs_no_processes(changes: dict[str, Any], tmp_path: Path) -> None:
    found = report(Good, tmp_path, **changes)
    assert not found.findings, "\n".join(found.lines())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "place"),
    [(script_mistakes.Softmax, "loss"), (script_mistakes.Waits, "train_step"), (script_mistakes.Schedule, "get_opt")],
)
def test_the_place_is_in_the_method_of_the_mistake(kind: type[Good], place: str, tmp_path: Path) -> None:
    (finding,) = report(kind, tmp_path).findings
    file, line = finding.place.split(":")
    assert file == FILE.name
    lines = FILE.read_text(encoding="utf-8").splitlines()
    before = [text for text in lines[: int(line)] if text.strip().startswith(("def ", "class "))]
    assert place in before[-1]


def test_the_page_lists_each_check_with_its_level() -> None:
    page = (ROOT / "docs" / "guides" / "doctor.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (D\d+) \| (\w+) \| (.*?) \|", page, re.MULTILINE)
    assert rows == [(one.id, one.level, one.title) for _, one in sorted(CHECKS.items())]


def test_each_check_has_a_test() -> None:
    tested = {id_ for kind in MISTAKES for id_ in (kind.__doc__ or "").split()}
    elsewhere = {"D109", "D114", "D302", "D504", "D602"} | {"D606"}  # above, and in tests/cli/test_doctor_script.py
    assert set(CHECKS) == tested | elsewhere


OF_TORCH = {
    *("empty parameter list", "duplicate parameters", "shapes cannot be multiplied", "Given groups=", "size mismatch"),
    *("must match the size of tensor", "index out of range in self", "multi-target not supported"),
    *("0D or 1D target tensor expected", "Expected floating point type for target", "class values must be"),
    *("does not require grad", "backward through the graph a second time"),
}
"""Phrases of torch's errors. Other phrases without special characters are those of trainstack."""


def test_each_expected_phrase_is_in_a_message() -> None:
    """A reworded message would become "another message of the trainer", or an alarm."""
    said = [
        text
        for path in (ROOT / "src" / "trainstack").rglob("*.py")
        if path.parent.name != "script_checks"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(text := node.value, str)
    ]
    phrases = {phrase for row in _ROWS for phrase in row.pattern.split("|") if not re.search(r"[\\^$.*+?()\[]", phrase)}
    assert phrases >= OF_TORCH
    ours = (phrases - OF_TORCH) | {phrase for phrase in _EXPECTED if " " in phrase}
    assert [phrase for phrase in sorted(ours) if not any(phrase in text for text in said)] == []
