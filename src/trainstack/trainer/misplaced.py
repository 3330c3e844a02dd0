"""Parts, arguments and names that users of other libraries expect elsewhere: the errors say where they belong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NoReturn

from torch import nn

from trainstack.errors import ConfigurationError, ModuleContractError, annotate
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.module_interface import ModuleInterface


def check_module(kind: type, module: Any, args: Any) -> None:
    """Refuse an object that is not a module, or a module whose `__init__` has not run.

    Raises:
        ConfigurationError: the object is of another kind.
        ModuleContractError: the module is not initialized.
    """
    if isinstance(module, TrainerArguments):
        swapped = isinstance(args, ModuleInterface)
        why = "module and args have changed places" if swapped else "the module comes first"
        raise ConfigurationError(
            f"Trainer(module=...) was given a TrainerArguments: {why}. Write {kind.__name__}(module, args)."
        )
    if isinstance(module, type) or not isinstance(module, ModuleInterface):
        what = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
        wrap = "" if isinstance(module, type) or not isinstance(module, nn.Module) else _WRAP
        raise ConfigurationError(
            f"Trainer(module=...) was given {what}. Give it an instance of a class derived from ModuleInterface{wrap}."
        )
    if "_parameters" not in vars(module):
        name = type(module).__name__
        raise ModuleContractError(
            f"{name}.__init__ did not call super().__init__(). Call it in the first line of {name}.__init__."
        )


_WRAP = ', or wrap the model: SupervisedModule(model, loss, "adamw", dataset)'


def refuse_trainer_arguments(kind: type, unknown: Mapping[str, Any]) -> NoReturn:
    """Refuse keyword arguments that a trainer of the class `kind` does not have.

    Raises:
        ConfigurationError: with the place of the first one.
    """
    name, value = next(iter(unknown.items()))
    if name in {field.name for field in fields(TrainerArguments)}:
        how = f"Settings go into TrainerArguments: {kind.__name__}(module, TrainerArguments({name}={value!r}))."
    elif name in ("backend_spec", "strategy"):
        how = 'Write TrainerArguments(backend="ddp").'
    else:
        alias = TrainerArguments.ALIASES.get(name)
        how = f"Write {alias}." if alias else "See the arguments of Trainer and TrainerArguments."
    raise ConfigurationError(f"{kind.__name__} has no argument {name!r}. {how}")


_NOT_ON_MODULE = {
    "device": "Steps get it as an argument: train_step(self, global_step, batch, device)",
    "trainer": "Hooks of a Callback get it as an argument; a module has self.plan, self.log and self.micro_batch",
    "global_step": "Steps and hooks get it as an argument: train_step(self, global_step, batch, device)",
    "current_epoch": "on_begin_train_epoch(self, global_step, epoch) gets it; keep it under another name",
    "hparams": "Set self.hyperparameters in __init__",
    "log_dict": "Call self.log(name, value) for each item",
    "manual_backward": "The trainer calls backward() on the returned loss; train_step may also yield several losses",
    "optimizers": "Keep the optimizers in attributes in get_optimizers_schedulers",
    "save_hyperparameters": "Set self.hyperparameters in __init__",
}
"""Attributes that modules of Lightning have."""


def explain_step_error(error: Exception, module: nn.Module) -> None:
    """Annotate an error of a step that looked for an attribute of another library's modules."""
    if isinstance(error, AttributeError) and error.obj is module and error.name in _NOT_ON_MODULE:
        annotate(error, f"{type(module).__name__} has no {error.name}. {_NOT_ON_MODULE[error.name]}")
