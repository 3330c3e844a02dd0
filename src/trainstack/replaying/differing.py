"""Differences between a replay and the recorded run: environment, arguments, code, data."""

from __future__ import annotations

from collections.abc import Mapping

from trainstack.replaying.recorded import Leg
from trainstack.replaying.scratch import decides
from trainstack.step_log import Start

_ABSENT = "(absent)"


def describe_differences(leg: Leg, replayed: Start) -> list[str]:
    """Sentences for the groups of facts in which a replay differs from the recorded session, one for each group."""
    before, now = leg.end.description, replayed.description
    sentences = []
    for group in before:
        if group == "weights" or (group == "optimizers" and replayed.resumed_step != leg.end.resumed_step):
            continue  # weights are compared elsewhere; learning rates depend on the step at which a session begins
        texts = _changes(group, before[group], now.get(group, {}))
        if texts:
            sentences.append(f"other {group} than recorded: {'; '.join(texts)}")
    return sentences


def _changes(group: str, before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Each changed fact, as text. The file of a script has another module name when it is imported, so names are
    ignored."""
    names = [name for name in dict.fromkeys((*before, *now)) if group != "arguments" or decides(name)]
    if group == "code":
        names = [name for name in before if before[name] not in now.values()]
    rows = [(name, before.get(name, _ABSENT), now.get(name, _ABSENT)) for name in names]
    return [f"{name} was {one}, and is {other}" for name, one, other in rows if one != other]
