"""`Stage` names the purpose of a forward pass."""

from __future__ import annotations

import enum


class Stage(enum.Enum):
    """The stage a module's `forward` is called in."""

    TRAIN = 1
    VAL = 2
    TEST = 3
    PREDICT = 4
