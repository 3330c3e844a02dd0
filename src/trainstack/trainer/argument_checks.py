"""What `TrainerArguments` refuses, and what to write instead."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

from trainstack.backends import TrainerBackend, parse_spec
from trainstack.backends.registry import registered_backend
from trainstack.checkpointing import AbstractCheckpointer
from trainstack.checkpointing.monitoring import DEFAULT_MONITOR, Monitor
from trainstack.errors import ConfigurationError
from trainstack.trainer.argument_kinds import check_kinds, check_resume
from trainstack.trainer.progress import ProgressDisplay
from trainstack.trainer.rhythm import check_validate_every, is_number_of_steps

if TYPE_CHECKING:
    from trainstack.trainer.arguments import TrainerArguments

_AT_LEAST_ONE = ("train_batch_size", "gpu_batch_size_limit")
_AT_LEAST_ONE_OR_NONE = (
    "per_device_train_batch_size",
    "val_batch_size",
    "max_train_steps_per_epoch",
    "max_val_steps_per_epoch",
)
_FLAGS = (
    "clip_grads",
    "use_gpu",
    "init_weights_strict",
    "reset_optimizers_schedulers",
    "disable_tqdm",
    "amp_backend_native",
    "amp_backend_apex",
    "handle_signals",
    "save_on_exception",
    "channels_last",
    "fast_paths",
    "default_callbacks",
)
_CHOICES: dict[str, tuple[Any, ...]] = {
    "deterministic": (True, False, "warn"),
    "fit_micro_batch": (True, False, "always"),
    "nonfinite": ("raise", "skip"),
    "resume_mode": ("full", "weights_and_optimizer", "weights"),
    "report": ("auto", True, False),
    "collect_train_outputs": ("auto", True, False),
    "amp_level_apex": ("O0", "O1", "O2", "O3"),
}


_DISPLAYS = ("auto", "rich", "plain", "none", None)


def check_arguments(args: TrainerArguments) -> None:
    """Check every field and how they go together.

    Raises:
        ConfigurationError: naming the first argument that is wrong.
    """
    check_kinds(args)
    _check_numbers(args)
    _check_choices(args)
    _check_backend(args)
    _check_monitor(args)


def check_trainer_parts(module: Any, args: Any, backend: Any, checkpointer: Any) -> None:
    """Check that a `Trainer` is given the right kinds of things.

    Raises:
        ConfigurationError: naming the first that is not.
    """
    from trainstack.trainer.arguments import TrainerArguments
    from trainstack.trainer.module_interface import ModuleInterface

    if isinstance(module, type) or not isinstance(module, ModuleInterface):
        what = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
        raise ConfigurationError(
            f"Trainer(module=...) was given {what}. Give it an instance of a class derived from ModuleInterface."
        )
    if not isinstance(args, TrainerArguments):
        raise ConfigurationError(
            f"Trainer(args=...) was given a {type(args).__name__}. Write TrainerArguments(...), or "
            "TrainerArguments.from_dict(...)."
        )
    if backend is not None and not isinstance(backend, str | TrainerBackend):
        raise ConfigurationError(
            f"Trainer(trainer_backend=...) was given a {type(backend).__name__}. Write a backend string such as "
            "'sp-bf16', or build_trainer_backend('sp-bf16')."
        )
    if checkpointer is not None and not isinstance(checkpointer, AbstractCheckpointer):
        raise ConfigurationError(
            f"Trainer(checkpointer=...) was given a {type(checkpointer).__name__}. Derive it from AbstractCheckpointer."
        )


def _check_numbers(args: TrainerArguments) -> None:
    _whole_number("epochs", args.epochs, 0)
    _whole_number("seed", args.seed, 0)
    _whole_number("sanity_val_steps", args.sanity_val_steps, 0)
    _whole_number("overfit_batches", args.overfit_batches, -1)
    if not isinstance(args.fast_dev_run, bool):
        _whole_number("fast_dev_run", args.fast_dev_run, 1)
    for name in _AT_LEAST_ONE:
        _whole_number(name, getattr(args, name), 1)
    for name in _AT_LEAST_ONE_OR_NONE:
        if getattr(args, name) is not None:
            _whole_number(name, getattr(args, name), 1)
    if args.per_device_train_batch_size is not None and args.train_batch_size != 1:
        raise ConfigurationError(
            f"train_batch_size={args.train_batch_size} and "
            f"per_device_train_batch_size={args.per_device_train_batch_size}: the first counts a step's samples on all "
            "processes together, the second on each. Leave one of them out."
        )
    _steps("log_every", args.log_every)
    if args.max_steps is not None:
        _steps("max_steps", args.max_steps)
    check_validate_every(args.validate_every)
    if args.stats_args is not None:
        _whole_number("stats_args.log_steps", args.stats_args.log_steps, 1)
    for name in ("max_grad_norm", "clip_grad_value", "stop_grace_s"):
        value = getattr(args, name)
        if value is None and name != "max_grad_norm":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or math.isnan(value):
            raise ConfigurationError(f"{name}={value!r}: write a number above 0{_or_none(name)}.")
    if args.clip_grad_value is not None and args.clip_grads and args.max_grad_norm != 1.0:
        raise ConfigurationError(
            f"clip_grad_value={args.clip_grad_value} and max_grad_norm={args.max_grad_norm}: gradients are clipped "
            "once, by value or by norm. Leave one of them out."
        )


def _or_none(name: str) -> str:
    otherwise = {"max_grad_norm": "clip_grads=False for no clipping", "clip_grad_value": "None for no clipping"}
    return f", or {otherwise.get(name, 'None')}"


def _whole_number(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name}={value!r}: write a whole number, {least} or more.")


def _steps(name: str, value: Any) -> None:
    if not is_number_of_steps(value):
        raise ConfigurationError(
            f"{name}={value!r}: write a whole number of global steps, 1 or more, or a float above 0 and up to 1.0 for "
            "a fraction of the run."
        )


def _check_choices(args: TrainerArguments) -> None:
    for name in _FLAGS:
        if not isinstance(getattr(args, name), bool):
            raise ConfigurationError(f"{name}={getattr(args, name)!r}: write True or False.")
    for name, choices in _CHOICES.items():
        if not any(getattr(args, name) is choice or getattr(args, name) == choice for choice in choices):
            raise ConfigurationError(f"{name}={getattr(args, name)!r}: write one of {', '.join(map(repr, choices))}.")
    check_resume(args.resume)
    if args.init_weights_from is not None and not isinstance(args.init_weights_from, str | PathLike):
        raise ConfigurationError(
            f"init_weights_from={args.init_weights_from!r}: write the path of a checkpoint, an export or a "
            ".safetensors file, or None."
        )
    if args.resume_mode == "weights_and_optimizer" and args.reset_optimizers_schedulers:
        raise ConfigurationError(
            "resume_mode='weights_and_optimizer' and reset_optimizers_schedulers=True contradict each other. Write "
            "resume_mode='weights' to take the weights alone."
        )
    if not isinstance(args.progress, ProgressDisplay) and args.progress not in _DISPLAYS:
        raise ConfigurationError(
            f"progress={args.progress!r}: write one of {', '.join(map(repr, _DISPLAYS))}, or an object of a class "
            "derived from ProgressDisplay."
        )
    if not isinstance(args.compile, bool | Mapping):
        raise ConfigurationError(f"compile={args.compile!r}: write True, False or a dict of options of torch.compile.")
    if not isinstance(logging.getLevelName(args.log_level), int):
        raise ConfigurationError(f"log_level={args.log_level!r}: write 'DEBUG', 'INFO', 'WARNING' or 'ERROR'.")


def _check_monitor(args: TrainerArguments) -> None:
    if args.monitor is None:
        return
    if not isinstance(args.monitor, str) or not args.monitor:
        raise ConfigurationError(f"monitor={args.monitor!r}: write the name of a metric, such as 'val/loss'.")
    try:
        Monitor.of(args.monitor, args.monitor_mode)
    except ConfigurationError as error:
        raise ConfigurationError(str(error).replace("mode=", "monitor_mode=")) from None
    theirs = args.checkpointer_args
    if (theirs.monitor, theirs.mode) not in ((DEFAULT_MONITOR, "auto"), (args.monitor, args.monitor_mode)):
        raise ConfigurationError(
            f"monitor={args.monitor!r} and checkpointer_args.monitor={theirs.monitor!r} contradict each other. "
            "Leave one of them out."
        )


def _check_backend(args: TrainerArguments) -> None:
    if registered_backend(args.backend) is not None:
        return
    tokens = {record.token for record in parse_spec(args.backend)}
    if args.amp_backend_native and args.amp_backend_apex:
        raise ConfigurationError("amp_backend_native and amp_backend_apex are both True: choose one of them.")
    wanted = [("amp_backend_native", "amp"), ("amp_backend_apex", "amp-apex")]
    for flag, token in wanted:
        if getattr(args, flag) and token not in tokens:
            raise ConfigurationError(
                f"{flag}=True with backend={args.backend!r}: the backend string alone decides the precision. Write "
                f"backend='{args.backend.split('-')[0]}-{token}' and leave {flag} out."
            )
    if args.amp_level_apex != "O1" and "amp-apex" not in tokens:
        raise ConfigurationError(
            f"amp_level_apex={args.amp_level_apex!r} with backend={args.backend!r}, which has no apex layer. "
            "Leave it out."
        )
    chosen = args.backend_options.get("amp_apex", {}).get("opt_level", args.amp_level_apex)
    if args.amp_level_apex not in ("O1", chosen):
        raise ConfigurationError(
            f"amp_level_apex={args.amp_level_apex!r} and backend_options={{'amp_apex': {{'opt_level': {chosen!r}}}}} "
            "contradict each other. Leave one of them out."
        )
    if args.differential_privacy_args is not None and "dp" not in tokens:
        raise ConfigurationError(
            f"differential_privacy_args with backend={args.backend!r}, which has no privacy layer: the run would not "
            "be private. Write backend='sp-dp', or leave them out."
        )
    if "dp" in tokens and args.differential_privacy_args is None and "args" not in args.backend_options.get("dp", {}):
        raise ConfigurationError(
            f"backend={args.backend!r} without differential_privacy_args: nothing says how private the run is to be. "
            "Write differential_privacy_args=DifferentialPrivacyArguments(delta=1e-6, target_epsilon=3.0), with a "
            "delta well below one over the number of records."
        )
    if args.distributed_training_args is not None and "ddp" not in tokens:
        raise ConfigurationError(
            f"distributed_training_args with backend={args.backend!r}, which runs one process. Leave them out."
        )
