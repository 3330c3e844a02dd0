"""`Change`: an item in which two starts differ, with its effect on exactness; tables of changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainstack.trainer.core.effects import Effect, effect_of, is_compared
from trainstack.trainer.core.fingerprints import differing_names

Description = dict[str, dict[str, str]]
"""Sections (arguments, environment, data, code, weights) of names and texts, from `describe_start`."""

PACKAGES = ("python", "trainstack", "torch", "numpy", "opacus", "cuda", "hip", "cudnn")
"""Items of the environment that are versions."""

_NONE = "-"
_MOST_CELL = 60
_MOST_OF_CODE = 5
"""Methods in a table: of another class all differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An item in which two starts differ.

    Attributes:
        name: dotted, such as "arguments.max_grad_norm" or "environment.cpu threads".
        saved: its text then; "-" if it had none.
        given: its text now; "-" if it has none.
        effect: on exactness.
        remedy: how to keep the saved value, as an instruction; "" if there is none to give.
    """

    name: str
    saved: str
    given: str
    effect: Effect
    remedy: str = ""


def flat(description: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """The items of a description under dotted names."""
    return {f"{section}.{name}": text for section, items in description.items() for name, text in items.items()}


def changes_between(saved: Mapping[str, str], given: Mapping[str, str]) -> list[Change]:
    """The items that differ, in the order of `saved`; both have dotted names.

    A section that one side lacks altogether was not described there, and is no difference. Digests of code are those
    of compiled code, so they are not compared between two versions of Python.
    """
    found = list[Change]()
    sections = {name.partition(".")[0] for name in saved} & {name.partition(".")[0] for name in given}
    if _minor(saved) != _minor(given):
        sections.discard("code")
    for name in differing_names(given, saved):
        if name.partition(".")[0] in sections and is_compared(name):
            one, other = saved.get(name), given.get(name)
            effect = effect_of(name, one, other)
            remedy = _remedy(name, one) if effect.breaks_exactness else ""
            change = Change(name=name, saved=one or _NONE, given=other or _NONE, effect=effect, remedy=remedy)
            found.append(change)
    return found


def _minor(items: Mapping[str, str]) -> str:
    return ".".join(items.get("environment.python", "").split(".")[:2])


def _remedy(name: str, saved: str | None) -> str:
    section, _, rest = name.partition(".")
    if name == "environment.cpu threads" and saved is not None and saved.isdigit():
        return f"set OMP_NUM_THREADS={saved}"
    if rest in PACKAGES and section == "environment":
        return f"install {rest} {saved}"
    if name in _REMEDIES:
        return _REMEDIES[name].format(saved)
    return {
        "arguments": f"write {rest}={saved}" if saved is not None else f"leave {rest} out",
        "environment": "resume on a machine of the same kind",
        "data": "give the training data that the run had",
        "code": "restore this code",
    }.get(section, "")


_REMEDIES = {
    "environment.world size": "start as many processes: {}",
    "environment.default dtype": "call torch.set_default_dtype({})",
    "data.global batch": "write train_batch_size={}",
    "data.micro-batch": "keep train_batch_size, gpu_batch_size_limit and the number of processes",
}


def table_of(changes: Sequence[Change], *, sides: tuple[str, str] = ("saved", "given")) -> str:
    """`changes` as lines: name, both values, effect; a long value is cut."""
    head = ("", *sides, "effect on exactness")
    code = [one for one in changes if one.name.startswith("code.")][_MOST_OF_CODE:]
    shown = [one for one in changes if one not in code]
    rows = [head, *((one.name, _cell(one.saved), _cell(one.given), one.effect.value) for one in shown)]
    rows += [(f"code: {len(code)} more", "", "", Effect.OTHER_RUN.value)] if code else []
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ("  ".join([*map(str.ljust, row[:3], widths), row[3]]).rstrip() for row in rows)
    return "\n".join(f"  {line}" for line in lines)


def _cell(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MOST_CELL else f"{text[: _MOST_CELL - 4]} ..."


def remedies(changes: Iterable[Change]) -> Iterator[str]:
    """How to keep each value whose change breaks exactness, each instruction once."""
    return iter(dict.fromkeys(one.remedy for one in changes if one.effect.breaks_exactness and one.remedy))
