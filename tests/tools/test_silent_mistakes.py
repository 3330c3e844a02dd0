"""Mistakes that could silently change a training are named in a message."""

from __future__ import annotations

import pytest

from tools.silent_mistakes import CASES, Base, Mistake


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_mistake_is_named(case: Mistake) -> None:
    messages = case.messages()
    assert case.sentence in messages, messages


def test_a_module_without_a_mistake_gets_none_of_the_sentences() -> None:
    messages = Mistake("none", "", Base).messages()
    assert [case.name for case in CASES if case.sentence in messages] == ["gradients are clipped by default"]
