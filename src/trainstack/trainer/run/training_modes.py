"""`TrainingModes` keeps the modes in which the parts of a module train."""

from __future__ import annotations

from types import MappingProxyType

from torch import nn

from trainstack.errors import ConfigurationError
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.modes import (
    Decision,
    Modes,
    begin_modes,
    decide_modes,
    describe_modes,
    get_modes,
    set_modes,
)
from trainstack.trainer.module_interface import ModuleInterface


class TrainingModes:
    """The modes in which the parts of `module` train, before hooks change them for an epoch."""

    def __init__(self, module: ModuleInterface, private: bool) -> None:
        self._module, self._private = module, private
        self._modes: Modes = MappingProxyType({})
        self._kept: tuple[nn.Module, ...] = ()

    def decide(self) -> Decision:
        """Decide in which modes the parts of the module train.

        Raises:
            ConfigurationError: `keep_modes` is not a bool, or it is True and the run is private.
        """
        module = self._module
        if not isinstance(module.keep_modes, bool):
            raise ConfigurationError(
                f"{type(module).__name__}.keep_modes is {module.keep_modes!r}. Write True to keep all modes, or False."
            )
        if self._private:
            if module.keep_modes:
                raise ConfigurationError(
                    f"{type(module).__name__}.keep_modes is True and the run is private. Its guarantee was checked "
                    "in training mode, so all parts train in it. Write keep_modes = False."
                )
            return Decision(dict.fromkeys(module.modules(), True), (), ())
        return Decision(get_modes(module), (), ()) if module.keep_modes else decide_modes(module, self._kept)

    def begin(self, log: RunLogger) -> None:
        """Set the modes in which the parts train, at the beginning of `train()`."""
        decision = self.decide()
        self._modes, self._kept = begin_modes(self._module, decision.modes), decision.kept
        if decision.kept or decision.changed:
            log.info(describe_modes(self._module, decision))

    def restore(self, changes: Modes = MappingProxyType({})) -> None:
        """Set the modes in which the parts train, except for the modes in `changes`."""
        set_modes(self._module, {**self._modes, **changes})

    def changes(self) -> Modes:
        """The current modes of the parts whose mode differs from that in which they train."""
        return {p: mode for p, mode in get_modes(self._module).items() if self._modes.get(p, mode) is not mode}

    def undo(self, changes: Modes) -> None:
        """Undo those `changes` of hooks for an epoch that are still set. The next `train()` does not use them."""
        set_modes(self._module, {p: self._modes.get(p, mode) for p, mode in changes.items() if p.training is mode})
