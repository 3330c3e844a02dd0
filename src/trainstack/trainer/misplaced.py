"""Parts, arguments and names that users of other libraries expect elsewhere: the errors say where they belong."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NoReturn

from torch import nn

from trainstack.errors import ConfigurationError, ModuleContractError
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
    if module is None:
        raise ConfigurationError(
            f"{kind.__name__} was made without a module. Write {kind.__name__}(module, TrainerArguments(...)); train() "
            "takes no model."
        )
    if isinstance(module, type) or not isinstance(module, ModuleInterface):
        what = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
        wrap = "" if isinstance(module, type) or not isinstance(module, nn.Module) else _WRAP
        raise ConfigurationError(
            f"Trainer(module=...) was given {what}. Write an instance of a class derived from ModuleInterface{wrap}."
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
        ConfigurationError: with the place of each.
    """
    sentences = [f"{kind.__name__} has no argument {name!r}. {_place(kind, name, unknown[name])}" for name in unknown]
    raise ConfigurationError(" ".join(sentences))


def _place(kind: type, name: str, value: Any) -> str:
    known = {field.name for field in fields(TrainerArguments)}
    alias = TrainerArguments.ALIASES.get(name, name)
    if name in ("backend_spec", "strategy"):
        return 'Write TrainerArguments(backend="ddp").'
    write = "" if alias == name else f"Write {alias}. "
    if alias in known:
        settings = f"TrainerArguments({alias}={value!r})"
        return f"{write}Settings go into TrainerArguments: {kind.__name__}(module, {settings})."
    if re.split(r"\W", alias)[0] in known:
        return f"{write}Settings go into TrainerArguments."
    return write.rstrip() or "See the arguments of Trainer and TrainerArguments."
