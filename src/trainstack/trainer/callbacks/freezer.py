"""`Freezer` freezes parameters for a part of the training."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from trainstack.errors import ConfigurationError
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.events import Callback
from trainstack.trainer.module_checks import check_initialized


class Freezer(Callback):
    """Leaves parameters as they are, for good or until an epoch begins. Give several for several groups.

    They need no gradients meanwhile, which saves time and memory, and optimizers pass over them: no weight decay, no
    momentum.

    Args:
        names: of parameters or submodules, as `named_parameters()` tells them ("net.0", "encoder.layer.1.weight"), or
            patterns of these ("encoder.layer.[0-5]").
        until_epoch: the epoch, counted from 0, that trains them; None for never.
        running_statistics: whether batch norms in there leave their running statistics alone as well (they are put
            into evaluation mode).

    Raises:
        ConfigurationError: nothing is named; when the module is made ready: a name fits nothing, or the backend is
            private, or a parameter has no shape yet.
    """

    def __init__(self, *names: str, until_epoch: int | None = None, running_statistics: bool = True) -> None:
        if not names or not all(isinstance(name, str) for name in names):
            raise ConfigurationError(f"Freezer{names!r}: name parameters or submodules, Freezer('encoder').")
        self._names, self._until, self._norms_too = names, until_epoch, running_statistics
        self._parameters: list[nn.Parameter] = []
        self._norms: list[nn.Module] = []
        self._frozen = False

    def on_ready(self, trainer: AbstractTrainer) -> None:
        """Find the parameters."""
        if trainer.trainer_backend.is_private:
            raise ConfigurationError(
                "Freezer cannot change what a private run trains. Freeze for good in the module instead: "
                "requires_grad_(False) before it is given to the trainer."
            )
        named = {name: p for name, p in trainer.module.named_parameters() if p.requires_grad}
        for pattern in self._names:
            if not any(_fits(name, pattern) for name in named):
                known = ", ".join(list(named)[:8])
                raise ConfigurationError(
                    f"Freezer({pattern!r}): no trainable parameter is called so. There are {known}"
                )
        chosen = {name: p for name, p in named.items() if any(_fits(name, n) for n in self._names)}
        check_initialized(chosen.items(), "Freezer")
        self._parameters = list(chosen.values())
        if self._norms_too:
            norms = {name: m for name, m in trainer.module.named_modules() if hasattr(m, "track_running_stats")}
            self._norms = [m for name, m in norms.items() if any(_fits(name, n) for n in self._names)]

    def on_train_epoch_begin(self, trainer: AbstractTrainer, epoch: int) -> None:
        """Freeze or thaw."""
        freeze = self._until is None or epoch < self._until
        if freeze:
            for norm in self._norms:
                norm.eval()
        if freeze == self._frozen:
            return
        self._frozen = freeze
        for norm in self._norms:
            norm.train(not freeze)
        if freeze:
            trainer.freeze(self._parameters)
        else:
            trainer.unfreeze(self._parameters)

    def get_state(self) -> dict[str, Any]:
        """Whether the parameters are frozen."""
        return {"frozen": self._frozen}

    def update_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `get_state` returned; the checkpoint has the parameters' own flags."""
        self._frozen = state.get("frozen", False)


def _fits(name: str, pattern: str) -> bool:
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:count]), pattern) for count in range(1, len(parts) + 1))
