"""`RunView` shows the counters, sizes and loaders of a run."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from trainstack.stage import Stage
from trainstack.trainer.core.order import mix
from trainstack.trainer.core.random_state import isolated_rng
from trainstack.trainer.run.run import Run


class RunView:
    """The current counters, sizes and loaders of a run. Assignment raises `AttributeError`.

    Epochs are counted from 0. A step is one update over all processes, a batch one micro-batch on this process.
    """

    __slots__ = ("_run",)

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def epoch(self) -> int:
        """The current epoch, or the next one between two epochs."""
        return self._run.state.epoch

    @property
    def epochs(self) -> int:
        """Epochs of the run."""
        return self._run.data.plan.epochs

    @property
    def global_step(self) -> int:
        """Steps finished since the run began."""
        return self._run.state.global_step

    @property
    def total_steps(self) -> int | None:
        """Steps of the run; None if that is unknown."""
        return self._run.data.plan.total_steps

    @property
    def steps_in_epoch(self) -> int:
        """Steps finished in the current epoch."""
        return self._run.state.steps_in_epoch

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch; None if that is unknown."""
        return self._run.data.plan.steps_per_epoch

    @property
    def batches(self) -> int:
        """Micro-batches finished since the run began."""
        return self._run.state.batches

    @property
    def batches_in_epoch(self) -> int:
        """Micro-batches finished in the current epoch."""
        return self._run.state.batches_in_epoch

    @property
    def batches_per_step(self) -> int:
        """Micro-batches of a step. The last step of an epoch may have fewer."""
        return self._run.data.plan.accumulation

    @property
    def indices(self) -> tuple[int, ...] | None:
        """The indices of the samples of the current micro-batch in the data set, from `TRAIN_BATCH_BEGIN` to
        `TRAIN_BATCH_END`; None if they are not known."""
        return self._run.data.micro_batch(self._run.state).samples

    @property
    def samples_in_epoch(self) -> int:
        """Samples trained on in the current epoch, over all processes."""
        return self._run.state.samples_in_epoch

    @property
    def device(self) -> torch.device:
        """The device of the module and its batches."""
        return self._run.world.device

    @property
    def train_dataloader(self) -> Any:
        """The last result of `get_train_dataloader`, not a copy."""
        return self._run.data.loader

    @property
    def val_dataloaders(self) -> Mapping[str, Any]:
        """The result of a call of `get_val_dataloaders`, by name."""
        run = self._run
        with isolated_rng(mix(run.state.seed), run.world.device):
            return MappingProxyType(run.evaluator.loaders_of(Stage.VAL))
