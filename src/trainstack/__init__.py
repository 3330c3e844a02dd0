"""trainstack trains PyTorch models: write one module, select one backend string, run it anywhere.

The first use of a name imports the packages, and with them torch. `import trainstack` alone is fast, so that the
command line can answer without torch.
"""

import logging
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainstack._lazy import gc_paused, lazy_imports
from trainstack._terminal import EscapeFilter

if TYPE_CHECKING:
    from trainstack import backends, checkpointing, errors, trainer
    from trainstack._tensor_classes import register_tensor_class
    from trainstack.backends import *  # noqa: F403
    from trainstack.backends.privacy_statement import PrivacyStatement
    from trainstack.checkpointing import *  # noqa: F403
    from trainstack.errors import *  # noqa: F403
    from trainstack.launching.launch import launch
    from trainstack.ranks import main_process_first, print_once, rank_zero_only
    from trainstack.replaying import ReplayReport, StepDifference, compare_by_replay, replay
    from trainstack.trainer import *  # noqa: F403
    from trainstack.verifying import Divergence, KillEvent, ResumeReport, verify_resume

__version__ = "0.1.0"

logging.getLogger("trainstack").addFilter(EscapeFilter())

if TYPE_CHECKING:
    __all__ = [
        "Divergence",
        "KillEvent",
        "PrivacyStatement",
        "ReplayReport",
        "ResumeReport",
        "StepDifference",
        "__version__",
        "compare_by_replay",
        "errors",
        "launch",
        "main_process_first",
        "print_once",
        "rank_zero_only",
        "register_tensor_class",
        "replay",
        "verify_resume",
    ]
    __all__ += errors.__all__  # one statement for each package, because pyright evaluates only this form
    __all__ += backends.__all__
    __all__ += checkpointing.__all__
    __all__ += trainer.__all__

_PACKAGES = ("errors", "backends", "checkpointing", "trainer")
_PLACES = {
    **dict.fromkeys(("KillEvent", "Divergence", "ResumeReport", "verify_resume"), "trainstack.verifying"),
    **dict.fromkeys(("ReplayReport", "StepDifference", "compare_by_replay", "replay"), "trainstack.replaying"),
    **dict.fromkeys(("main_process_first", "print_once", "rank_zero_only"), "trainstack.ranks"),
    **{
        name: f"trainstack.{name}"
        for name in (*_PACKAGES, "launching", "verifying", "replaying", "auditing", "testing", "cli", "ranks", "stage")
    },
    "PrivacyStatement": "trainstack.backends.privacy_statement",
    "launch": "trainstack.launching.launch",
    "register_tensor_class": "trainstack._tensor_classes",
}
_get_own = lazy_imports(__name__, _PLACES)
_ELSEWHERE = {
    **dict.fromkeys(("LightningModule", "TrainerModule"), "trainstack.ModuleInterface"),
    "LightningDataModule": "get_train_dataloader and get_val_dataloaders of the ModuleInterface",
    "ModelCheckpoint": "TrainerArguments(checkpointer_args=DefaultCheckpointerArguments(...))",
    "CSVLogger": 'TrainerArguments(writers=["csv"])',
    "TensorBoardLogger": 'TrainerArguments(writers=["tensorboard"])',
    "WandbLogger": 'TrainerArguments(writers=["wandb"])',
    "MLFlowLogger": 'TrainerArguments(writers=["mlflow"])',
    "LearningRateMonitor": "trainstack.callbacks.LRMonitor",
    "TrainerCallback": "trainstack.Callback",
    "TrainingArguments": "trainstack.TrainerArguments",
}
"""Names of Lightning and transformers, and the code to write instead."""


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return _get_own(name)
    if name.startswith("_") and name != "__all__":  # names that import and inspection look up in each package
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with gc_paused():
        packages = [import_module(f"trainstack.{package}") for package in _PACKAGES]
    if name == "__all__":
        own = [public for public, place in _PLACES.items() if place != f"{__name__}.{public}"]
        return [*own, "errors", "__version__", *(public for package in packages for public in package.__all__)]
    found = next((package for package in packages if name in package.__all__), None)
    if found is None:
        ready_made = import_module("trainstack.trainer.callbacks")
        write = f"{__name__}.callbacks.{name}" if name in ready_made.__all__ else _ELSEWHERE.get(name)
        hint = f". Write {write}" if write else ""
        message = f"module {__name__!r} has no attribute {name!r}{hint}"
        raise AttributeError(message, name=name, obj=sys.modules[__name__])  # for Python's "Did you mean: ...?"
    value = globals()[name] = getattr(found, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
