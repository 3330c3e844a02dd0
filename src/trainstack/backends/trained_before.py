"""`TrainedBefore` records the run of this process that trained a parameter last."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor


class TrainedBefore:
    """The accountant of the last run that trained a parameter, as long as the parameter lives; None without privacy.

    Without it, a private run on the same weights would state only its own steps, though its weights reveal the steps
    of the first run too.
    """

    def __init__(self) -> None:
        # by id, because `==` of tensors compares their elements
        self._accountants: dict[int, tuple[weakref.ref[Tensor], Any]] = {}

    def note(self, parameters: Iterable[Tensor], accountant: Any) -> None:
        """Record that `accountant` charges steps that change `parameters`; None if they are not private."""
        for parameter in parameters:
            key = id(parameter)
            reference = weakref.ref(parameter, lambda _, key=key: self._accountants.pop(key, None))  # type: ignore[misc]
            self._accountants[key] = (reference, accountant)

    def find(self, parameters: Iterable[Tensor]) -> list[Any]:
        """The accountants of the runs that trained some of `parameters`, each once."""
        found = (self._accountants.get(id(parameter)) for parameter in parameters)
        return list({id(entry[1]): entry[1] for entry in found if entry is not None}.values())


trained_before: TrainedBefore = TrainedBefore()
"""The record of this process."""
