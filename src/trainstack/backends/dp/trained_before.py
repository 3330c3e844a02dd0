"""`TrainedBefore` notes which private run of this process trained a parameter last.

A second private run on the same weights would otherwise state its own steps alone, though its weights show those of
the first as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from trainstack.backends.dp.budget import Accountant


class TrainedBefore:
    """The accountant of the last private run that trained a parameter, as long as the parameter lives."""

    def __init__(self) -> None:
        # by id, since tensors compare their elements
        self._accountants: dict[int, tuple[weakref.ref[Tensor], Accountant]] = {}

    def note(self, parameters: Iterable[Tensor], accountant: Accountant) -> None:
        """`accountant` charges steps that change `parameters`."""
        for parameter in parameters:
            key = id(parameter)
            reference = weakref.ref(parameter, lambda _, key=key: self._accountants.pop(key, None))  # type: ignore[misc]
            self._accountants[key] = (reference, accountant)

    def find(self, parameters: Iterable[Tensor]) -> list[Accountant]:
        """Those of private runs that trained some of `parameters`, each once."""
        found = (self._accountants.get(id(parameter)) for parameter in parameters)
        return list({entry[1].run: entry[1] for entry in found if entry is not None}.values())


trained_before = TrainedBefore()
"""Of this process."""
