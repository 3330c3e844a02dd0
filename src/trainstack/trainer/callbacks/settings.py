"""Callbacks that change one setting of a run."""

from __future__ import annotations

from torch import nn

from trainstack.errors import ConfigurationError
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.core.shards import has_shards
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


class SyncBatchNorm(Callback):
    """Turns batch norms into `torch.nn.SyncBatchNorm`, which see the micro-batches of all processes together.

    Parameters and running statistics stay the same objects. In one process nothing is changed. torch has it on
    accelerators only. Each process must have samples in each micro-batch, so the last step of an epoch must be full.
    """

    def on_ready(self, trainer: AbstractTrainer) -> None:
        """Convert.

        Raises:
            ConfigurationError: it cannot work with this device or this data.
        """
        if trainer.world.size == 1:
            return
        if trainer.device.type == "cpu":
            raise ConfigurationError("SyncBatchNorm: torch has it on accelerators only. Leave it out on the CPU.")
        if has_shards(trainer.module):
            raise ConfigurationError(
                "SyncBatchNorm: the module is sharded already, and would go on with parts that were replaced. Call "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm(self) at the end of its __init__."
            )
        plan = trainer.plan
        if plan.last_step_samples != plan.global_batch:
            raise ConfigurationError(
                f"SyncBatchNorm: the last step of an epoch has {plan.last_step_samples} samples instead of "
                f"{plan.global_batch}, so some process may have none, for which the others would wait forever. Write "
                "drop_last=True in get_train_dataloader."
            )
        nn.SyncBatchNorm.convert_sync_batchnorm(trainer.module)  # type: ignore[no-untyped-call]
