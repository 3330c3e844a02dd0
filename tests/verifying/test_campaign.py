"""A short version of `python -m tools.kills.campaign`: modules with state in many places are killed and resumed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tools.kills.breaks import COMPONENTS, Break
from tools.kills.campaign import Subject, attempt, is_good

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    "subject",
    [
        Subject("curriculum", "sp", True),
        pytest.param(Subject("shuffled", "sp", False), marks=pytest.mark.long),
        Subject("rank-generators", "ddp", False),
        pytest.param(Subject("fitted", "sp", True), marks=pytest.mark.long),
        pytest.param(Subject("plateau", "sp", False), marks=pytest.mark.long),
    ],
    ids=lambda subject: f"{subject.case}-{subject.backend}",
)
def test_a_killed_training_ends_with_the_same_bits(subject: Subject, tmp_path: Path) -> None:
    outcome = attempt(subject, 1, random.Random(2), tmp_path)

    assert is_good(subject, outcome), outcome.words


@pytest.mark.parametrize("component", ["a counter of a callback", pytest.param("the history", marks=pytest.mark.long)])
def test_a_component_that_is_not_restored_is_detected(component: str, tmp_path: Path) -> None:
    """`python -m tools.kills.breaks` tries the others."""
    broken = Break(*COMPONENTS[component])

    assert attempt(Subject("steady", "sp", False), 1, random.Random(3), tmp_path, broken).result == "different"
