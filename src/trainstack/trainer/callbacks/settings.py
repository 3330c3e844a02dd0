"""Callbacks that change one setting of a run."""

from __future__ import annotations

from torch import nn

from trainstack.errors import ConfigurationError
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.core.shards import has_shards
from trainstack.trainer.events import Callback


class LimitBatches(Callback):
    """Limits the lengths of epochs and validations. The plan and the schedulers are made for the shorter epochs.

    Args:
        train: global steps an epoch (`max_train_steps_per_epoch`); None for no limit.
        val: validation batches of each loader (`max_val_steps_per_epoch`); None for no limit.

    Raises:
        ConfigurationError: no limit is given, or one is not a whole number above 0.

    Examples:
        >>> ts.Trainer(
        ...     module, args, callbacks=[ts.callbacks.LimitBatches(train=2, val=1)]
        ... ).train()
    """

    def __init__(self, train: int | None = None, val: int | None = None) -> None:
        given = [number for number in (train, val) if number is not None]
        if not given or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in given):
            raise ConfigurationError(f"LimitBatches(train={train!r}, val={val!r}): write whole numbers, 1 or more.")
        self._train, self._val = train, val

    def on_init(self, trainer: AbstractTrainer) -> None:
        """Set the limits."""
        trainer.limit_steps_per_epoch(train=self._train, val=self._val)


class SyncBatchNorm(Callback):
    """Converts batch norms to `torch.nn.SyncBatchNorm`, which uses the micro-batches of all processes together.

    Parameters and running statistics stay the same objects. A run with one process is not changed. torch supports it
    on accelerators only. Each process must have samples in each micro-batch, so the last step of an epoch must be full.
    """

    def on_ready(self, trainer: AbstractTrainer) -> None:
        """Convert the batch norms.

        Raises:
            ConfigurationError: the device, the sharding or the data do not allow it.
        """
        if trainer.world.size == 1:
            return
        if trainer.device.type == "cpu":
            raise ConfigurationError("SyncBatchNorm: torch supports it on accelerators only. Remove it on the CPU.")
        if has_shards(trainer.module):
            raise ConfigurationError(
                "SyncBatchNorm: the module is sharded already, and would keep using the parts that this replaces. Call "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm(self) at the end of its __init__."
            )
        plan = trainer.plan
        if plan.last_step_samples != plan.global_batch:
            raise ConfigurationError(
                f"SyncBatchNorm: the last step of an epoch has {plan.last_step_samples} samples instead of "
                f"{plan.global_batch}, so some process may have none, and the others would wait for it forever. Write "
                "drop_last=True in get_train_dataloader."
            )
        nn.SyncBatchNorm.convert_sync_batchnorm(trainer.module)  # type: ignore[no-untyped-call]
