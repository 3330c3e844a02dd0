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
    """Freezes parameters permanently or until an epoch. Use one `Freezer` for each group with its own epoch.

    Frozen parameters need no gradients, which saves time and memory. Optimizers skip them: no weight decay and no
    momentum.

    Args:
        *names: names of parameters or submodules as in `named_parameters()` ("net.0", "encoder.layer.1.weight"), or
            patterns ("encoder.layer.[0-5]").
        until_epoch: first epoch, counted from 0, that trains the parameters; None for never.
        running_statistics: whether batch norms among them keep their running statistics too: they are put into
            evaluation mode.

    Raises:
        ConfigurationError: no name is given; or, when the run is prepared: a name matches no parameter, the backend is
            private, or a parameter has no shape yet.

    Examples:
        >>> model = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> module = ts.SupervisedModule(model, nn.MSELoss(), "sgd", data)
        >>> freezer = ts.callbacks.Freezer("model.0", until_epoch=1)
        >>> ts.Trainer(module, args, callbacks=[freezer]).train()
    """

    def __init__(self, *names: str, until_epoch: int | None = None, running_statistics: bool = True) -> None:
        if not names or not all(isinstance(name, str) for name in names):
            raise ConfigurationError(f"Freezer{names!r}: write names of parameters or submodules, Freezer('encoder').")
        self._names, self._until, self._norms_too = names, until_epoch, running_statistics
        self._parameters: list[nn.Parameter] = []
        self._norms: list[nn.Module] = []
        self._frozen = False

    def on_ready(self, trainer: AbstractTrainer) -> None:
        """Find the parameters and check the names."""
        if trainer.trainer_backend.is_private:
            raise ConfigurationError(
                "Freezer cannot change the trainable parameters of a private run. Freeze them in the module instead: "
                "call requires_grad_(False) before the trainer gets the module."
            )
        named = {name: p for name, p in trainer.module.named_parameters() if p.requires_grad}
        for pattern in self._names:
            if not any(_fits(name, pattern) for name in named):
                known = ", ".join(list(named)[:8])  # 8: a line or two of the message
                raise ConfigurationError(
                    f"Freezer({pattern!r}): no trainable parameter has such a name. There are {known}"
                )
        chosen = {name: p for name, p in named.items() if any(_fits(name, n) for n in self._names)}
        check_initialized(chosen.items(), "Freezer")
        self._parameters, self._frozen = list(chosen.values()), False
        if self._norms_too:
            norms = {name: m for name, m in trainer.module.named_modules() if hasattr(m, "track_running_stats")}
            self._norms = [m for name, m in norms.items() if any(_fits(name, n) for n in self._names)]

    def on_train_epoch_begin(self, trainer: AbstractTrainer, epoch: int) -> None:
        """Freeze or unfreeze the parameters, if it is due."""
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
        """Return whether the parameters are frozen."""
        return {"frozen": self._frozen}

    def update_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `get_state`; the checkpoint holds `requires_grad` of the parameters separately."""
        self._frozen = state.get("frozen", False)


def _fits(name: str, pattern: str) -> bool:
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:count]), pattern) for count in range(1, len(parts) + 1))
