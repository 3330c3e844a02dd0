"""`SpendLedger`: how many private steps a run has taken, on disk before they are taken.

A checkpoint knows the steps before it, but not those that ran after it and were lost; their results may have been
seen, so they are spent. The ledger therefore records steps ahead, a block at a time: one synced line of the file lets
the next 16 steps run. A clean end hands the unused rest back by a line of its own. Killed at any moment, a run has
recorded at least what it did, and at most a block more.

Steps belong to a run's id, which lies in its checkpoints: whatever resumes from any of them, however often and also at
the same time, adds to the same sum.
"""

from __future__ import annotations

import os
from collections import Counter

from trainstack.backends.dp.accountants import Entry
from trainstack.backends.dp.accounting import merged
from trainstack.backends.dp.ledger_file import LedgerFile
from trainstack.errors import PrivacyLedgerError

BLOCK = 16
"""Steps that one synced line allows: what a crash may over-count."""


class SpendLedger:
    """The steps of runs in the file at `path`, and the block of them that this process may still take.

    Args:
        path: beside the run's logs; the file and its folder are made when the first step is charged.
        block: steps recorded ahead.
    """

    def __init__(self, path: str | os.PathLike[str], *, block: int = BLOCK) -> None:
        self._file = LedgerFile(path)
        self._block = block
        self._recorded: dict[str, Counter[tuple[float, float]]] = {}
        self._unused: Counter[tuple[str, float, float]] = Counter()
        self._process = os.getpid()

    @property
    def path(self) -> str:
        """Where the ledger lies."""
        return str(self._file.path)

    def spent(self, run: str) -> list[Entry]:
        """All steps of `run` as (sigma, q, steps), also those of others and of runs that were cut short.

        Steps that this process has recorded ahead and not taken are not among them.

        Raises:
            PrivacyLedgerError: the file is damaged or has become shorter.
        """
        self._note(self._file.read_new())
        self._forget_the_block_of_a_parent()
        recorded = self._recorded.get(run, Counter())
        return merged(
            [(sigma, q, steps - self._unused[run, sigma, q]) for (sigma, q), steps in recorded.items() if steps]
        )

    def runs(self) -> dict[str, int]:
        """The steps of each run, as `spent` counts them; first the one that was recorded last.

        Raises:
            PrivacyLedgerError: the file is damaged or has become shorter.
        """
        self._note(self._file.read_new())
        return {run: sum(steps for _, _, steps in self.spent(run)) for run in list(reversed(self._recorded))}

    def reserved(self, run: str, sigma: float, q: float) -> int:
        """How many steps of `run` this process has recorded ahead and may take without looking at the file."""
        self._forget_the_block_of_a_parent()
        return self._unused[run, float(sigma), float(q)]

    def charge(self, run: str, sigma: float, q: float, *, at_most: int = BLOCK) -> None:
        """Count one step of `run`, which may begin when this returns; record `at_most` ahead, this step included.

        Raises:
            PrivacyLedgerError: it cannot be recorded; the step must not be taken.
        """
        self._forget_the_block_of_a_parent()
        key = (run, float(sigma), float(q))
        if self._unused[key] == 0:
            ahead = max(1, min(self._block, at_most))
            self._write(*key, ahead)
            self._unused[key] += ahead
        self._unused[key] -= 1

    def settle(self) -> None:
        """Hand back what was recorded ahead and not taken: at a checkpoint, and at a clean end.

        Raises:
            PrivacyLedgerError: it cannot be recorded; then those steps stay spent.
        """
        self._forget_the_block_of_a_parent()
        while self._unused:
            key, steps = self._unused.popitem()  # first: a crash in between must not leave them both free and usable
            if steps:
                self._write(*key, -steps)

    def carry(self, run: str, history: list[Entry]) -> None:
        """Record steps of `run` that another ledger or none had recorded.

        Raises:
            PrivacyLedgerError: they cannot be recorded.
        """
        for sigma, q, steps in history:
            self._write(run, sigma, q, steps)

    def _write(self, run: str, sigma: float, q: float, steps: int) -> None:
        self._note(self._file.append({"run": run, "sigma": sigma, "q": q, "steps": steps}))

    def _note(self, records: list[dict[str, object]]) -> None:
        for record in records:
            try:
                run, sigma, q, steps = (record[name] for name in ("run", "sigma", "q", "steps"))
                sums = self._recorded[str(run)] = self._recorded.pop(str(run), Counter())  # the last run stands last
                sums[float(sigma), float(q)] += int(steps)  # type: ignore[arg-type, call-overload]
            except (KeyError, TypeError, ValueError) as error:
                raise PrivacyLedgerError(f"{self.path} is not a privacy ledger: it holds {record}.") from error

    def _forget_the_block_of_a_parent(self) -> None:
        """A forked process may not take the steps that its parent recorded for itself."""
        if os.getpid() != self._process:
            self._process = os.getpid()
            self._unused.clear()
