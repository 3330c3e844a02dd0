"""The names of trainstack in the tables for users of other libraries exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import trainstack as ts

ALL = sorted((Path(__file__).resolve().parents[2] / "docs" / "coming-from").glob("*.md"))
PAGES = [page for page in ALL if page.stem != "plain-loop"]  # a loop has no names to translate
HOOKS = {name for name in dir(ts.CallbackInterface) if name.startswith("on_")} | {event.method for event in ts.Event}
TRAINER = {*dir(ts.Trainer), "module", "args", "history", "state", "user_state", "checkpointer"}
ARGUMENTS = {field.name for field in fields(ts.TrainerArguments)}


def ours(page: Path) -> Iterator[str]:
    """The code in the right columns of the tables of names."""
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = line.strip("|").split(" | ") if line.startswith("|") else []
        if len(cells) == 2:
            yield from re.findall(r"`([^`]+)`", cells[1])


def test_there_is_a_page_for_each_library() -> None:
    assert [page.stem for page in PAGES] == [
        "fastnlp", "hezar", "lightning", "pymarlin", "pytorch-accelerated", "transformers-trainer",
    ]  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_hooks_callbacks_and_members_of_a_page_exist(page: Path) -> None:
    codes = list(ours(page))
    assert len(codes) > 30
    text = "\n".join(codes)
    assert set(re.findall(r"\bon_\w+", text)) <= HOOKS | ARGUMENTS
    assert all(hasattr(ts.callbacks, name) for name in re.findall(r"\bcallbacks\.([A-Z]\w+)", text))
    assert set(re.findall(r"\btrainer\.([a-z]\w+)", text)) <= TRAINER
    assert all(hasattr(ts.placeholders, name) for name in re.findall(r"\bplaceholders\.(\w+)", text))
    for call in re.findall(r"\bTrainerArguments\((.*?)\)", text):
        assert set(re.findall(r"(\w+)=", call)) <= ARGUMENTS
    events = {name for code in codes for name in re.findall(r"^([A-Z]+(?:_[A-Z]+)+)\b", code)}
    assert {name for name in events if not hasattr(ts.placeholders, name)} <= set(ts.Event.__members__)
