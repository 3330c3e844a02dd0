"""`DeterminismReport`, the result of `trainstack doctor --determinism`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainstack.verifying.determinism.operators import SWITCH, Operator
from trainstack.verifying.determinism.step_trace import Entry
from trainstack.verifying.determinism.user_sources import Source

HASHES = "the order of a set, or another use of hashes of text"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeterminismReport:
    """The results of several processes that trained the same steps.

    Attributes:
        target: the target whose module was trained.
        steps: the number of compared global steps; 0 if the initial weights differ.
        difference: the first value that differs; None if all have the same bits.
        depends_on_hashes: whether two processes with different hashes of text (`PYTHONHASHSEED`) differ, and two with
            equal hashes do not.
        sources: calls of user code for values that no seed determines. They need not have an influence.
        operators: operators that may give other bits in each run, here or on CUDA.
        cost: the CPU time of a step with `deterministic=True` divided by that without; None if it was not measured.
    """

    target: str
    steps: int
    difference: Entry | None
    depends_on_hashes: bool = False
    sources: Sequence[Source] = ()
    operators: Sequence[Operator] = ()
    cost: float | None = None

    @property
    def is_deterministic(self) -> bool:
        """Whether the compared steps have the same bits."""
        return self.difference is None

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        found = self.difference
        return {
            **asdict(self),
            "difference": None if found is None else {**found._asdict(), "digest": None},
            "sources": [one._asdict() for one in self.sources],
            "operators": [one._asdict() for one in self.operators],
            "same": self.is_deterministic,
        }

    def lines(self) -> list[str]:
        """The report as lines of text."""
        lines = [f"{self.target}: {self._verdict()}"]
        if self.depends_on_hashes:
            lines += [
                "",
                f"The cause is {HASHES}: two processes with one PYTHONHASHSEED have the same bits. Sort the items, or "
                "set PYTHONHASHSEED=0.",
            ]
        if self.sources:
            lines += ["", "User code gets values that no seed determines:"]
            lines += [f"  {one.place}: {one.called}. Remedy: {one.remedy}." for one in self.sources]
        if self.operators:
            lines += ["", "Operators that may give other bits in each run:"]
            lines += [f"  {self._about(one)}" for one in self.operators]
        if self.cost is not None:
            lines += ["", f"{SWITCH} takes {self.cost:.2f} times the CPU time of a step here."]
        return lines

    def _verdict(self) -> str:
        found = self.difference
        if found is None:
            return f"{self.steps} global steps have the same bits in two processes"
        if not found.step:
            return f"{found.quantity} differ between two processes, first in {found.name!r}"
        where = f", first in {found.name!r}" if found.name else ""
        return f"two processes differ from global step {found.step} on: {found.quantity}{where}"

    @staticmethod
    def _about(one: Operator) -> str:
        place = one.place or "in the backward pass"
        return f"{one.name} on {one.where} ({place}). Remedy: {one.setting}."
