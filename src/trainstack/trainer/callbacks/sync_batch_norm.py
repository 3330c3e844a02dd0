"""`SyncBatchNorm`: batch norms over all processes' samples."""

from __future__ import annotations

from torch import nn

from trainstack.errors import ConfigurationError
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.events import Callback


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
        plan = trainer.plan
        if plan.last_step_samples != plan.global_batch:
            raise ConfigurationError(
                f"SyncBatchNorm: the last step of an epoch has {plan.last_step_samples} samples instead of "
                f"{plan.global_batch}, so some process may have none, for which the others would wait forever. Write "
                "drop_last=True in get_train_dataloader."
            )
        nn.SyncBatchNorm.convert_sync_batchnorm(trainer.module)  # type: ignore[no-untyped-call]
