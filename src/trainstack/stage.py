"""`Stage` names the purpose of a forward pass."""

from __future__ import annotations

import enum


class Stage(enum.Enum):
    """The purpose for which the `forward` of a module is called."""

    TRAIN = 1
    VAL = 2
    TEST = 3
    PREDICT = 4
