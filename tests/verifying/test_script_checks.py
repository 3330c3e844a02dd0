"""`trainstack doctor FILE.py` names the mistakes of a script, and none where there is none."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import pytest

import trainstack as ts
from tests.helpers import script_mistakes
from tests.helpers.modules import arguments
from tests.helpers.script_mistakes import Good
from trainstack.verifying.script_checks.examine import examine
from trainstack.verifying.script_checks.findings import ScriptReport
from trainstack.verifying.script_checks.sources import Source

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
@pytest.mark.parametrize("kind", MISTAKES, ids=lambda kind: kind.__name__)
def test_each_mistake_is_found_and_no_other(kind: type[Good], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    found = report(kind, tmp_path)
    assert ids(found) == set((kind.__doc__ or "").split()), "\n".join(found.lines())
    assert not list(tmp_path.iterdir())


def test_a_good_module_has_no_finding(tmp_path: Path) -> None:
    found = report(Good, tmp_path)
    assert not found.findings, "\n".join(found.lines())
    assert (found.steps, found.validated, found.ended) == (3, True, "")
