"""Checks of the parts of a trainer, mainly of the module's method signatures, optimizers and schedulers."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainstack._tensor_classes import is_sharded
from trainstack.backends import TrainerBackend
from trainstack.checkpointing import AbstractCheckpointer, DefaultCheckpointer
from trainstack.checkpointing.arguments import DEFAULT_MONITOR
from trainstack.errors import ConfigurationError, ModuleContractError
from trainstack.trainer.argument_names import OTHER_HOOKS
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.events.event import Callback, Event
from trainstack.trainer.misplaced import check_module, refuse_trainer_arguments
from trainstack.trainer.module_interface import CallbackInterface, ModuleInterface, library_names, name_conflict
from trainstack.trainer.schedulers.building import is_scheduler, is_scheduler_factory
from trainstack.trainer.schedulers.stepping import SchedulerConfig

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_STEP = ((), ("global_step", "batch", "device"))
_LOADER = ((), ("sampler", "batch_size"))
_CALLS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "forward": ((), ("stage", "global_step", "batch", "device")),
    "train_step": _STEP,
    "val_step": _STEP,
    "test_step": _STEP,
    "predict_step": _STEP,
    "get_train_dataloader": _LOADER,
    "get_val_dataloaders": _LOADER,
    "get_test_dataloaders": _LOADER,
    "get_optimizers_schedulers": (("estimated_global_steps_per_epoch", "epochs"), ()),
    "batch_weight": (("batch",), ()),
    "redistribute_state": (("states", "rank", "world_size"), ()),
    "on_begin_train_epoch": (("global_step", "epoch"), ()),
    "on_end_backward": (("global_step", "loss_tensor"), ()),
    "on_end_train_step": (("global_step",), ()),
    "on_end_train_epoch": (("global_step",), ()),
    "on_end_val_epoch": (("global_step",), ("key",)),
    "on_end_train": (("global_step",), ()),
}
"""By method: names of its positional arguments, and of its keyword arguments. Outputs of steps are added."""
_TAKE_OUTPUTS = ("on_end_train_step", "on_end_train_epoch", "on_end_val_epoch")
_TYPOS = {"get_val_dataloaders": ("val", "load"), "val_step": ("val", "step")}
"""Optional methods, whose misspelt names would have no effect, and words that such a name probably contains."""


def check_parts(
    kind: type,
    module: Any,
    args: Any,
    backend: Any,
    checkpointer: Any,
    train_step: Any,
    val_step: Any,
    unknown: Mapping[str, Any],
) -> TrainerArguments:
    """Check the parts of a trainer of the class `kind`; return the arguments. The error names the first wrong part."""
    if unknown:
        refuse_trainer_arguments(kind, unknown)
    args = TrainerArguments() if args is None else args
    _check_trainer_class(kind)
    check_module(kind, module, args)
    if not isinstance(args, TrainerArguments):
        raise ConfigurationError(
            f"Trainer(args=...) was given a {type(args).__name__}. Write TrainerArguments(...), or "
            "TrainerArguments.from_dict(...)."
        )
    if isinstance(backend, list | tuple | Callback):
        raise ConfigurationError(
            f"Trainer(trainer_backend=...) was given a {type(backend).__name__} as its third argument. Write "
            "callbacks=[...]."
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
    if isinstance(backend, TrainerBackend):
        _check_layers(backend)
    if checkpointer is not None:
        _check_checkpointer(checkpointer, args.resume)
    _check_given_steps({"train_step": train_step, "val_step": val_step})
    return args


def _check_given_steps(steps: Mapping[str, Any]) -> None:
    for name, step in steps.items():
        try:
            if step is not None:
                inspect.signature(step).bind(None, **dict.fromkeys(_STEP[1]))
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"Trainer({name}={step!r}): it cannot be called like {name} ({error}). Write "
                f"def {name}(module, global_step, batch, device)."
            ) from None


_TRAINER_METHODS = {
    "train_epoch": "hooks of the module",
    "_init_backend": "Trainer(trainer_backend=...)",
    "_init_checkpointer": "Trainer(checkpointer=...)",
    "_init_stats": "TrainerArguments(writers=...)",
    "_log_hparams": "TrainerArguments(writers=...)",
    "_fetch_ranks": "TrainerArguments(distributed_training_args=...)",
    "_get_trainer_backend_args": "TrainerArguments(backend_options=...)",
    "calculate_train_batch_loss": "train_step of the module",
    "calculate_eval_batch_loss": "val_step of the module",
    "create_scheduler": "get_optimizers_schedulers of the module",
    "create_train_dataloader": "get_train_dataloader of the module",
    "create_eval_dataloader": "get_val_dataloaders of the module",
    "training_run_start": "on_train_begin of the module",
    "training_run_epoch_end": "on_epoch_end of the module",
    "training_run_end": "on_train_end of the module",
    "train_epoch_start": "on_begin_train_epoch of the module",
    "train_epoch_end": "on_end_train_epoch of the module",
    "eval_epoch_start": "on_validation_begin of the module",
    "eval_epoch_end": "on_end_val_epoch of the module",
    "backward_step": "a layer that overrides backward",
    "optimizer_step": "a layer that overrides step",
    "optimization_step": "a layer that overrides step",
    "scheduler_step": "SchedulerConfig",
    "training_step": "train_step of the module",
    "evaluation_step": "val_step of the module",
    "prepare_input_batch": "train_step of the module",
    "inner_training_loop": "hooks and layers",
    "evaluation_loop": "val_step and hooks of the module",
    "compute_loss": "train_step of the module",
    "prediction_step": "val_step of the module",
    "create_optimizer": "get_optimizers_schedulers of the module",
    "create_optimizer_and_scheduler": "get_optimizers_schedulers of the module",
    "get_train_dataloader": "get_train_dataloader of the module",
    "get_eval_dataloader": "get_val_dataloaders of the module",
    "get_test_dataloader": "get_test_dataloaders of the module",
}
"""Methods that trainers of PyMarlin, pytorch-accelerated, Hezar and transformers call, and their counterparts."""


_TRAINER_VALUES = {
    "estimated_global_steps_per_epoch": "TrainerArguments(max_train_steps_per_epoch=...)",
    "gradient_accumulation": "TrainerArguments(gpu_batch_size_limit=...)",
    "train_step_batch_size": "TrainerArguments(train_batch_size=..., gpu_batch_size_limit=...)",
    "val_step_batch_size": "TrainerArguments(val_batch_size=...)",
    "train_sampler": "a loader with the sampler in get_train_dataloader of the module",
    "val_sampler": "a loader with the sampler in get_val_dataloaders of the module",
}
"""Values that a trainer provides but does not read, so that an override would not change a run."""


def overridden(kind: type, name: str) -> bool:
    """Whether a class outside of the library defines `name` for `kind`."""
    owner = next((one for one in kind.__mro__ if name in vars(one)), kind)
    return name in vars(owner) and not owner.__module__.startswith("trainstack.")


def _check_trainer_class(kind: type) -> None:
    """Check that a trainer overrides no method of another library's trainer and no value that runs do not read."""
    unused = {name: place for name, place in _TRAINER_METHODS.items() if hasattr(kind, name)}
    values = _TRAINER_VALUES | getattr(kind, "unused_overrides", {})
    unused |= {name: place for name, place in values.items() if overridden(kind, name)}
    if unused:
        instead = "; ".join(f"for {name} write {place}" for name, place in unused.items())
        raise ConfigurationError(f"{kind.__name__} defines {', '.join(unused)}, which no trainer calls: {instead}.")


_BACKEND_METHODS = {
    "train_dl": "override forward, backward, clip or step",
    "validate_dl": "override forward, begin_evaluation or gather",
    "process_global_step": "override clip or step",
    "optimize": "override step",
    "_forward_backward": "override forward and backward",
    "_clip_gradients": "override clip",
    "init": "override prepare",
    "setup_distributed_env": "override open",
    "cleanup": "override close",
    "gather_tensors_on_cpu": "override gather",
    "train_sampler": "return a loader with the sampler from get_train_dataloader of the module",
    "val_sampler": "return a loader with the sampler from get_val_dataloaders of the module",
}
"""Methods of PyMarlin's backends that a trainer does not call, and their counterparts."""
_STATE_METHODS = {"get_state": "override get_layer_state", "update_state": "override update_layer_state"}
"""Methods that the trainer calls only on the outermost layer, and their counterparts for inner layers."""


def _check_layers(stack: TrainerBackend) -> None:
    """Check that layers define verbs, and no methods that a trainer would not call."""
    for layer in stack.layers():
        methods = _BACKEND_METHODS if layer is stack else {**_BACKEND_METHODS, **_STATE_METHODS}
        unused = {
            name: instead
            for name, instead in methods.items()
            if getattr(type(layer), name, None) is not getattr(TrainerBackend, name, None)
        }
        if unused:
            instead = "; ".join(f"for {name} {instead}" for name, instead in unused.items())
            raise ConfigurationError(
                f"Trainer(trainer_backend=...): {type(layer).__name__} defines {', '.join(unused)}, which no trainer "
                f"calls. The loop of the trainer calls verbs: {instead}. See docs/guides/backend.md."
            )


def _check_checkpointer(checkpointer: AbstractCheckpointer, resume: Any) -> None:
    """Check before training that the methods of a checkpointer accept the arguments of the trainer's calls."""
    calls = {
        "save": ((0, 1, 2), "self, checkpoint_state, index, force=False"),
        "save_model": ((0, 1), "self, model_state, index, *, plan=None, global_step=None, metadata=None"),
        "load": (() if resume is False else (0,), "self, resume=None"),
    }
    for name, (given, wanted) in calls.items():
        try:
            inspect.signature(getattr(checkpointer, name)).bind(*given)
        except TypeError as error:
            reason = f" with resume={resume!r}" if name == "load" and given else ""
            raise ConfigurationError(
                f"{type(checkpointer).__name__}.{name} cannot be called with the trainer's arguments{reason} "
                f"({error}). Write def {name}({wanted})" + (", or remove resume." if reason else ".")
            ) from None


def lacks_method(module: Any, name: str, val_step: Any = None) -> bool:
    """Whether the method `name`, which `ModuleInterface` does not implement, has no implementation.

    `val_step` is the function that replaces this method in the trainer, or None.
    """
    if name == "val_step" and (val_step is not None or not lacks_method(module, "forward")):
        return False
    return getattr(getattr(module, name), "__func__", None) is getattr(ModuleInterface, name)


def check_signatures(module: Any, log: RunLogger, val_step: Any = None, stack: TrainerBackend | None = None) -> None:
    """Check that methods accept the trainer's calls, and warn about misspelt hooks and a layer without effect.

    `val_step` is as in `lacks_method`. `stack` runs the module.

    Raises:
        ModuleContractError: a method does not; the message has the required signature.
    """
    _check_library_names(module)
    for name, (positional, named) in _CALLS.items():
        method = getattr(module, name)
        try:
            signature = inspect.signature(method)
        except (TypeError, ValueError):
            continue
        # A hook may take as many outputs as its step returns: pass as many as it has parameters for.
        room = [p for p in signature.parameters.values() if p.kind in _BY_POSITION and p.name not in named]
        offered = max(len(positional), len(room)) if name in _TAKE_OUTPUTS else len(positional)
        takes_dict = name == "on_end_val_epoch" and val_step is None and module._val_step_returns_dict()
        offered = min(offered, len(positional) + 1) if takes_dict else offered
        try:
            signature.bind(*range(offered), **dict.fromkeys(named))
        except TypeError as error:
            outputs = ["outputs"] if takes_dict else ["*outputs"] if name in _TAKE_OUTPUTS else []
            wanted = ", ".join(["self", *positional, *outputs, *named])
            hint = " The backend calls this method; keep your network in an attribute such as self.model."
            hint = hint if name == "forward" else f" The arguments of {name} are passed by name." if named else ""
            hint += " The outputs are one dict with the keys loss, outputs and targets." if takes_dict else ""
            raise ModuleContractError(
                f"{type(module).__name__}.{name}{signature} cannot be called with the trainer's arguments ({error}). "
                f"Write def {name}({wanted}).{hint}"
            ) from error
    _check_modes_can_be_set(module)
    _warn_on_method_typos(module, log, val_step)
    _warn_on_unused_callbacks(module, log)
    if stack is not None:
        _warn_of_other_precision(module, stack, log)


def _check_modes_can_be_set(module: nn.Module) -> None:
    """Refuse a part with a method `train` for another purpose: PyTorch calls it to set the mode of the part."""
    for name, part in module.named_modules():
        method = getattr(part, "train")  # noqa: B009 - a part may hide the method of nn.Module
        if getattr(method, "__func__", None) is nn.Module.train:
            continue
        try:
            inspect.signature(method).bind(True)
        except (TypeError, ValueError) as error:
            where = f"the part {name!r} ({type(part).__name__})" if name else type(part).__name__
            raise ModuleContractError(
                f"{where} defines train, which cannot be called with a mode ({error}). The trainer calls "
                "nn.Module.train(mode) for the training and the eval mode. Give that method another name."
            ) from None


def _check_library_names(module: Any) -> None:
    """Check that no attribute of the class hides a name of the library; `__setattr__` checks those of the object."""
    for name in library_names():
        owner = next(kind for kind in type(module).__mro__ if name in vars(kind))
        problem = None
        if owner is not ModuleInterface and name == "plan":
            problem = name_conflict(type(module).__name__, name, vars(owner)[name])
        elif not callable(getattr(module, name)):
            problem = name_conflict(type(module).__name__, name, getattr(module, name))
        if problem is not None:
            raise ModuleContractError(problem)


def _warn_on_method_typos(module: Any, log: RunLogger, val_step: Any) -> None:
    known = [name for name in dir(CallbackInterface) if name.startswith("on_")] + [e.method for e in Event]
    for name in dir(type(module)):
        if name in OTHER_HOOKS:
            log.warning(
                f"{type(module).__name__}.{name} is not a hook and is never called by the trainer. "
                f"Write {OTHER_HOOKS[name]}."
            )
        elif name.startswith("on_") and name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)  # not 0.6: all names share words
            if close:
                log.warning(
                    f"{type(module).__name__}.{name} is not a hook and is never called by the trainer. "
                    f"Did you mean {close[0]!r}?"
                )
        elif not name.startswith(("on_", "_")) and not hasattr(ModuleInterface, name):
            _warn_on_missing_method(module, name, log, val_step)


def _warn_on_unused_callbacks(module: Any, log: RunLogger) -> None:
    held = getattr(module, "callbacks", None)
    if type(module).get_callbacks is not ModuleInterface.get_callbacks or not isinstance(held, list | tuple):
        return
    kinds = [one if isinstance(one, type) else type(one) for one in held]
    if any(issubclass(kind, Callback) for kind in kinds):
        log.warning(
            f"{type(module).__name__}.callbacks is never read by the trainer. Return these callbacks from "
            "get_callbacks(self)."
        )


def _warn_on_missing_method(module: Any, name: str, log: RunLogger, val_step: Any) -> None:
    for meant, words in _TYPOS.items():
        # 0.85: a user's other methods may have similar names, so only a letter or two may differ.
        alike = all(word in name for word in words) or difflib.get_close_matches(name, [meant], cutoff=0.85)
        if alike and lacks_method(module, meant, val_step) and inspect.isroutine(getattr(type(module), name)):
            log.warning(
                f"{type(module).__name__}.{name} is never called by the trainer. Did you mean {meant!r}? Without it, "
                "training does not validate."
            )


_HOW = "Return ([optimizer], [scheduler]), or ([optimizer], []) without a scheduler."


def check_initialized(named: Iterable[tuple[str, Tensor]], what: str) -> None:
    """Check that no parameter or buffer gets its shape only in the first forward pass.

    Raises:
        ConfigurationError: one does; `what` is the part of the library that reads its values.
    """
    lazy = [name for name, tensor in named if is_lazy(tensor)]
    if lazy:
        raise ConfigurationError(
            f"{what} needs the values of {lazy[0]!r}, which has no shape before the first forward pass. Run the "
            "network on one batch before you build the Trainer, under torch.no_grad()."
        )


def check_optimizers_schedulers(
    returned: Any, module: nn.Module, log: RunLogger, num_ranks: int = 1
) -> tuple[tuple[Optimizer, ...], tuple[Any, ...]]:
    """Return the optimizers, and the schedulers or their factories, as tuples, checked against `module`.

    Raises:
        ModuleContractError: an item has another type, or belongs to other parameters or another optimizer.
    """
    if isinstance(returned, Optimizer):
        returned = (returned, ())
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        what = "nothing" if returned is None else f"a {type(returned).__name__}"
        what += f" of {len(returned)} items" if isinstance(returned, tuple | list) else ""
        raise ModuleContractError(f"get_optimizers_schedulers returned {what}. {_HOW}")
    optimizers, schedulers = _as_tuple(returned[0]), _as_tuple(returned[1])
    if not optimizers:
        raise ModuleContractError(f"get_optimizers_schedulers returned no optimizer. {_HOW}")
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ModuleContractError(
                f"get_optimizers_schedulers returned a {type(optimizer).__name__} among the optimizers. {_HOW}"
            )
    _warn_on_unregistered_modules(module, log)
    _check_parameters(optimizers, module, log, num_ranks)
    for scheduler in schedulers:
        _check_scheduler(scheduler, optimizers)
    return optimizers, schedulers


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


_CONTAINERS = {
    dict: ("nn.ModuleDict", "nn.ParameterDict"),
    list: ("nn.ModuleList", "nn.ParameterList"),
    tuple: ("nn.ModuleList", "nn.ParameterList"),
}
_MOST_ITEMS = 10_000
"""Items that are examined in one attribute, because it may be a long list of samples."""


def _warn_on_unregistered_modules(module: nn.Module, log: RunLogger) -> None:
    """Warn about trainable layers and parameters in lists and dicts, which `parameters()` does not contain.

    A part without trainable parameters, such as a metric, a loss or a frozen teacher, may be kept in a list.
    """
    registered = {id(part) for part in (*module.modules(), *module.parameters())}
    own = vars(nn.Module())
    for part in module.modules():
        if type(part).__module__.startswith("torch."):  # such as `nn.LSTM`, which lists its own weights
            continue
        for name, value in vars(part).items():
            if name in own or not isinstance(value, tuple(_CONTAINERS)):
                continue
            found = [one for one in _trainable_in(value) if id(one) not in registered]
            if found:
                log.warning(_unregistered_message(f"{type(part).__name__}.{name}", value, found))


def _trainable_in(container: Any) -> list[nn.Module | nn.Parameter]:
    """Return the trainable layers and parameters in nested lists, tuples and dicts, each once."""
    found: dict[int, nn.Module | nn.Parameter] = {}
    seen, pending = set[int](), list[Any]([container])
    left = _MOST_ITEMS
    while pending and left > 0:
        value = pending.pop()
        left -= 1
        if isinstance(value, nn.Parameter):
            trains = value.requires_grad
        elif isinstance(value, nn.Module):
            trains = any(parameter.requires_grad for parameter in value.parameters())
        else:
            if isinstance(value, tuple(_CONTAINERS)) and id(value) not in seen:
                seen.add(id(value))
                inner: Any = value.values() if isinstance(value, dict) else value
                pending += islice(inner, left)
            continue
        if trains:
            found[id(value)] = value
    return list(found.values())


def _unregistered_message(where: str, container: Any, found: Sequence[Any]) -> str:
    kind = next(kind for kind in _CONTAINERS if isinstance(container, kind))
    modules = sum(isinstance(one, nn.Module) for one in found)
    counts = [(modules, "module"), (len(found) - modules, "parameter")]
    what = " and ".join(f"{count} {word}{'s' if count > 1 else ''}" for count, word in counts if count)
    return (
        f"{where} is a {kind.__name__} with {what}, which PyTorch does not register: they are not trained, moved or "
        f"saved. Use {_CONTAINERS[kind][not modules]}."
    )


def _warn_of_other_precision(module: nn.Module, stack: TrainerBackend, log: RunLogger) -> None:
    """Warn that a precision layer has no effect: autocast converts float32 alone, and leaves float64 as it is."""
    layer = next((one for one in stack.layers() if one.autocast_dtype is not None), None)
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    if layer is not None and dtypes == {torch.float64}:
        log.warning(
            f"all parameters are float64, and the layer {layer.name!r} converts float32 alone, so it changes nothing. "
            "Call float() on the model, or remove the layer from the backend string."
        )


def complete_monitor(
    args: TrainerArguments, module: nn.Module, metrics: Any, checkpointer: AbstractCheckpointer | None
) -> TrainerArguments:
    """Return `args` with `monitor` of the given checkpointer or of `checkpointer_args`, if they set one.

    "accuracy" becomes "val/accuracy", if this is the name of a metric of the trainer, or else of the module. "loss" is
    the validation loss. The arguments of a given checkpointer do not change.
    """
    if args.monitor is None:
        given = checkpointer.args if isinstance(checkpointer, DefaultCheckpointer) else None
        theirs = (given or args.placed_checkpointer_args).monitored
        if theirs.name == DEFAULT_MONITOR:
            return args
        saving = replace(args.checkpointer_args, monitor=DEFAULT_MONITOR, mode="auto")
        args = replace(args, monitor=theirs.name, monitor_mode=theirs.mode, checkpointer_args=saving)
        if given:
            return args
    if metrics is None:
        metrics = getattr(module, "metrics", None)
    known = {"loss", *(metrics if isinstance(metrics, Mapping | nn.ModuleDict) else ())}
    return replace(args, monitor=f"val/{args.monitor}") if args.monitor in known else args


def refuse_argument_of_train(name: str) -> NoReturn:
    """Raise an error for the unknown argument `name` of `Trainer.train`.

    Raises:
        ConfigurationError: always; it names the place for this argument.
    """
    if name in {field.name for field in fields(TrainerArguments)}:
        how = (
            f"it holds for the whole run. Write TrainerArguments({name}=...), or make another Trainer with "
            f"dataclasses.replace(trainer.args, {name}=...)."
        )
    else:
        alias = TrainerArguments.ALIASES.get(name)
        how = f"write {alias}." if alias else "it takes epochs and max_steps; data belong to the module."
    raise ConfigurationError(f"train() has no argument {name!r}: {how}")


def left_out_parameters(optimizers: Sequence[Optimizer], module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of `module` that are in no optimizer, by name."""
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return {name: p for name, p in module.named_parameters() if p.requires_grad and id(p) not in held}


def shortened(names: Sequence[str], most: int = 3) -> str:
    """Format the first of `names`, for a message."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _check_parameters(optimizers: Sequence[Optimizer], module: nn.Module, log: RunLogger, num_ranks: int) -> None:
    mine = {id(p) for p in module.parameters()}
    held: set[int] = set()
    for position, optimizer in enumerate(optimizers):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        foreign = [p for p in parameters if id(p) not in mine]
        if foreign:
            raise _foreign(position, optimizer, foreign, module)
        twice = sum(id(p) in held for p in parameters)
        if twice:
            raise ModuleContractError(
                f"optimizer {position} ({type(optimizer).__name__}) holds {twice} parameters that an earlier optimizer "
                "holds too, so they would be updated twice a step. Give each parameter to one optimizer."
            )
        held |= {id(p) for p in parameters}
    left_out = list(left_out_parameters(optimizers, module))
    if left_out:
        count, names = len(left_out), shortened(left_out)
        outcome = "in no optimizer and will not change"
        if num_ranks > 1:
            outcome = (
                "in no optimizer of the trainer. Under ddp their gradients are not summed, so a step that the module "
                "makes itself gives each rank other weights"
            )
        log.warning(f"{count} trainable parameters are {outcome}: {names}")


def _foreign(position: int, optimizer: Optimizer, foreign: Sequence[Tensor], module: nn.Module) -> ModuleContractError:
    """Return the error for an optimizer with parameters that do not belong to the module."""
    kind = type(optimizer).__name__
    if not any(p.is_meta for p in foreign) and not any(map(is_sharded, module.parameters())):
        return ModuleContractError(
            f"optimizer {position} ({kind}) holds {len(foreign)} parameters that are not {type(module).__name__}'s, "
            f"the first of shape {tuple(foreign[0].shape)}. Create it with self.parameters(), and make the model an "
            "attribute of the module before that."
        )
    made = f"{kind}({{}}, lr={optimizer.defaults['lr']!r})" if "lr" in optimizer.defaults else f"{kind}({{}})"
    return ModuleContractError(
        f"optimizer {position} ({kind}) holds {len(foreign)} parameters that were replaced when the module was placed: "
        "it was created before the module was sharded, or got its memory. Create it later: return "
        f"{made.format('self.parameters()')} from get_optimizers_schedulers, or give SupervisedModule a function, "
        f"optimizer=lambda parameters: {made.format('parameters')}."
    )


def _check_scheduler(scheduler: Any, optimizers: Sequence[Optimizer]) -> None:
    if isinstance(scheduler, SchedulerConfig):
        scheduler = scheduler.scheduler
    kind = type(scheduler).__name__
    if is_scheduler_factory(scheduler):
        return
    if not is_scheduler(scheduler):
        raise ModuleContractError(f"get_optimizers_schedulers returned a {kind} among the schedulers. {_HOW}")
    owner = getattr(scheduler, "optimizer", None)
    if owner is not None and all(owner is not optimizer for optimizer in optimizers):
        raise ModuleContractError(
            f"a {kind} belongs to an optimizer that get_optimizers_schedulers did not return. Create it for one of "
            "the optimizers that you return."
        )
