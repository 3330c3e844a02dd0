"""`AttributeWatch` finds plain attributes of modules that carry records into later private steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainstack.backends.dp.clipping import FlatClipper
from trainstack.backends.dp.modes.base import GradientMode, Run, rows_of
from trainstack.backends.dp.modes.probing import NoAutocast, deterministic_forward
from trainstack.backends.dp.sealed.plain_state import (
    SCALARS,
    Held,
    Kept,
    Place,
    installed_attributes,
    keep,
    owners_of,
    same_value,
)
from trainstack.backends.dp.telemetry import Telemetry
from trainstack.backends.generator_search import is_of_user

_FIRST, _SHARE = 16, 0.01
"""The number of first steps that always compare all values, and the largest share of the time that the checks of later
steps take."""

Probe = Callable[[int], list[Tensor]]
"""`probe(number)` is `probe_gradients` of the last record but `number` of a micro-batch."""

_COUNTS = frozenset({bool, int, str, type(None)})
_NOTHING = Kept(value=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attributes:
    """The attributes of a check, by name."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        more = len(self.names) - 5
        return ", ".join(self.names[:5]) + (f" and {more} more" if more > 0 else "")


class AttributeWatch:
    """Compares the plain attributes of a module, its parts and the objects that they hold with those at the beginning.

    An attribute that has changed is tested: gradients and telemetry of two records, each alone, are computed with the
    current value and with the first one. The last records of a batch are taken, since the first ones may have set the
    value. If the results are equal, the attribute is only counted or kept to be looked at. If they differ, the change
    is refused, except for plain numbers and texts that were set outside of forward passes, such as a schedule in a
    hook: those are noted, unless a forward pass keeps values that they may be computed from. So are attributes for
    which the test fails.

    The test is made before a step is released: in the first steps, at the first change of an attribute, and later in a
    small share of the time. The state of tensors is that of memory: their bits are compared.

    Args:
        module: the user's module, never wrapped.
        refuse: is given the reason for which the run is not private.
        note: is given the names of attributes whose changes the guarantee does not cover.
    """

    was_written: bool

    def __init__(self, module: nn.Module, *, refuse: Callable[[str], None], note: Callable[[Attributes], None]) -> None:
        self._module, self._refuse, self._note = module, refuse, note
        self._owners: dict[str, Held] = {}
        self._of_libraries = set[str]()  # parts whose caches and computed weights are not values of the user
        self._first: dict[Place, Kept] | None = None
        self._seen, self._in_forward = set[Place](), set[Place]()
        self._steps, self._spent, self._since = 0, 0.0, time.perf_counter()
        self.was_written = False  # whether any forward pass has set an attribute to more than a count or a text

    def begin_step(self) -> bool:
        """A step is about to run its first forward pass; returns whether it accepts all values."""
        accepts = self._first is None
        if accepts:
            self.accept()
        return accepts

    def check(self, gradients: Probe, touched: AbstractSet[Place], *, is_last: bool = False) -> None:
        """The forward passes of a step have ended, and nothing of it is released yet.

        Args:
            gradients: the gradients of some of its records; see `probe_gradients`.
            touched: attributes that have changed since the step before began.
            is_last: whether no step is planned after it, so that all values are compared.
        """
        assert self._first is not None
        self._steps += 1
        now = time.perf_counter()
        new = touched - self._seen
        if not (new or is_last) and self._steps > _FIRST and self._spent > _SHARE * (now - self._since):
            return
        self._owners = owners_of(self._module)
        held = keep(self._owners)
        changed = {
            place for place in {**self._first, **held} if not same_value(self._first.get(place), held.get(place))
        }
        if changed:
            self._judge(changed, held, gradients)
        self._seen |= new
        self._spent += time.perf_counter() - now

    def end_forward(self, written: Mapping[Place, Any]) -> None:
        """A forward pass has ended that has set attributes to the values `written`."""
        self._in_forward.update(written)
        kept = {path for (path, _), value in written.items() if type(value) not in _COUNTS}
        self.was_written |= bool(kept - self._of_libraries)

    def accept(self) -> None:
        """From here on attributes are compared with their values of now."""
        self._owners = owners_of(self._module)
        self._first = keep(self._owners)
        self._of_libraries = {path for path, part in self._module.named_modules() if not is_of_user(type(part))}
        self._seen, self._in_forward = set(), set()

    def accept_changes(self, changed: AbstractSet[Place]) -> None:
        """The changes of these attributes are post-processing."""
        if self._first is None:
            return
        now = keep(self._owners)
        for place in changed:
            self._first.pop(place, None)
            if place in now:
                self._first[place] = now[place]

    def forget(self) -> None:
        """The library is about to load a state, which the next step accepts."""
        self._first = None

    def _judge(self, changed: set[Place], now: dict[Place, Kept], gradients: Probe) -> None:
        def is_schedule(place: Place) -> bool:
            values = [(self._first or {}).get(place, _NOTHING).value, now.get(place, _NOTHING).value]
            return place not in self._in_forward and all(isinstance(value, SCALARS) for value in values)

        schedules = set(filter(is_schedule, changed))
        for places in (changed - schedules, schedules):
            influences = self._influences(places, now, gradients) if places else False
            if influences is False:
                continue
            names = Attributes(names=tuple(sorted(".".join(filter(None, place)) for place in places)))
            if influences and (places is not schedules or self.was_written):
                self._refuse(
                    f"{names} changed in the course of training, and the same records then have other gradients. "
                    "It would carry records into later steps without clipping and noise. Keep nothing from one "
                    "forward pass for the next. A value that is computed from weights and public values alone belongs "
                    "in a Callback, in the block `with trainer.post_processing():`."
                )
            else:
                self._note(names)

    def _influences(self, places: set[Place], now: dict[Place, Kept], gradients: Probe) -> bool | None:
        """Whether gradients differ between the first values at `places` and those of now; None if that is not known."""
        assert self._first is not None
        first = {place: kept for place, kept in now.items() if place not in places}
        first |= {place: kept for place, kept in self._first.items() if place in places}
        if any(kept.is_large for place, kept in self._first.items() if place in places):
            return None  # the first value is gone
        answers = [self._influence(first, now, partial(gradients, number)) for number in range(2)]
        return True if True in answers else None if None in answers else False

    def _influence(
        self, first: Mapping[Place, Kept], now: Mapping[Place, Kept], gradients: Callable[[], list[Tensor]]
    ) -> bool | None:
        found: list[list[Tensor] | None] = []
        for values in (now, now, first):
            with self._installed(values):
                try:
                    found.append(gradients())
                except Exception:
                    found.append(None)
        if found[2] is None:
            return None  # the module cannot do without the value of now, or fails for other reasons
        if found[0] is None or found[1] is None:
            return True  # such as a tensor of a `vmap` that is over
        return not _close(found[0], found[2]) if _close(found[0], found[1]) else None

    def unchanged(self) -> AbstractContextManager[None]:
        """A block in which forward passes leave nothing in attributes and logs."""
        return self._installed(keep(self._owners))

    @contextmanager
    def _installed(self, values: Mapping[Place, Kept]) -> Iterator[None]:
        """A block in which attributes have copies of `values`; their old values return at its end."""
        with installed_attributes(self._owners, values):
            if vars(self._module).get("_log_sink") is not None:
                vars(self._module)["_log_sink"] = _Silent()
            yield


class _Silent:
    """A log sink that records nothing."""

    def record(self, name: str, value: Any) -> None: ...


def probe_gradients(
    mode: GradientMode, telemetry: Telemetry, run: Run, batch: Any, records: int, row: int
) -> list[Tensor]:
    """Gradient and telemetry of one record, without randomness; the sums of the current step do not change.

    Args:
        mode: of the run.
        telemetry: of the run.
        run: see `Run`.
        batch: of `records` examples, on the device.
        records: at least 1.
        row: the number of the record in the batch.

    Returns:
        The gradient of the record alone, not clipped, 1-dim, and its values of telemetry.
    """
    seen = list[Tensor]()

    def observe(losses: Tensor, norms: Tensor, outputs: Any) -> None:
        seen.extend(value.float().nan_to_num() for value in telemetry.values(losses, norms, outputs))

    with mode.trial(FlatClipper(_NO_LIMIT), observe if telemetry.is_observing else None):
        with deterministic_forward(mode.module):
            mode.add(lambda model, part: run(NoAutocast(model), part), rows_of(batch, records, slice(row, row + 1)), 1)
        return [torch.cat([part.flatten() for part in mode.sums]), *seen]


_NO_LIMIT = float(torch.finfo(torch.float32).max) ** 0.5


def _close(one: list[Tensor], other: list[Tensor]) -> bool:
    pairs = zip(one, other, strict=True)
    return len(one) == len(other) and all(bool((a - b).norm() <= 1e-4 * a.norm() + 1e-12) for a, b in pairs)
