"""`Change`: an item in which two starts of a run differ, with its effect on exactness; tables of changes."""

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
"""Characters of a value in a table: two values, a name and an effect fit into a wide terminal."""
_MOST_OF_CODE = 5
"""Changed methods in a table; with another class, all methods differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An item in which two starts of a run differ.

    Attributes:
        name: dotted name, such as "arguments.max_grad_norm" or "environment.cpu threads".
        saved: text at the earlier start; "-" if there was none.
        given: text at the current start; "-" if there is none.
        effect: effect on exactness.
        remedy: instruction that keeps the saved value; "" if there is none.
    """

    name: str
    saved: str
    given: str
    effect: Effect
    remedy: str = ""


def flat(description: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the items of a description with dotted names."""
    return {f"{section}.{name}": text for section, items in description.items() for name, text in items.items()}


def changes_between(saved: Mapping[str, str], given: Mapping[str, str]) -> list[Change]:
    """Return the items that differ, in the order of `saved`; both mappings have dotted names.

    A section that is missing on one side was not recorded there and does not count as a difference. Digests of code are
    digests of byte code, so they are not compared between two minor versions of Python.
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
        "arguments": f"write {rest}={saved}" if saved is not None else f"omit {rest}",
        "environment": "resume on a machine of the same kind",
        "data": "use the training data of the run",
        "code": "restore this code",
    }.get(section, "")


_REMEDIES = {
    "environment.world size": "start as many processes: {}",
    "environment.default dtype": "call torch.set_default_dtype({})",
    "data.global batch": "write train_batch_size={}",
    "data.micro-batch": "keep train_batch_size, gpu_batch_size_limit and the number of processes",
}


def table_of(changes: Sequence[Change], *, sides: tuple[str, str] = ("saved", "given")) -> str:
    """Format `changes` as a table: name, both values, effect. Long values are cut."""
    head = ("", *sides, "effect on exactness")
    code = [one for one in changes if one.name.startswith("code.")][_MOST_OF_CODE:]
    shown = [one for one in changes if one not in code]
    rows = [head, *((one.name, _cell(one.saved), _cell(one.given), one.effect.value) for one in shown)]
    rows += [(f"code: {len(code)} more", "", "", Effect.OTHER_RUN.value)] if code else []
    widths = [max(len(row[column]) for row in rows) for column in range(3)]  # the last column is not padded
    lines = ("  ".join([*map(str.ljust, row[:3], widths), row[3]]).rstrip() for row in rows)
    return "\n".join(f"  {line}" for line in lines)


def _cell(text: str) -> str:
    text = " ".join(text.split())
    # 4 characters are " ...".
    return text if len(text) <= _MOST_CELL else f"{text[: _MOST_CELL - 4]} ..."


def remedies(changes: Iterable[Change]) -> Iterator[str]:
    """Yield the instructions that keep values whose change breaks exactness, each instruction once."""
    return iter(dict.fromkeys(one.remedy for one in changes if one.effect.breaks_exactness and one.remedy))
