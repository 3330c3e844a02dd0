"""`AttributeWatch` finds plain attributes of modules that carry records into later private steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainstack.backends.dp.clipping import FlatClipper
from trainstack.backends.dp.modes.base import GradientMode, Run, rows_of
from trainstack.backends.dp.modes.probing import NoAutocast, deterministic_forward
from trainstack.backends.dp.sealed.plain_state import (
    OF_EVERY_MODULE,
    SCALARS,
    Kept,
    Place,
    installed_attributes,
    keep,
    mark_of,
    owners_of,
    same_value,
)
from trainstack.backends.generator_search import is_of_user

_EVERY = 100
"""Steps after which all values are compared again, from the hundredth on. Before it steps 1, 2, 4, 8, ... are due."""

_NUMBERS = frozenset({bool, int, float, str, type(None)})
_COUNTS = frozenset({bool, int, str, type(None)})
_NOTHING = Kept(value=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attributes:
    """Which attributes a check is about, by name."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        more = len(self.names) - 5
        return ", ".join(self.names[:5]) + (f" and {more} more" if more > 0 else "")


class AttributeWatch:
    """Compares the plain attributes of a module, its parts and the objects that they hold with those at the beginning.

    An attribute that has changed is tested: two records get gradients with the value of now and with the first one. If
    they are equal, the attribute is only counted or kept to be looked at. If they differ, the change is refused, except
    for plain numbers and texts that were set outside of forward passes, such as a schedule in a hook: those are noted.
    So are attributes for which the test fails.

    The test is made at steps 1, 2, 4, 8, ... and every 100th, and before the step that follows the first change of an
    attribute. The state of tensors is that of memory: their bits are compared.

    Args:
        module: the user's module, never wrapped.
        refuse: is given the reason for which the run is not private.
        note: is given the names of attributes whose changes the guarantee does not cover.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        refuse: Callable[[str], None],
        note: Callable[[Attributes], None],
    ) -> None:
        self._module, self._refuse, self._note = module, refuse, note
        self._owners: dict[str, dict[str, Any]] = {}
        self._of_user: list[tuple[str, dict[str, Any]]] = []
        self._first: dict[Place, Kept] | None = None
        self._marked: dict[Place, Any] = {}
        self._seen, self._in_forward = set[Place](), set[Place]()
        self._due = 1
        self.was_written = False  # whether any forward pass has set an attribute to more than a count or a text

    def begin_step(self, step: int, gradients: Callable[[], Tensor]) -> dict[Place, Any]:
        """A micro-batch of global step `step` is about to be run; `gradients` are those of some of its records.

        Returns:
            `marks` before the forward pass.
        """
        if self._first is None:
            self.accept()
            return self._marked
        marks = self.marks()
        new = set[Place]()
        if marks != self._marked:
            new = {place for place, mark in marks.items() if self._marked.get(place) != mark} - self._seen
        if not new and step < self._due:
            return marks
        self._seen |= new
        self._due = step * 2 if step < _EVERY // 2 else step + _EVERY - step % _EVERY
        self._find_owners()
        now = keep(self._owners)
        changed = {place for place in {**self._first, **now} if not same_value(self._first.get(place), now.get(place))}
        if changed:
            self._judge(changed, now, gradients)
        return marks

    def marks(self) -> dict[Place, Any]:
        """Short marks of attributes, which show a new value but not each write into an old one; costs microseconds."""
        return {
            (path, key): value if type(value) in _NUMBERS else mark_of(value)
            for path, held in self._of_user
            for key, value in held.items()
            if key not in OF_EVERY_MODULE
        }

    def end_forward(self, before: Mapping[Place, Any]) -> None:
        """A forward pass has ended before which `marks` were `before`."""
        marks = self.marks()
        if marks != before:
            written = {place for place, mark in marks.items() if before.get(place) != mark}
            self._in_forward |= written
            held = ((path, key, value) for path, owner in self._of_user for key, value in owner.items())
            self.was_written |= any((path, key) in written and type(value) not in _COUNTS for path, key, value in held)

    def accept(self) -> None:
        """From here on attributes are compared with their values of now."""
        self._find_owners()
        self._first, self._marked = keep(self._owners), self.marks()
        self._seen, self._in_forward = set(), set()

    def accept_changes(self, before: Mapping[Place, Any]) -> None:
        """Changes since `marks` were `before` are post-processing."""
        if self._first is None:
            return
        now, marks = keep(self._owners), self.marks()
        for place in {place for place in {**before, **marks} if before.get(place) != marks.get(place)}:
            self._first.pop(place, None)
            if place in now:
                self._first[place] = now[place]
            self._marked[place] = marks.get(place)

    def forget(self) -> None:
        """The library is about to load a state; the next step accepts what it finds."""
        self._first = None

    def _find_owners(self) -> None:
        self._owners = owners_of(self._module)
        parts = {path for path, part in self._module.named_modules() if not is_of_user(type(part))}
        self._of_user = [(path, held) for path, held in self._owners.items() if path not in parts]

    def _judge(self, changed: set[Place], now: dict[Place, Kept], gradients: Callable[[], Tensor]) -> None:
        def is_schedule(place: Place) -> bool:
            values = [(self._first or {}).get(place, _NOTHING).value, now.get(place, _NOTHING).value]
            return place not in self._in_forward and all(isinstance(value, SCALARS) for value in values)

        schedules = set(filter(is_schedule, changed))
        for places in (changed - schedules, schedules):
            influences = self._influences(places, now, gradients) if places else False
            if influences is False:
                continue
            names = Attributes(names=tuple(sorted(".".join(filter(None, place)) for place in places)))
            if influences and places is not schedules:
                self._refuse(
                    f"{names} changed in the course of training, and the same records then have other gradients. "
                    "It would carry records into later steps without clipping and noise. Keep nothing from one "
                    "forward pass for the next. A value that is computed from weights and public values alone belongs "
                    "in the block `with trainer.post_processing():`."
                )
            else:
                self._note(names)

    def _influences(self, places: set[Place], now: dict[Place, Kept], gradients: Callable[[], Tensor]) -> bool | None:
        """Whether gradients differ between the first values at `places` and those of now; None if that is not known."""
        assert self._first is not None
        first = {place: kept for place, kept in now.items() if place not in places}
        first |= {place: kept for place, kept in self._first.items() if place in places}
        if any(kept.is_large for place, kept in self._first.items() if place in places):
            return None  # the first value is gone
        found = []
        for values in (now, now, first):
            with self._installed(values):
                try:
                    found.append(gradients())
                except Exception:
                    return None  # the module cannot do without the value of now, or fails for other reasons
        if not _close(found[0], found[1]):
            return None
        return not _close(found[0], found[2])

    @contextmanager
    def _installed(self, values: Mapping[Place, Kept]) -> Iterator[None]:
        """A block in which attributes have copies of `values`; afterwards they are what they were."""
        with installed_attributes(self._owners, values):
            if vars(self._module).get("_log_sink") is not None:
                vars(self._module)["_log_sink"] = _Silent()
            yield


class _Silent:
    """A log sink that records nothing."""

    def record(self, name: str, value: Any) -> None: ...


def probe_gradients(mode: GradientMode, run: Run, batch: Any, records: int) -> Tensor:
    """The sum of the gradients of the first two records of `batch`, not clipped, 1-dim, with randomness switched off.

    Args:
        mode: of the run; no sum of a step is under way.
        run: see `Run`.
        batch: of `records` examples, on the device.
        records: at least 1.
    """
    clipper, count = mode.clipper, min(2, records)
    try:
        mode.clipper = FlatClipper(_NO_LIMIT)
        with deterministic_forward(mode.module):
            mode.add(lambda model, part: run(NoAutocast(model), part), rows_of(batch, records, slice(0, count)), count)
        return torch.cat([part.flatten() for part in mode.pop_sums()])
    finally:
        mode.clipper = clipper
        mode.pop_sums()


_NO_LIMIT = float(torch.finfo(torch.float32).max) ** 0.5


def _close(one: Tensor, other: Tensor) -> bool:
    return bool(torch.isclose((one - other).norm(), one.new_zeros(()), atol=1e-4 * float(one.norm()) + 1e-12))
