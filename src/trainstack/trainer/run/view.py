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
    """Counters, sizes and loaders of a run, always as they are now. Writing to one of them is an `AttributeError`.

    Epochs are counted from 0. A step is one update over all processes, a batch one micro-batch on this process.
    """

    __slots__ = ("_run",)

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def epoch(self) -> int:
        """The epoch under way, or to begin next."""
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
        """Steps of the run; None where that is unknown."""
        return self._run.data.plan.total_steps

    @property
    def steps_in_epoch(self) -> int:
        """Steps finished in the epoch under way."""
        return self._run.state.steps_in_epoch

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch; None where that is unknown."""
        return self._run.data.plan.steps_per_epoch

    @property
    def batches(self) -> int:
        """Micro-batches finished since the run began."""
        return self._run.state.batches

    @property
    def batches_in_epoch(self) -> int:
        """Micro-batches finished in the epoch under way."""
        return self._run.state.batches_in_epoch

    @property
    def batches_per_step(self) -> int:
        """Micro-batches of a step; the last one of an epoch may have fewer."""
        return self._run.data.plan.accumulation

    @property
    def indices(self) -> tuple[int, ...] | None:
        """The samples of the micro-batch under way by their indices in the data set, from `TRAIN_BATCH_BEGIN` to
        `TRAIN_BATCH_END`; None where they are not known."""
        return self._run.data.micro_batch(self._run.state).samples

    @property
    def samples_in_epoch(self) -> int:
        """Samples trained on in the epoch under way, over all processes."""
        return self._run.state.samples_in_epoch

    @property
    def device(self) -> torch.device:
        """Where the module and its batches are."""
        return self._run.world.device

    @property
    def train_dataloader(self) -> Any:
        """The very object that `get_train_dataloader` returned last."""
        return self._run.data.loader

    @property
    def val_dataloaders(self) -> Mapping[str, Any]:
        """What `get_val_dataloaders` returns, by name; it is called for that."""
        run = self._run
        with isolated_rng(mix(run.state.seed), run.world.device):
            return MappingProxyType(run.evaluator.loaders_of(Stage.VAL))
