"""PyMarlin's classes of backends, and `build_trainer_backend` with their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import trainstack as ts
from trainstack.backends.amp import Amp
from trainstack.backends.apex import AmpApex
from trainstack.backends.base import TrainerBackend
from trainstack.backends.ddp import DDP
from trainstack.backends.decorator import AbstractTrainerBackendDecorator as Decorator
from trainstack.backends.dp.layer import DP
from trainstack.compat.pymarlin.utils.mutable import Mutable
from trainstack.errors import ConfigurationError
from trainstack.trainer.evaluation.collector import OutputCollector

SingleProcess = ts.SingleProcess


class AbstractTrainerBackendDecorator(Decorator):
    """`trainstack.AbstractTrainerBackendDecorator` with PyMarlin's name of the layer inside."""

    def __init__(self, trainer_backend: TrainerBackend) -> None:
        super().__init__(trainer_backend)

    @property
    def trainer_backend(self) -> TrainerBackend:
        """The layer inside, `inner`."""
        return self.inner


class SingleProcessAmp(Amp):
    """The stack `"sp-amp"`.

    Args:
        enable_amp: has to be True.
        **options: of `torch.amp.GradScaler`.

    Raises:
        ConfigurationError: `enable_amp` is False.
    """

    def __init__(self, enable_amp: bool = True, **options: Any) -> None:
        _check_amp(enable_amp)
        super().__init__(SingleProcess(), **options)


class SingleProcessApexAmp(AmpApex):
    """The stack `"sp-amp-apex"`; arguments as for `SingleProcessAmp`, options of the layer."""

    def __init__(self, enable_amp: bool = True, **options: Any) -> None:
        _check_amp(enable_amp)
        super().__init__(SingleProcess(), **options)


class SingleProcessDpSgd(DP):
    """The stack `"sp-dp"`.

    Args:
        **options: `args`, the `DifferentialPrivacyArguments`, and `ledger`. `Trainer` gives those of its arguments
            where the backend is a string.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(SingleProcess(), **options)


class DDPTrainerBackend(DDP):
    """The layer `"ddp"` around another, with `find_unused_parameters=True` as in PyMarlin.

    Args:
        trainer_backend: the layer inside.
        gather_frequency: samples gathered at a time; None gathers everything at once.
        **options: of the layer.
    """

    def __init__(self, trainer_backend: TrainerBackend, gather_frequency: int | None = None, **options: Any) -> None:
        options = {"find_unused_parameters": not options.get("static_graph"), **options}
        super().__init__(trainer_backend, gather_frequency=gather_frequency, **options)

    @property
    def trainer_backend(self) -> TrainerBackend:
        """The layer inside, `inner`."""
        return self.inner


class DPDDPTrainerBackend(DDPTrainerBackend):
    """The layer `"ddp"` around `SingleProcessDpSgd`."""


_CORES: dict[str, Callable[..., TrainerBackend]] = {
    "": SingleProcess,
    "amp": SingleProcessAmp,
    "amp-apex": SingleProcessApexAmp,
    "dp": SingleProcessDpSgd,
}


def build_trainer_backend(trainer_backend_name: str, *args: Any, **kwargs: Any) -> TrainerBackend:
    """Build the stack of a backend string, with the arguments of PyMarlin's classes.

    Args:
        trainer_backend_name: one of PyMarlin's eight strings, or another one of trainstack's.
        *args: for the class of the single process.
        **kwargs: `gather_frequency`, `enable_amp` and options of the single process; or options by layer, as
            `trainstack.build_trainer_backend` takes them.

    Raises:
        ConfigurationError: an option is of no layer of the stack.
    """
    process, _, rest = trainer_backend_name.partition("-")
    if process not in ("sp", "ddp") or rest not in _CORES:
        return ts.build_trainer_backend(trainer_backend_name, *args, **kwargs)
    outer = dict(kwargs.pop("ddp", {})) if process == "ddp" else {}
    if process == "ddp" and "gather_frequency" in kwargs:
        outer["gather_frequency"] = kwargs.pop("gather_frequency")
    inner = {**kwargs.pop(rest.replace("-", "_") or "sp", {}), **kwargs}
    try:
        core = _CORES[rest](*args, **inner)
    except TypeError as error:
        raise ConfigurationError(f"backend {trainer_backend_name!r} does not take {inner}: {error}.") from None
    return DDPTrainerBackend(core, **outer) if process == "ddp" else core


def _check_amp(enable_amp: bool) -> None:
    if not enable_amp:
        raise ConfigurationError(
            "enable_amp=False: the backend says whether amp is on. Write SingleProcess(), or the string 'sp' for "
            "'sp-amp'."
        )


class TrainerBackendArguments(Mutable, ts.TrainerBackendArguments):
    """`trainstack.TrainerBackendArguments` with PyMarlin's fields, for a backend that is driven without a `Trainer`.

    Args:
        model: a `ModuleInterface`.
        device: `"auto"`, or an argument of `torch.device`.
        train_batch_size: of PyMarlin's private backend. Not used: the loaders have their batch sizes.
        max_train_steps_per_epoch: global steps after which `train_dl` stops.
        max_val_steps_per_epoch: batches after which `validate_dl` stops.
        distributed_training_args: for one process rank 0 of 1; `DDPTrainerBackend(..., place=...)` takes others.
        optimizers: over the parameters of `model`.
        schedulers: stepped once after each global step.
        gradient_accumulation: batches of one global step on each process.
        clip_grads: limit the joint norm of the gradients.
        max_grad_norm: the limit.
        disable_tqdm: no effect: `train_dl` shows no progress.
        enable_amp: no effect, as in PyMarlin: the class of the backend says it.
        amp_backend_native: the same.
        amp_backend_apex: the same.
        amp_level_apex: refused unless "O1": `SingleProcessApexAmp(opt_level=...)` takes it.
        differential_privacy_args: refused: private training needs a `Trainer`.
    """

    def __init__(
        self,
        model: nn.Module,
        device: str | torch.device = "auto",
        train_batch_size: int | None = None,
        max_train_steps_per_epoch: int | None = None,
        max_val_steps_per_epoch: int | None = None,
        distributed_training_args: ts.DistributedTrainingArguments | None = None,
        optimizers: Iterable[Optimizer] = (),
        schedulers: Iterable[Any] | None = None,
        gradient_accumulation: int = 1,
        clip_grads: bool = True,
        max_grad_norm: float = 1.0,
        disable_tqdm: bool = False,
        enable_amp: bool = True,
        amp_backend_native: bool = False,
        amp_backend_apex: bool = False,
        amp_level_apex: str = "O1",
        differential_privacy_args: Any = None,
    ) -> None:
        _check_driven(distributed_training_args, amp_level_apex, differential_privacy_args)
        super().__init__(
            model=model,
            optimizers=optimizers,
            schedulers=schedulers or (),
            device=device,
            gradient_accumulation=gradient_accumulation,
            max_train_steps_per_epoch=max_train_steps_per_epoch,
            max_val_steps_per_epoch=max_val_steps_per_epoch,
            clip_grads=clip_grads,
            max_grad_norm=max_grad_norm,
        )


def _check_driven(place: ts.DistributedTrainingArguments | None, amp_level_apex: str, privacy: Any) -> None:
    """Refuse arguments that a backend without a `Trainer` cannot use."""
    if privacy is not None:
        raise ConfigurationError(
            "differential_privacy_args without a Trainer: the privacy layer draws the records itself. Write "
            "Trainer(module, TrainerArguments(backend='sp-dp', differential_privacy_args=...))."
        )
    if amp_level_apex != "O1":
        raise ConfigurationError(
            f"amp_level_apex={amp_level_apex!r}: write SingleProcessApexAmp(opt_level={amp_level_apex!r})."
        )
    if place is not None and place.world_size > 1:
        raise ConfigurationError(
            f"distributed_training_args of {place.world_size} processes: write "
            "DDPTrainerBackend(SingleProcess(), place=...), or let the launcher's variables say it."
        )


__all__ = [
    "AbstractTrainerBackendDecorator",
    "DDPTrainerBackend",
    "DPDDPTrainerBackend",
    "OutputCollector",
    "SingleProcess",
    "SingleProcessAmp",
    "SingleProcessApexAmp",
    "SingleProcessDpSgd",
    "TrainerBackend",
    "TrainerBackendArguments",
    "build_trainer_backend",
]
