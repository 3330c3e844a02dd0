"""`KeptNumbers` puts numbers back that a dataset keeps of a sample."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from trainstack.backends.generator_search import is_of_user
from trainstack.trainer.data.record_sources import datasets_held

_NUMBERS = (bool, int, float, complex, np.generic, np.ndarray, Tensor)


class KeptNumbers:
    """The attributes of a dataset and of the datasets in it, at one moment.

    A running maximum that a dataset updates in `__getitem__` would make a sample depend on those before it. A file that
    is opened late, an array that is loaded late, and caches in lists and dicts are left alone.

    Args:
        dataset: of the user.
    """

    def __init__(self, dataset: Any) -> None:
        found = [vars(one) for one in datasets_held(dataset) if is_of_user(type(one)) and hasattr(one, "__dict__")]
        self._held = [(attributes, dict(attributes)) for attributes in found]

    def restore(self) -> None:
        """Give numbers, tensors and arrays back to attributes that hold others by now."""
        for attributes, before in self._held:
            for key, value in before.items():
                now = attributes.get(key)
                if now is not value and isinstance(value, _NUMBERS) and isinstance(now, _NUMBERS):
                    attributes[key] = value
