"""`EMA` keeps an exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from trainstack.backends.fast_paths import fast_lerp, fast_paths_enabled
from trainstack.errors import CheckpointMismatchError, ConfigurationError
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.core.order import mix
from trainstack.trainer.core.random_state import isolated_rng
from trainstack.trainer.core.shards import copy_values, kept_values, set_values
from trainstack.trainer.core.tensors import is_quantized_wrapper
from trainstack.trainer.events import Callback
from trainstack.trainer.module_checks import check_initialized

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def _has_average(parameter: Tensor) -> bool:
    return (parameter.is_floating_point() or parameter.is_complex()) and not is_quantized_wrapper(parameter)


class EMA(Callback):
    """Averages the parameters over global steps: `average += (1 - decay) * (parameter - average)`.

    `EMA(None, every="epoch", start_epoch=n)` is stochastic weight averaging (Izmailov et al.: Averaging Weights Leads
    to Wider Optima and Better Generalization, 2018): the mean of the weights at the end of each epoch.

    Evaluations use the averages. The trained weights do not change, so training gives the same bits with and without
    this callback. Buffers, such as running statistics, are not averaged. Steps that changed no weights do not count. A
    parameter that is added during training is averaged from the next epoch or evaluation. Checkpoints hold the averages
    in addition to the weights, in float32 for parameters with 16 bits.

    Args:
        decay: factor between 0 and 1; None for the mean of the weights at all updates.
        warmup: whether to use a lower decay at first, `(1 + n) / (10 + n)` at the n-th update, until it exceeds
            `decay`. Otherwise the initial weights dominate the average in a short run.
        start_step: number of global steps before averaging begins; until then the averages are the weights.
        start_epoch: number of epochs before averaging begins.
        every: steps that change weights between two updates of the average; "epoch" to update it after each epoch.
        evaluate: whether evaluations use the averages.
        use_at_end: whether to copy the averages into the module at the end of training, so that they are exported. A
            later call of `train()` continues from the trained weights.
        update_bn: function without arguments that recomputes the statistics of batch norms for the averages, such as
            `lambda: torch.optim.swa_utils.update_bn(loader, model)`. Each process calls it at the end of training,
            before the export.

    Attributes:
        decay: factor of the average.
        updates: number of updates of the average.

    Raises:
        ConfigurationError: an argument is invalid; or, when the run is prepared: a parameter has no shape yet, or
            `update_bn` would read records of a private run.

    Examples:
        >>> ts.Trainer(module, args, callbacks=[ts.callbacks.EMA(0.99)]).train()
    """

    decay: float | None
    updates: int
    copies_state = True
    priority = 10  # above 0, so that callbacks such as BestCheckpoint run later and may replace its final weights

    def __init__(
        self,
        decay: float | None = 0.999,
        *,
        warmup: bool = True,
        start_step: int = 0,
        start_epoch: int = 0,
        every: int | Literal["epoch"] = 1,
        evaluate: bool = True,
        use_at_end: bool = True,
        update_bn: Callable[[], object] | None = None,
    ) -> None:
        for name, number, least in (
            ("start_step", start_step, 0),
            ("start_epoch", start_epoch, 0),
            ("every", every, 1),
        ):
            if (type(number) is not int or number < least) and (name, number) != ("every", "epoch"):
                more = ", or 'epoch'" if name == "every" else ""
                raise ConfigurationError(f"EMA({name}={number!r}): write a whole number, {least} or more{more}.")
        if decay is not None and not 0 < decay < 1:
            raise ConfigurationError(f"decay={decay!r}: write a number between 0 and 1, such as 0.999, or None.")
        if update_bn is not None and not (callable(update_bn) and use_at_end):
            raise ConfigurationError(
                f"EMA(update_bn={update_bn!r}, use_at_end={use_at_end}): write a function without arguments, which is "
                "called when the module has the averages at the end, and use_at_end=True."
            )
        self.decay, self.updates = decay, 0
        self._warmup, self._evaluate, self._use_at_end = warmup, evaluate, use_at_end
        self._start_step, self._start_epoch, self._every = start_step, start_epoch, every
        self._update_bn = update_bn
        self._names: list[str] = []
        self._parameters: list[Tensor] = []
        self._averages: list[Tensor] = []
        self._unclaimed: dict[str, Tensor] = {}
        self._moved = 0
        self._fast_paths = True

    def on_ready(self, trainer: AbstractTrainer) -> None:
        """Initialize the averages with the current weights."""
        check_initialized(trainer.module.named_parameters(), "EMA")
        if self._update_bn is not None and trainer.trainer_backend.is_private:
            raise ConfigurationError("EMA(update_bn=...) reads records of a private run without noise. Remove it.")
        self._fast_paths = fast_paths_enabled(trainer.args.fast_paths)
        self.updates, self._unclaimed = 0, {}  # those of another trainer's run do not count
        self._names, self._parameters, self._averages = [], [], []
        self._refresh(trainer)

    def _refresh(self, trainer: AbstractTrainer) -> None:
        """Add averages of new parameters, with their current values, and drop those of removed parameters."""
        named = {n: p for n, p in trainer.module.named_parameters() if _has_average(p)}
        known = dict(zip(self._names, zip(self._parameters, self._averages, strict=True), strict=True))
        averages = []
        for name, parameter in named.items():
            before, average = known.get(name, (None, None))
            if before is not parameter or average is None:
                wide = _WIDE.get(parameter.dtype, parameter.dtype)
                average = parameter.detach().to(wide, copy=True)
                if name in self._unclaimed:
                    average.copy_(self._unclaimed.pop(name))
            averages.append(average)
        self._names, self._parameters, self._averages = list(named), list(named.values()), averages

    def on_train_epoch_begin(self, trainer: AbstractTrainer) -> None:
        """Add averages of parameters that were added to the module."""
        self._refresh(trainer)

    def on_train_begin(self, trainer: AbstractTrainer) -> None:
        self._moved = trainer.state.global_step - trainer.state.skipped_steps

    @torch.no_grad()
    def on_train_step_end(self, trainer: AbstractTrainer) -> None:
        """Update the averages, if the step changed the weights."""
        moved = trainer.state.global_step - trainer.state.skipped_steps
        if moved == self._moved:
            return
        self._moved = moved
        by_epoch = self._every == "epoch"
        if self._is_early(trainer) or (by_epoch and not self.updates):
            self._move(1.0)
        elif isinstance(self._every, int) and moved % self._every == 0:
            self._update()

    @torch.no_grad()
    def on_train_epoch_end(self, trainer: AbstractTrainer) -> None:
        """Update the averages, if `every` is "epoch"."""
        if self._every == "epoch" and not self._is_early(trainer):
            self._update()

    def _is_early(self, trainer: AbstractTrainer) -> bool:
        return trainer.state.global_step <= self._start_step or trainer.state.epoch < self._start_epoch

    def _update(self) -> None:
        self.updates += 1
        if self.decay is None:
            self._move(1.0, self.updates)
            return
        # The warm-up of TensorFlow's ExponentialMovingAverage.
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self._warmup else self.decay
        self._move(1 - decay)

    def _move(self, weight: float, count: int = 1) -> None:
        """Move the averages towards the parameters by `weight`; for a mean, by `1 / count`."""
        now = [p.detach().to(a.dtype) for p, a in zip(self._parameters, self._averages, strict=True)]
        if count == 1:
            fast_lerp(self._averages, now, weight, enabled=self._fast_paths)
            return
        for average, new in zip(self._averages, now, strict=True):
            average += (new - average) / count  # not lerp: gives the bits of torch's AveragedModel on the CPU

    def evaluation_context(self, trainer: AbstractTrainer) -> AbstractContextManager[None] | None:
        """Return a context manager with the averages in the module, unless training has ended with other weights."""
        if not self._evaluate or trainer.keeps_trained_weights:
            return None
        self._refresh(trainer)
        return self.averaged()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context manager in which the module's parameters are the averages. Do not train inside it."""
        trained = [kept_values(p) for p in self._parameters]
        try:
            for parameter, average in zip(self._parameters, self._averages, strict=True):
                set_values(parameter, average.to(parameter.dtype))
            yield
        finally:
            for parameter, data in zip(self._parameters, trained, strict=True):
                set_values(parameter, data)

    def on_train_end(self, trainer: AbstractTrainer, status: str) -> None:
        """Copy the averages into the module, unless the run will be resumed."""
        if self._use_at_end and status in ("finished", "stopped"):
            self._refresh(trainer)
            trainer.keep_trained_weights()
            for parameter, average in zip(self._parameters, self._averages, strict=True):
                parameter.data.copy_(average)
            if self._update_bn is not None:
                with isolated_rng(mix(trainer.args.seed), trainer.device):  # the same random numbers on all ranks
                    self._update_bn()

    def get_state(self) -> dict[str, Any]:
        """Return the averages by name and the number of updates; frozen parameters that equal their average by name."""
        averages, frozen = {}, []
        for name, p, average in zip(self._names, self._parameters, self._averages, strict=True):
            if not p.requires_grad and torch.equal(p.detach().to(average.dtype), average):
                frozen.append(name)
            else:
                averages[name] = average
        return {"updates": self.updates, "averages": averages} | ({"frozen": frozen} if frozen else {})

    def update_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `get_state`.

        Raises:
            CheckpointMismatchError: the module has other parameters.
        """
        values = dict(zip(self._names, self._parameters, strict=True))
        saved = dict(state["averages"]) | {n: values[n].detach() for n in state.get("frozen", ()) if n in values}
        own = dict(zip(self._names, self._averages, strict=True))
        if any(name not in saved or saved[name].shape != average.shape for name, average in own.items()):
            raise CheckpointMismatchError(
                "the moving averages in the checkpoint belong to other parameters than those of the module. Train the "
                "same module, or start with new averages: give EMA another state_key."
            )
        self.updates = int(state["updates"])
        for name, average in own.items():
            copy_values(average, saved.pop(name))
        self._unclaimed = {name: one.clone() for name, one in saved.items()}  # for parameters that a hook adds later
