"""`LimitBatches`: short epochs, for a try."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from trainstack.errors import ConfigurationError
from trainstack.trainer.events import Callback

if TYPE_CHECKING:
    from trainstack.trainer.trainer import Trainer


class LimitBatches(Callback):
    """Cuts epochs and validations short. Plan and schedules know of it: it lowers the trainer's arguments.

    Args:
        train: global steps an epoch (`max_train_steps_per_epoch`); None for no limit.
        val: validation batches of each loader (`max_val_steps_per_epoch`); None for no limit.

    Raises:
        ConfigurationError: neither is given, or not a whole number from 1 on.
    """

    def __init__(self, train: int | None = None, val: int | None = None) -> None:
        given = [number for number in (train, val) if number is not None]
        if not given or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in given):
            raise ConfigurationError(f"LimitBatches(train={train!r}, val={val!r}): write whole numbers from 1 on.")
        self._train, self._val = train, val

    def on_init(self, trainer: Trainer) -> None:
        """Lower the limits."""
        args = trainer.args
        trainer.args = dataclasses.replace(
            args,
            max_train_steps_per_epoch=_lower(args.max_train_steps_per_epoch, self._train),
            max_val_steps_per_epoch=_lower(args.max_val_steps_per_epoch, self._val),
        )


def _lower(one: int | None, other: int | None) -> int | None:
    return min((n for n in (one, other) if n is not None), default=None)
