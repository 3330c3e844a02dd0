"""`Trainer` and `TrainerArguments` with PyMarlin's arguments, defaults and order of hooks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch

import trainstack as ts
from trainstack.checkpointing import AbstractCheckpointer
from trainstack.compat.pymarlin.core.trainer_backend import TrainerBackend, build_trainer_backend
from trainstack.compat.pymarlin.utils import stats
from trainstack.compat.pymarlin.utils.checkpointer.checkpoint_utils import (
    DefaultCheckpointer,
    DefaultCheckpointerArguments,
)
from trainstack.compat.pymarlin.utils.differential_privacy import DifferentialPrivacyArguments
from trainstack.compat.pymarlin.utils.distributed import DistributedTrainingArguments, place_of_this_process
from trainstack.compat.pymarlin.utils.mutable import Mutable
from trainstack.compat.pymarlin.utils.stats.basic_stats import StatInitArguments, global_stats
from trainstack.compat.pymarlin.utils.writer.base import WriterInitArguments
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.callbacks.monitors import MemoryMonitor
from trainstack.trainer.evaluation.outputs import Kept
from trainstack.trainer.events import Event
from trainstack.trainer.events.hooks import Hooks, needs_outputs
from trainstack.trainer.module_interface import ModuleInterface

_log = logging.getLogger("trainstack")


class TrainerArguments(Mutable, ts.TrainerArguments):
    """`trainstack.TrainerArguments` by position and with the defaults of PyMarlin; may be assigned to.

    Args:
        writers: by default `["stdout", "tensorboard"]`. "aml" is left out, and the log says so.
        **more: other arguments of trainstack's class.
    """

    def __init__(
        self,
        epochs: int = 1,
        use_gpu: bool = True,
        train_batch_size: int = 1,
        gpu_batch_size_limit: int | None = 512,
        val_batch_size: int | None = 1,
        max_train_steps_per_epoch: int | None = None,
        max_val_steps_per_epoch: int | None = None,
        clip_grads: bool = True,
        max_grad_norm: float = 1.0,
        reset_optimizers_schedulers: bool = False,
        checkpointer_args: ts.DefaultCheckpointerArguments | None = None,
        distributed_training_args: ts.DistributedTrainingArguments | None = None,
        writers: Iterable[Any] | None = None,
        stats_args: ts.StatsArguments | None = None,
        writer_args: ts.WriterArguments | None = None,
        disable_tqdm: bool = False,
        log_level: str = "INFO",
        backend: str = "sp",
        amp_backend_native: bool = False,
        amp_backend_apex: bool = False,
        amp_level_apex: str = "O1",
        differential_privacy_args: ts.DifferentialPrivacyArguments | None = None,
        **more: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in ts.TrainerArguments.__dataclass_fields__}
        given["checkpointer_args"] = checkpointer_args or DefaultCheckpointerArguments()
        given["stats_args"] = stats_args or StatInitArguments()
        given["writer_args"] = writer_args = writer_args or WriterInitArguments()
        given["writers"] = _made(("stdout", "tensorboard") if writers is None else writers, writer_args)
        super().__init__(**given, **more)


def _made(writers: Any, args: ts.WriterArguments) -> Any:
    """`writers` without Azure ML's, and with TensorBoard's in its folder."""
    if not isinstance(writers, list | tuple):
        return writers
    if "aml" in writers:
        _log.warning(
            "the writer 'aml' is left out. On Azure ML write 'mlflow', with MLFLOW_TRACKING_URI set to that of the "
            "workspace."
        )
    folder = args.tb_log_dir if isinstance(args, WriterInitArguments) else None
    return [
        ts.TensorBoardWriter(folder) if writer == "tensorboard" and folder else writer
        for writer in writers
        if writer != "aml"
    ]


class Trainer(ts.Trainer):
    """`trainstack.Trainer` with PyMarlin's order and values where they differ.

    `on_end_train_epoch` comes after the validation of its epoch. `on_end_backward` gets the number of finished global
    steps, and the loss over the micro-batches of a step. Outputs of a step lie on the CPU. `validate` returns the
    outputs of the last loader. `global_stats` records in the newest trainer's run.

    Args:
        module: model, steps, optimizers and data.
        args: everything else. `distributed_training_args` is filled in from the launcher's variables.
        trainer_backend: a stack; by default the one that `args.backend` names.
        checkpointer: keeps and finds checkpoints.
        **more: other arguments of `trainstack.Trainer`.

    Raises:
        ConfigurationError: a method of PyMarlin's trainer, backend or checkpointer is overridden that would not be
            called.
    """

    unused_overrides: ClassVar[Mapping[str, str]] = {
        "validate": "val_step, on_validation_begin, on_end_val_epoch or on_validation_end of the module",
        "device": "TrainerArguments(device=...)",
    }

    def __init__(
        self,
        module: ModuleInterface,
        args: ts.TrainerArguments,
        trainer_backend: TrainerBackend | str | None = None,
        checkpointer: AbstractCheckpointer | None = None,
        **more: Any,
    ) -> None:
        if isinstance(args, ts.TrainerArguments) and checkpointer is None:
            checkpointer = DefaultCheckpointer(args.placed_checkpointer_args)
        if isinstance(args, ts.TrainerArguments) and not isinstance(trainer_backend, TrainerBackend):
            trainer_backend = build_trainer_backend(trainer_backend or args.resolved_backend, **args.layer_options)
        if isinstance(args, TrainerArguments) and args.distributed_training_args is None:
            object.__setattr__(args, "distributed_training_args", place_of_this_process())  # to be read by scripts
        if getattr(getattr(args, "stats_args", None), "update_system_stats", False):
            more["callbacks"] = [*(more.get("callbacks") or ()), MemoryMonitor()]
        super().__init__(module, args, trainer_backend, checkpointer, **more)
        if isinstance(args, Mutable):
            object.__setattr__(args, "_in_use", True)
        self._end_train_epoch: Callable[..., Any] | None = None
        self._epoch_outputs: tuple[Any, ...] | None = None
        self.on(Event.EPOCH_END, priority=1)(self._after_validation)
        global_stats.follow(self)

    @property
    def stats(self) -> stats.BasicStats:
        """`global_stats`."""
        return global_stats

    def validate(
        self, dataloaders: Any = None, *, log: bool | None = None, keep_outputs: Kept = True, **options: Any
    ) -> Any:
        """Validate and record the metrics; returns the outputs of the last loader, as PyMarlin does."""
        outputs = super().validate(dataloaders, log=True if log is None else log, keep_outputs=keep_outputs, **options)
        return next(reversed(outputs.values()), None)

    def _make_ready(self, to_train: bool) -> None:
        super()._make_ready(to_train)
        assert self._run is not None
        self._adapt(self._run.hooks)

    def _adapt(self, hooks: Hooks) -> None:
        """Give the hooks of the module PyMarlin's values, and keep `on_end_train_epoch` until after the validation."""
        backward, step, epoch = hooks.end_backward, hooks.end_train_step, hooks.end_train_epoch
        if backward is not None:
            hooks.end_backward = lambda number, loss: backward(
                number - 1, loss / self.gradient_accumulation if isinstance(loss, torch.Tensor) else loss
            )
        if step is not None:

            @functools.wraps(step)
            def end_train_step(number: int, *outputs: Any) -> None:
                step(number, *_on_cpu(outputs))

            hooks.end_train_step = end_train_step
        if epoch is not None:

            @functools.wraps(epoch)
            def keep_outputs(number: int, *outputs: Any) -> None:
                self._epoch_outputs = outputs

            self._end_train_epoch, hooks.end_train_epoch = epoch, keep_outputs

    def _after_validation(self) -> None:
        hook, outputs, self._epoch_outputs = self._end_train_epoch, self._epoch_outputs, None
        if hook is None:
            return
        if outputs is None and needs_outputs(hook):
            _log.warning("on_end_train_epoch is left out: the outputs it takes were lost in the interruption.")
            return
        hook(self.state.global_step, *(outputs or ()))


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    return type(value)(_on_cpu(item) for item in value) if type(value) in (list, tuple) else value


__all__ = [
    "AbstractTrainer",
    "DefaultCheckpointer",
    "DefaultCheckpointerArguments",
    "DifferentialPrivacyArguments",
    "DistributedTrainingArguments",
    "Trainer",
    "TrainerArguments",
    "WriterInitArguments",
    "stats",
]
