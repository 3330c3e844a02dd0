"""`SpendLedger` writes the number of private steps to disk before they are taken.

A checkpoint knows the steps before it, but not those that ran after it and were lost; their results may have been seen,
so they are spent. The ledger therefore records steps ahead, a block at a time: one synced line of the file lets the
next 16 steps run. A normal end returns the unused rest with a further line. A run that is killed at any moment has
recorded at least its steps, and at most a block more.

Steps belong to the id of a run, which its checkpoints contain: all runs that resume from any of them and charge the
same ledger, also at the same time, add to the same sum. All runs on a dataset may charge one ledger, which then has the
sum over all of them.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from trainstack.backends.dp.accounting import check_mechanism, merge_steps
from trainstack.backends.dp.epsilon import Entry
from trainstack.backends.dp.ledger_chain import LedgerChain, Record
from trainstack.backends.dp.ledger_store import FileStore, LedgerStore, ledger_store
from trainstack.errors import ConfigurationError, PrivacyLedgerError

BLOCK = 16
"""Steps that one synced line allows; a crash overstates the account by so many at most."""

_COPIED = {
    "from": "Copied at step {step} from {path}",
    "perhaps from": "Moved or copied at step {step} from {path}",
    "to": "Copied at step {step} to {path}",
}

Clipped = tuple[float, float, int, str]
"""(sigma, q, steps, how gradients were clipped)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedUse:
    """The claims of a run on a ledger that all runs on a dataset charge.

    Attributes:
        name: of the dataset; None where the user gave none.
        records: N, a public number.
        budget: the (epsilon, delta) that all runs together may spend; None for that of the ledger, if it has one.
        folder: of the run, by which a start without a checkpoint finds its earlier starts.
    """

    name: str | None
    records: int
    budget: tuple[float, float] | None = None
    folder: str | None = None


class SpendLedger:
    """The steps of runs in a ledger, and the block of them that this process may still take.

    Args:
        path: of the file, made when the first step is charged; the address of a registered store; or a store.
        block: steps recorded ahead.
        shared: set where all runs on a dataset charge this ledger.
    """

    def __init__(
        self, path: str | os.PathLike[str] | LedgerStore, *, block: int = BLOCK, shared: SharedUse | None = None
    ) -> None:
        store = path if isinstance(path, LedgerStore) else ledger_store(path)
        self.shared = shared
        self.dataset: tuple[str | None, int] | None = None
        """The (name, number of records) that the first run wrote; the name is that of the first run that has one."""
        self.budget: tuple[float, float] | None = None
        """The (epsilon, delta) that all runs together may spend."""
        self.voided: dict[str, str] = {}
        """Runs whose steps guarantee nothing, and why."""
        self.notes: dict[str, tuple[str, ...]] = {}
        """Limits of the guarantee of a run, over all its starts."""
        self.moved: dict[str, str] = {}
        """Runs that charge another ledger since, and its address."""
        self._carried: set[str] = set()  # digests of lines of other ledgers, whose runs were carried over
        self._planned: dict[str, Counter[tuple[float, float]]] = {}  # all steps of runs whose stop was chosen
        self._chain = LedgerChain(store, self._note)
        self._block = block
        self._recorded: dict[str, Counter[tuple[float, float, str]]] = {}
        self._folders: dict[str, str] = {}
        self._place: Record = {}
        self._copies: list[tuple[str, str, dict[str, int]]] = []  # how, which path, and the steps of each run then
        self._unused: Counter[tuple[str, float, float, str]] = Counter()
        self._process = os.getpid()

    @property
    def path(self) -> str:
        """The address of the ledger."""
        return self._chain.store.address

    def spent(self, run: str | None = None) -> list[Entry]:
        """All steps of `run`, or of all runs together, as (sigma, q, steps).

        Those of others and of runs that were cut short are among them; those that this process has recorded ahead and
        not taken are not.

        Raises:
            PrivacyLedgerError: the ledger is damaged or has become shorter.
        """
        return merge_steps([entry[:3] for entry in self.spent_by_clipping(run)])

    def spent_by_clipping(self, run: str | None = None) -> list[Clipped]:
        """`spent`, with the clipping of the gradients."""
        self._chain.read_new()
        self._discard_block_after_fork()
        return [
            (sigma, q, steps - self._unused[one, sigma, q, clip], clip)
            for one in (list(self._recorded) if run is None else [run])
            for (sigma, q, clip), steps in self._recorded.get(one, Counter()).items()
            if steps
        ]

    def runs(self) -> dict[str, int]:
        """The steps of each run, as `spent` counts them; first the one that was recorded last.

        Raises:
            PrivacyLedgerError: the ledger is damaged or has become shorter.
        """
        self._chain.read_new()
        return {run: sum(steps for _, _, steps in self.spent(run)) for run in list(reversed(self._recorded))}

    def folder_of(self, run: str) -> str | None:
        """In which folder the run was last; None if it is not known."""
        return self._folders.get(run)

    def last_run_in(self, folder: str | None) -> str | None:
        """The run that was recorded last in `folder`; in any, if the ledger is that of one folder."""
        runs = self.runs()
        return next((run for run in runs if self.shared is None or folder == self._folders.get(run, "")), None)

    def head(self) -> str:
        """The digest of the newest line, which is on the disk."""
        self._chain.read_new()
        return self._chain.head

    def holds(self, head: str) -> bool:
        """Whether a line with the digest `head` is in the ledger; False for an older copy of it."""
        return not head or self.was_carried(head) or self._chain.holds(head)

    def was_carried(self, head: str) -> bool:
        """Whether the line with the digest `head` is in another ledger, from which a run was carried to this one."""
        self._chain.read_new()
        return head in self._carried

    def unused(self, run: str | None = None, *, besides: str | None = None) -> list[Entry]:
        """Planned steps that chosen stops of `run`, or of all runs `besides` one, left out and no later start took."""
        self._chain.read_new()
        found = []
        for one in list(self._planned) if run is None else [run]:
            if one == besides:
                continue
            taken = Counter[tuple[float, float]]()
            for sigma, q, steps in self.spent(one):
                taken[sigma, q] += steps
            found += [(*key, planned - taken[key]) for key, planned in self._planned.get(one, Counter()).items()]
        return merge_steps([entry for entry in found if entry[2] > 0])

    def reserved(self, run: str, sigma: float, q: float, clip: str = "") -> int:
        """The number of steps of `run` that this process has recorded ahead and may take without reading the ledger."""
        self._discard_block_after_fork()
        return self._unused[run, float(sigma), float(q), clip]

    def charge(
        self,
        run: str,
        sigma: float,
        q: float,
        clip: str = "",
        *,
        room: Callable[[], int] | None = None,
        void: Iterable[str] = (),
        notes: Iterable[str] = (),
    ) -> bool:
        """Count one step of `run`, which may begin if this returns True.

        Args:
            run: its id.
            sigma: noise multiplier.
            q: sampling rate.
            clip: the description of the clipping, for statements.
            room: returns the number of steps that may be recorded. It is called under the lock, so that no other
                process charges between the check of a budget and the record.
            void: the reason why the steps, and so the ledger, guarantee nothing.
            notes: limits of the guarantee.

        Raises:
            PrivacyLedgerError: it cannot be recorded; the step must not be taken.
        """
        self._discard_block_after_fork()
        key, ahead = (run, float(sigma), float(q), clip), 0

        def lines() -> list[Record]:
            nonlocal ahead
            ahead = self._block if room is None else min(self._block, room())
            return [self._line(*key, ahead) | self._new_remarks(run, void, notes)] if ahead > 0 else []

        if self._unused[key] == 0:
            self._append(lines)
            self._unused[key] += ahead
        if self._unused[key] == 0:
            return False
        self._unused[key] -= 1
        return True

    def settle(self) -> None:
        """Hand back the steps that were recorded ahead and not taken: at a checkpoint, and at a clean end.

        Raises:
            PrivacyLedgerError: it cannot be recorded; then those steps stay spent.
        """
        self._discard_block_after_fork()
        while self._unused:
            key, steps = self._unused.popitem()  # first: a crash in between must not leave them both free and usable
            if steps:
                self._record(*key, -steps)

    def _record(self, run: str, sigma: float, q: float, clip: str, steps: int) -> None:
        self._append(lambda: [self._line(run, sigma, q, clip, steps)])

    def remark(
        self, run: str, sigma: float, q: float, *, void: str = "", note: str = "", planned: int | None = None
    ) -> None:
        """Record at once a fact on all steps of `run`.

        Args:
            run: its id.
            sigma: noise multiplier.
            q: sampling rate.
            void: the reason why the steps guarantee nothing.
            note: a limit of the guarantee.
            planned: the number of steps of (sigma, q) that count from now on, although a chosen stop has omitted some.

        Raises:
            PrivacyLedgerError: it cannot be recorded.
        """

        def lines() -> list[Record]:
            facts = self._new_remarks(run, [void] if void else [], [note] if note else [])
            facts |= {} if planned is None else {"planned": planned}
            return [self._line(run, sigma, q, "", 0) | facts] if facts else []

        self._append(lines)

    def _new_remarks(self, run: str, void: Iterable[str], notes: Iterable[str]) -> Record:
        reasons = [one for one in void if one not in self.voided.get(run, "")]
        added = [one for one in notes if one not in self.notes.get(run, ())]
        return ({"void": "; ".join(reasons)} if reasons else {}) | ({"notes": added} if added else {})

    def carry(self, run: str, history: Iterable[Entry]) -> None:
        """Record steps of `run` that another ledger or none had recorded.

        Raises:
            PrivacyLedgerError: they cannot be recorded.
        """
        self._append(lambda: [self._line(run, sigma, q, "", steps) for sigma, q, steps in history])

    def carry_from(self, other: SpendLedger, run: str, head: str = "") -> None:
        """Record all that `other` has of `run`, which charges this ledger from now on; then `other` says so.

        Args:
            other: the ledger of the run until now.
            run: its id.
            head: a line of `other` that a checkpoint names, which `holds` accepts from now on.

        Raises:
            PrivacyLedgerError: it cannot be recorded.
        """
        history, heads = other.spent(run), sorted({head, other.head()} - {""})
        facts = self._new_remarks(run, filter(None, [other.voided.get(run)]), other.notes.get(run, ()))
        lines = [self._line(run, *entry[:2], "", entry[2]) for entry in history]
        plans = [self._line(run, *key, "", 0) | {"planned": n} for key, n in other._planned.get(run, Counter()).items()]
        self._append(lambda: [{**lines[0], **facts, "carried": heads}, *lines[1:], *plans] if lines else [])
        other.leave(run, self.path)

    def leave(self, run: str, path: str) -> None:
        """Record that `run` charges the ledger at `path` from now on.

        Raises:
            PrivacyLedgerError: it cannot be recorded.
        """
        entries, there = self.spent(run), path if "://" in path else os.path.abspath(path)
        if entries and run not in self.moved:
            self._append(lambda: [self._line(run, *entries[0][:2], "", 0) | {"moved": there}])

    def set_budget(self, epsilon: float, delta: float) -> None:
        """Let all runs together spend so much from now on.

        Raises:
            ConfigurationError: the numbers are not a budget.
            PrivacyLedgerError: it cannot be recorded.
        """
        if not _is_budget(epsilon, delta):
            raise ConfigurationError(
                f"epsilon={epsilon:g} and delta={delta:g} cannot be a budget of a ledger: write an epsilon above 0 and "
                "a delta between 0 and 1, smaller than 1 / (number of records)."
            )
        self._append(lambda: [{"budget": [epsilon, delta]}])

    def check_use(self) -> None:
        """Compare the dataset and the budget of a shared ledger with those of this run.

        Raises:
            PrivacyLedgerError: they are others.
        """
        self._chain.read_new()
        use = self.shared
        if use is None:
            return
        if self.dataset is not None:
            name, records = self.dataset
            if records != use.records or (name and use.name and name != use.name):
                raise PrivacyLedgerError(
                    f"The privacy ledger {self.path} is that of the dataset {name or 'without a name'} with {records} "
                    f"records, and this run has {use.name or 'one without a name'} with {use.records}. If it is the "
                    f"same dataset, write dataset_size={records} and its name; otherwise name another ledger."
                )
        if self.budget is not None and use.budget is not None and self.budget != use.budget:
            raise PrivacyLedgerError(
                f"The privacy ledger {self.path} has the budget epsilon {self.budget[0]:g} at delta "
                f"{self.budget[1]:g}, and ledger_budget={use.budget[0]:g} at delta {use.budget[1]:g} was given. Remove "
                "ledger_budget, or decide on another one for all runs: trainstack privacy ledger FILE --budget ..."
            )

    def copies(self, run: str | None = None) -> list[str]:
        """Sentences about copies of this ledger that count further steps of `run`, or of all runs."""
        self._chain.read_new()
        pending = self._moved()
        found = {path: (how, path, steps) for how, path, steps in reversed(self._copies)}  # the first of each path
        if pending is not None:
            found.setdefault(pending[1], (*pending, self.runs()))
        return [
            f"{_COPIED[how].format(step=sum(steps.values()) if run is None else steps[run], path=path)}; steps of the "
            "other copy after that are not counted"
            for how, path, steps in reversed(found.values())
            if run is None or run in steps
        ]

    def _moved(self) -> tuple[str, str] | None:
        """The way in which the ledger came to another place than it names, and the named place; None if it did not.

        Neither the host nor the device is compared: on a cluster they change while the folder stays.
        """
        here, before = self._here(), self._place
        if not before or not here or here == before:
            return None
        old, head = str(before.get("path")), self._chain.head
        with contextlib.suppress(OSError):
            if os.path.samefile(old, here["path"]):
                return None  # a link
        shares = False
        if old != here["path"] and os.path.basename(old) == os.path.basename(here["path"]):
            with contextlib.suppress(PrivacyLedgerError, OSError):
                other = FileStore(old)
                shares = other.exists() and other.place() != here and LedgerChain(other, lambda _: None).holds(head)
        if not shares and here["inode"] == before.get("inode"):
            return None  # renamed, or the same folder under another path
        return ("from" if shares else "perhaps from", old)

    def _here(self) -> Record:
        try:
            return self._chain.store.place()
        except OSError:  # no folder yet
            return {}

    def _append(self, make: Callable[[], list[Record]]) -> None:
        """Write the records of `make`, after those with the dataset and the folder of the ledger."""
        moved: tuple[str, str] | None = None

        def lines() -> list[Record]:
            nonlocal moved
            self.check_use()
            made = make()
            if not made:
                return []
            use, here = self.shared, self._here()
            facts: Record = {}
            if use is not None and (self.dataset is None or (use.name and not self.dataset[0])):
                facts["dataset"] = {"name": use.name, "records": use.records}
            if use is not None and use.budget is not None and self.budget is None:
                facts["budget"] = list(use.budget)
            if here and here != self._place:
                moved = self._moved()
                facts |= {"place": here} | ({"copy": list(moved)} if moved else {})
            return [{**facts, **made[0]}, *made[1:]]

        self._chain.append(lines)
        if moved is not None and moved[0] == "from":
            self._tell(moved[1])

    def _tell(self, path: str) -> None:
        """Note in the ledger at `path` that this one is a copy of it, so that its runs state this too."""
        note = {"copy": ["to", str(self._here()["path"])]}
        with contextlib.suppress(PrivacyLedgerError, OSError):  # whose statements then do not name this copy
            LedgerChain(FileStore(path), lambda _: None).append(lambda: [note])

    def _line(self, run: str, sigma: float, q: float, clip: str, steps: int) -> Record:
        line: Record = {"run": run, "sigma": sigma, "q": q, "steps": steps}
        line |= {"clip": clip} if clip else {}
        folder = None if self.shared is None else self.shared.folder
        return line | ({"folder": folder} if folder and self._folders.get(run) != folder else {})

    def _note(self, record: Record) -> None:
        try:
            if "copy" in record:
                (how, path), steps = record["copy"], {run: sum(sums.values()) for run, sums in self._recorded.items()}
                self._copies.append((how if how in _COPIED else "perhaps from", str(path), steps))
            if "place" in record:
                self._place = dict(record["place"])
            if "dataset" in record:
                self.dataset = (record["dataset"]["name"], int(record["dataset"]["records"]))
            if "budget" in record:
                epsilon, delta = map(float, record["budget"])
                self.budget = (epsilon, delta) if _is_budget(epsilon, delta) else self.budget
            if "run" in record or not record.keys() & {"copy", "place", "dataset", "budget"}:
                self._count(record)
        except (KeyError, TypeError, ValueError, OverflowError, ConfigurationError) as error:
            raise PrivacyLedgerError(f"{self.path} is not a privacy ledger: it holds {record}.") from error

    def _count(self, record: Record) -> None:
        run, steps = str(record["run"]), int(record["steps"])
        sigma, q, clip = float(record["sigma"]), float(record["q"]), str(record.get("clip", ""))
        sums = self._recorded[run] = self._recorded.pop(run, Counter())  # the last run comes last
        check_mechanism(sigma, q, sums[sigma, q, clip] + steps)
        sums[sigma, q, clip] += steps
        if "folder" in record:
            self._folders[run] = str(record["folder"])
        if "void" in record:
            self.voided[run] = "; ".join(filter(None, [self.voided.get(run), str(record["void"])]))
        self.notes[run] = tuple(dict.fromkeys((*self.notes.get(run, ()), *map(str, record.get("notes", ())))))
        self._carried.update(map(str, record.get("carried", ())))
        if "carried" in record:
            self.moved.pop(run, None)
        if "moved" in record:
            self.moved[run] = str(record["moved"])
        if "planned" in record:
            plan = self._planned.setdefault(run, Counter())
            plan[sigma, q] = max(plan[sigma, q], int(record["planned"]))
            check_mechanism(sigma, q, plan[sigma, q])

    def _discard_block_after_fork(self) -> None:
        """A forked process may not take the steps that its parent recorded for itself."""
        if os.getpid() != self._process:
            self._process = os.getpid()
            self._unused.clear()


def _is_budget(epsilon: float, delta: float) -> bool:
    return 0 < epsilon < math.inf and 0 < delta < 1
