"""What a forward pass is for. A leaf module: layers and the trainer both read it."""

from __future__ import annotations

import enum


class Stage(enum.Enum):
    """The stage a module's `forward` is called in."""

    TRAIN = 1
    VAL = 2
    TEST = 3
    PREDICT = 4
