"""Which run of this process trained a parameter last."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor


class TrainedBefore:
    """The last run that trained a parameter, as long as the parameter lives: its accountant, None without privacy.

    A private run on the same weights would otherwise state its own steps alone, though its weights show those of the
    first run as well.
    """

    def __init__(self) -> None:
        # by id, since tensors compare their elements
        self._accountants: dict[int, tuple[weakref.ref[Tensor], Any]] = {}

    def note(self, parameters: Iterable[Tensor], accountant: Any) -> None:
        """`accountant` charges steps that change `parameters`; None if they are not private."""
        for parameter in parameters:
            key = id(parameter)
            reference = weakref.ref(parameter, lambda _, key=key: self._accountants.pop(key, None))  # type: ignore[misc]
            self._accountants[key] = (reference, accountant)

    def find(self, parameters: Iterable[Tensor]) -> list[Any]:
        """Those of the runs that trained some of `parameters`, each once."""
        found = (self._accountants.get(id(parameter)) for parameter in parameters)
        return list({id(entry[1]): entry[1] for entry in found if entry is not None}.values())


trained_before: TrainedBefore = TrainedBefore()
"""Of this process."""
