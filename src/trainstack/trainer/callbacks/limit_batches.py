"""`LimitBatches`: short epochs, for a try."""

from __future__ import annotations

from trainstack.errors import ConfigurationError
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.events import Callback


class LimitBatches(Callback):
    """Makes epochs and validations shorter. The plan and the schedulers are made for the shorter epochs.

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

    def on_init(self, trainer: AbstractTrainer) -> None:
        """Lower the limits."""
        trainer.limit_steps_per_epoch(train=self._train, val=self._val)
