"""`OptionWatch` notices options of optimizers, such as the learning rate, that no registered scheduler has set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

from torch.optim import Optimizer

from trainstack.backends.dp.sealed.plain_state import SCALARS, copy_value, same_value

_Options = dict[tuple[int, int, str], Any]


class OptionWatch:
    """Compares the options of parameter groups with those after the last step of optimizers and schedulers.

    Other code may compute an option from values without noise, such as a loss that it keeps, and nothing shows where it
    comes from. So the change is noted.

    Args:
        optimizers: of the run.
        note: is given a line for the limits of the guarantee.
    """

    def __init__(self, optimizers: Sequence[Optimizer], note: Callable[[str], None]) -> None:
        self._optimizers, self._note = optimizers, note
        self._sealed: _Options | None = None
        self._held: list[tuple[dict[str, Any], list[str], list[Any]]] | None = None  # the source of `_sealed`

    def check(self) -> None:
        """Note changes since the last call of this or `seal`."""
        if self._is_unchanged():
            return
        before = self._sealed
        options = self._seal()
        if before is not None:
            changed = {
                key for key in before.keys() | options.keys() if not same_value(before.get(key), options.get(key))
            }
            names = ", ".join(sorted({name for _, _, name in changed}))
            if names:
                self._note(f"changes of {names} of an optimizer during training by other code than a scheduler")

    def seal(self) -> None:
        """From here on nothing else may change options."""
        if not self._is_unchanged():
            self._seal()

    def forget(self) -> None:
        """The library is about to load a state, which the next check accepts."""
        self._sealed = self._held = None

    @contextmanager
    def change(self) -> Iterator[None]:
        """A block that may change options."""
        self.check()
        try:
            yield
        finally:
            self.seal()

    def _is_unchanged(self) -> bool:
        """Whether all options are the same objects as when they were sealed, and of kinds that cannot change."""
        groups = self._groups()
        return (
            self._held is not None
            and len(groups) == len(self._held)
            and all(
                group is held and list(group) == keys and all(map(is_, group.values(), values))
                for group, (held, keys, values) in zip(groups, self._held, strict=True)
            )
        )

    def _seal(self) -> _Options:
        groups = self._groups()
        fixed = all(_is_fixed(value) for group in groups for key, value in group.items() if key != "params")
        self._held = [(group, list(group), list(group.values())) for group in groups] if fixed else None
        self._sealed = {
            (number, place, key): copy_value(value)
            for number, optimizer in enumerate(self._optimizers)
            for place, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            if key != "params"
        }
        return self._sealed

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]


def _is_fixed(value: Any) -> bool:
    return isinstance(value, SCALARS) or (type(value) is tuple and all(map(_is_fixed, value)))
