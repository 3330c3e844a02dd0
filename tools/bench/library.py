"""Run a task with trainstack: the module of a user, and the trainer."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.bench.contender import Run
from tools.bench.task import Task
from trainstack import DefaultCheckpointerArguments, ModuleInterface, Trainer, TrainerArguments

# A NullHandler hides the notice about the order of a list.
logging.getLogger("trainstack").addHandler(logging.NullHandler())


class TaskModule(ModuleInterface):
    """A task as a module of a user, without hooks."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task
        self.model = task.make_model()
        self.loader = task.make_loader()

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> tuple[Any, Any]:
        tuned = self.task.tuned_optimizer  # the fused one, in tasks that also use channels last
        return [(tuned or self.task.make_optimizer)(self.model.parameters())], []

    def get_train_dataloader(self, sampler: type, batch_size: int) -> Any:
        return self.loader

    def get_val_dataloaders(self, sampler: type, batch_size: int) -> Any:
        return self.loader if self.task.kind == "evaluate" else None

    def train_step(self, global_step: int, batch: Any, device: torch.device) -> Tensor:
        inputs, targets = batch
        return self.task.loss(self.model(inputs), targets)

    def val_step(self, global_step: int, batch: Any, device: torch.device) -> Tensor:
        inputs, _ = batch
        return self.model(inputs)  # type: ignore[no-any-return]


class NullTerminal(io.TextIOWrapper):
    """A stream to the null device, with real system calls, that can claim to be a terminal."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__(open(os.devnull, "wb", buffering=0), encoding="utf-8", write_through=True)  # noqa: SIM115
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        """The argument `is_terminal`."""
        return self._is_terminal


@contextmanager
def null_screen(is_terminal: bool) -> Iterator[None]:
    """A block whose output goes to a `NullTerminal`."""
    with NullTerminal(is_terminal) as screen, redirect_stdout(screen), redirect_stderr(screen):
        yield


def arguments_for(task: Task, folder: Path, **options: Any) -> TrainerArguments:
    """The arguments for a task, with further `options`; checkpoints are off."""
    return TrainerArguments(
        train_batch_size=task.micro_batch * task.accumulation,
        gpu_batch_size_limit=task.micro_batch,
        val_batch_size=task.micro_batch,
        device="cpu",
        output_dir=folder,
        overwrite=not options.get("resume"),
        log_level="ERROR",
        checkpointer_args=DefaultCheckpointerArguments(checkpoint=False),
        **options,
    )


def prepare_library(
    task: Task, folder: Path, *, module: TaskModule | None = None, on_terminal: bool = False, **options: Any
) -> Run:
    """`Trainer.train`, or `Trainer.validate` for an evaluation, with `options` as trainer arguments.

    The output of the library goes to the null device, which claims to be a terminal if `on_terminal`.
    """
    args = arguments_for(task, folder, **options)
    module = module or TaskModule(task)

    def run() -> Sequence[Tensor]:
        with null_screen(on_terminal):
            trainer = Trainer(module, args)
            if task.kind == "evaluate":
                return list(trainer.validate()["default"])
            trainer.train()
            return list(module.model.state_dict().values())

    return run
