"""`ModuleInterface`, `CallbackInterface` and `Stage` are trainstack's, whose names are PyMarlin's.

`compat.pymarlin.Trainer` calls the hooks in PyMarlin's order and with PyMarlin's values.
"""

from trainstack.stage import Stage
from trainstack.trainer.module_interface import CallbackInterface, ModuleInterface

__all__ = ["CallbackInterface", "ModuleInterface", "Stage"]
