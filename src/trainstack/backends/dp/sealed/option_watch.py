"""`OptionWatch` notices options of optimizers, such as the learning rate, that no registered scheduler has set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from trainstack.backends.dp.sealed.plain_state import copy_value, same_value

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

    def check(self) -> None:
        """Note changes since the last call of this or `seal`."""
        options = self._options()
        if self._sealed is not None:
            before = self._sealed
            changed = {
                key for key in before.keys() | options.keys() if not same_value(before.get(key), options.get(key))
            }
            names = ", ".join(sorted({name for _, _, name in changed}))
            if names:
                self._note(f"changes of {names} of an optimizer during training by other code than a scheduler")
        self._sealed = options

    def seal(self) -> None:
        """From here on nothing else may change options."""
        self._sealed = self._options()

    def forget(self) -> None:
        """The library is about to load a state, which the next check accepts."""
        self._sealed = None

    @contextmanager
    def change(self) -> Iterator[None]:
        """A block that may change options."""
        self.check()
        try:
            yield
        finally:
            self.seal()

    def _options(self) -> _Options:
        return {
            (number, place, key): copy_value(value)
            for number, optimizer in enumerate(self._optimizers)
            for place, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            if key != "params"
        }
