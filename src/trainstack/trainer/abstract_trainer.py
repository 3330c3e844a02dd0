"""`AbstractTrainer`: the interface of the trainer for callbacks."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainstack.trainer.tracking.media import MediaLog

if TYPE_CHECKING:
    from trainstack.backends import TrainerBackend, World
    from trainstack.trainer.arguments import TrainerArguments
    from trainstack.trainer.core.plan import TrainingPlan
    from trainstack.trainer.core.state import RunState
    from trainstack.trainer.module_interface import ModuleInterface
    from trainstack.trainer.tracking.history import RunHistory


class AbstractTrainer(MediaLog, ABC):
    """Base class of trainers. Use it to annotate the trainer in callbacks; `Trainer` documents errors.

    A derived class must define `train` and `validate`. Other methods raise `NotImplementedError` unless overridden.

    Attributes:
        module: the user's module, never wrapped.
        args: all arguments of the run.
        trainer_backend: the stack of layers.
        history: the recorded metrics.
        state: the counters of the run.
    """

    module: ModuleInterface
    args: TrainerArguments
    trainer_backend: TrainerBackend
    history: RunHistory
    state: RunState

    def _not_offered(self, name: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} does not define {name}.")

    @abstractmethod
    def train(self) -> None:
        """Train, and validate as the arguments specify."""

    @abstractmethod
    def validate(
        self, dataloaders: Any = None, *, log: bool | None = None, keep_outputs: bool = True
    ) -> dict[str, Any]:
        """Evaluate the validation data, or `dataloaders`; return the outputs by loader."""

    def test(self) -> dict[str, Any]:
        """Evaluate the test data; return the outputs by loader."""
        raise self._not_offered("test")

    def predict(self, dataloader: Any) -> Any:
        """Predict for the data of `dataloader`; return the outputs."""
        raise self._not_offered("predict")

    def request_stop(self, reason: str, *, then_raise: Exception | None = None) -> None:
        """Request the end of training at the next step boundary; `train()` then raises `then_raise`."""
        raise self._not_offered("request_stop")

    def save_checkpoint(self, force: bool = False) -> None:
        """Save a checkpoint; during a step or a hook, at the next step boundary."""
        raise self._not_offered("save_checkpoint")

    def export(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the module's state to the folder `path`; `overwrite` replaces an export of another state there."""
        raise self._not_offered("export")

    def load_export(self, path: str | os.PathLike[str]) -> None:
        """Load the module's state from the folder `path`, written by `export`."""
        raise self._not_offered("load_export")

    @property
    def plan(self) -> TrainingPlan:
        """All step arithmetic of the run."""
        raise self._not_offered("plan")

    @property
    def world(self) -> World:
        """The rank of this process, the number of processes, and the device."""
        raise self._not_offered("world")

    @property
    def output_dir(self) -> Path:
        """The absolute path of the run's folder."""
        raise self._not_offered("output_dir")

    @property
    def log_dir(self) -> Path:
        """The folder of the logs: `output_dir`, unless `writer_args` has another folder."""
        raise self._not_offered("log_dir")

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.world.device

    @property
    def is_main_process(self) -> bool:
        """Whether this process writes checkpoints and logs."""
        return self.world.is_main

    @property
    def is_training(self) -> bool:
        """Whether `train()` is running."""
        raise self._not_offered("is_training")

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers of the run."""
        raise self._not_offered("optimizers")

    @property
    def schedulers(self) -> tuple[Any, ...]:
        """The schedulers of the run."""
        raise self._not_offered("schedulers")

    @property
    def next_log_step(self) -> int:
        """The global step of the next log point."""
        raise self._not_offered("next_log_step")

    def limit_steps_per_epoch(self, *, train: int | None = None, val: int | None = None) -> None:
        """Lower the number of training steps and validation batches of an epoch."""
        raise self._not_offered("limit_steps_per_epoch")

    def call_at_step(self, step: int, function: Callable[..., Any]) -> None:
        """Call `function` once after global step `step`."""
        raise self._not_offered("call_at_step")

    def freeze(self, parameters: Iterable[nn.Parameter]) -> None:
        """Stop training `parameters`."""
        raise self._not_offered("freeze")

    def unfreeze(self, parameters: Iterable[nn.Parameter]) -> None:
        """Train `parameters`, frozen ones too."""
        raise self._not_offered("unfreeze")

    def evaluation_context(self) -> AbstractContextManager[Any]:
        """Return a context manager in which the module has the evaluated weights."""
        raise self._not_offered("evaluation_context")

    def post_processing(self) -> AbstractContextManager[None]:
        """Return a context manager in which parameters and buffers of a private run may change."""
        raise self._not_offered("post_processing")

    def keep_trained_weights(self) -> None:
        """Keep a copy of the trained weights, so that others can be written into the module after training."""
        raise self._not_offered("keep_trained_weights")

    @property
    def keeps_trained_weights(self) -> bool:
        """Whether the module has weights other than the trained ones, see `keep_trained_weights`."""
        raise self._not_offered("keeps_trained_weights")
