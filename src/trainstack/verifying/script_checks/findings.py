"""`Finding`, a mistake in a script, and the table of checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from trainstack.verifying.script_checks.evidence import Evidence

Level = Literal["problem", "hint", "info"]
LEVELS: tuple[Level, ...] = ("problem", "hint", "info")


@dataclass(frozen=True, slots=True)
class Finding:
    """A mistake.

    Attributes:
        id: of the check, such as `"D301"`. It never changes its meaning.
        level: `"problem"` for code that fails or trains something else than its author expects, `"hint"` for code that
            is probably slower or worse than necessary, `"info"` for a choice that is worth knowing.
        message: the mistake.
        remedy: the code to write instead.
        place: `file:line` of the user's code; "" where there is none.
    """

    id: str
    level: Level
    message: str
    remedy: str
    place: str = ""


Found = tuple[str, str] | tuple[str, str, str]
"""A result of a check: message, remedy and, where it is known, the place."""

Function = TypeVar("Function", bound=Callable[..., Iterable[Found]])


@dataclass(frozen=True, slots=True)
class Check:
    """A check with its row in the documentation."""

    id: str
    level: Level
    title: str
    run: Callable[[Evidence], Iterable[Found]] | None


CHECKS: dict[str, Check] = {}
"""By id. Checks without a function are messages of the trainer and of torch (`trainer_messages.py`)."""


def check(id_: str, level: Level, title: str) -> Callable[[Function], Function]:
    """Register a function of the evidence as the check `id_`."""

    def register(function: Function) -> Function:
        declare(id_, level, title, function)
        return function

    return register


def declare(id_: str, level: Level, title: str, run: Callable[[Evidence], Iterable[Found]] | None = None) -> None:
    """Add a row to the table of checks."""
    assert id_ not in CHECKS, id_
    CHECKS[id_] = Check(id_, level, title, run)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptReport:
    """The result of a dry run.

    Attributes:
        target: the script, as it was given.
        findings: problems first.
        steps: global steps that were trained.
        validated: whether validation batches were evaluated.
        ended: the reason why the dry run ended before its last step; "" if it did not.
    """

    target: str
    findings: Sequence[Finding]
    steps: int
    validated: bool
    ended: str = ""

    @property
    def problems(self) -> int:
        """The number of findings that are problems."""
        return sum(finding.level == "problem" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return {**asdict(self), "findings": [asdict(finding) for finding in self.findings], "problems": self.problems}

    def lines(self) -> list[str]:
        """The report as text."""
        counts = [(sum(one.level == level for one in self.findings), level) for level in LEVELS]
        said = [f"{count} {level}{'s' * (count > 1 and level != 'info')}" for count, level in counts if count]
        ran = f"{self.steps} training step{'s' * (self.steps != 1)}{', one validation' * self.validated}"
        lines = [f"{self.target}: {', '.join(said) or 'no mistake found'} ({len(CHECKS)} checks, {ran})"]
        if self.ended:
            lines.append(f"the dry run ended early: {self.ended}")
        for finding in self.findings:
            place = f"{finding.place}: " if finding.place else ""
            lines += ["", f"{finding.id} {finding.level}: {place}{finding.message}", f"  {finding.remedy}"]
        return lines
