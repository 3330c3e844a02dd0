"""Callbacks that record learning rates, gradient norms, memory and moving averages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainstack.errors import ConfigurationError
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.events import Callback
from trainstack.trainer.torch_settings import GIB, host_peak_gib
from trainstack.trainer.tracking.history import snapshot_value
from trainstack.trainer.tracking.provenance import Provenance


def record(
    trainer: AbstractTrainer, name: str, value: float | Tensor, provenance: Provenance = Provenance.PUBLIC
) -> None:
    """Record `value` at the last finished step of `trainer`; a tensor is read at the next log point."""
    state = trainer.state
    trainer.history.update_metric(name, value, step=state.global_step, epoch=state.epoch, provenance=provenance)


class LRMonitor(Callback):
    """Records the scheduled values that each global step used. The trainer records `lr` only at log points.

    The names are `schedule/lr/<group>`. The group is the value of its key "name", or its number. With several
    optimizers, the number of the optimizer precedes the group.

    Args:
        every: interval in global steps.
        momentum: whether to record `schedule/momentum/<group>` too; for Adam this is the first beta.
        weight_decay: whether to record `schedule/weight_decay/<group>` too.

    Raises:
        ConfigurationError: `every` is not a whole number above 0.

    Examples:
        >>> trainer = ts.Trainer(module, args, callbacks=[ts.callbacks.LRMonitor()])
        >>> trainer.train()
        >>> rates = trainer.history.get_metric_values("schedule/lr/0")
    """

    def __init__(self, every: int = 1, *, momentum: bool = False, weight_decay: bool = False) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ConfigurationError(f"every={every!r}: write a whole number, 1 or more.")
        self._every, self._momentum, self._weight_decay = every, momentum, weight_decay
        self._used: dict[str, float | Tensor] | None = None

    def on_before_optimizer_step(self, trainer: AbstractTrainer) -> None:
        if (trainer.state.global_step + 1) % self._every == 0:
            self._used = self._values(trainer)

    def on_train_step_end(self, trainer: AbstractTrainer, step: int) -> None:
        if step % self._every:
            return
        used, self._used = self._used, None
        # A skipped step has used no values: record the current ones.
        for name, value in (self._values(trainer) if used is None else used).items():
            record(trainer, name, value)

    def _values(self, trainer: AbstractTrainer) -> dict[str, float | Tensor]:
        values, optimizers = {}, trainer.optimizers
        for number, optimizer in enumerate(optimizers):
            for position, group in enumerate(optimizer.param_groups):
                name = f"{number}/" * (len(optimizers) > 1) + str(group.get("name", position))
                for what, value in self._changing(group).items():
                    values[f"schedule/{what}/{name}"] = snapshot_value(value)
        return values

    def _changing(self, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
        found = {"lr": group["lr"]} if "lr" in group else {}
        if self._momentum and ("momentum" in group or "betas" in group):
            found["momentum"] = group["momentum"] if "momentum" in group else group["betas"][0]
        if self._weight_decay and "weight_decay" in group:
            found["weight_decay"] = group["weight_decay"]
        return found


class GradNormMonitor(Callback):
    """Records the gradient norms of submodules at log points, as `grad_norm/<name>`, after clipping.

    They are L2 norms. The trainer records the norm over all parameters before clipping as `train/grad_norm`. If a step
    makes several updates, both are the norms over the gradients of all its updates. A gradient counts only in an update
    whose optimizers hold its parameter.

    Args:
        depth: number of parts of a parameter's name that identify its submodule: 1 for "encoder", 2 for
            "encoder.layer".

    Raises:
        ConfigurationError: the depth is invalid; or, when the run is prepared: the backend is private.

    Examples:
        >>> trainer = ts.Trainer(
        ...     module,
        ...     replace(args, log_every=1),
        ...     callbacks=[ts.callbacks.GradNormMonitor()],
        ... )
        >>> trainer.train()
        >>> norms = trainer.history.get_metric_values("grad_norm/model")
    """

    def __init__(self, depth: int = 1) -> None:
        if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
            raise ConfigurationError(f"depth={depth!r}: write a whole number, 1 or more.")
        self._depth = depth
        self._norms: dict[str, Tensor] = {}

    def on_ready(self, trainer: AbstractTrainer) -> None:
        """Check that the run is not private, because gradients without noise must not leave it."""
        if trainer.trainer_backend.is_private:
            raise ConfigurationError("GradNormMonitor would reveal gradients of a private run. Remove it.")

    def on_train_begin(self, trainer: AbstractTrainer) -> None:
        """Discard the norms of a step that failed before `on_log`."""
        self._norms = {}

    def on_before_optimizer_step(self, trainer: AbstractTrainer, optimizers: Sequence[Optimizer]) -> None:
        """Add the norms of this update, if the next step is a log point. The device is not read."""
        if trainer.next_log_step > trainer.state.global_step + 1:
            return
        # The loss of one network may also leave gradients in another, whose optimizer does not use them.
        unused = _held_by(one for one in trainer.optimizers if one not in optimizers) - _held_by(optimizers)
        groups: dict[str, list[Tensor]] = {}
        for name, parameter in trainer.module.named_parameters():
            if parameter.grad is not None and id(parameter) not in unused:
                key = ".".join(name.split(".")[:-1][: self._depth]) or name
                groups.setdefault(key, []).append(parameter.grad)
        for key, gradients in groups.items():
            norm = torch.nn.utils.get_total_norm(gradients)
            self._norms[key] = torch.hypot(self._norms[key], norm) if key in self._norms else norm

    def on_log(self, trainer: AbstractTrainer) -> None:
        for name, norm in self._norms.items():
            record(trainer, f"grad_norm/{name}", norm, Provenance.PRIVATE)
        self._norms = {}


def _held_by(optimizers: Iterable[Optimizer]) -> set[int]:
    return {id(parameter) for one in optimizers for group in one.param_groups for parameter in group["params"]}


class MemoryMonitor(Callback):
    """Records memory in GiB at log points.

    `memory/host_peak` is the peak resident memory of this process (not on Windows). On CUDA it also records
    `memory/allocated`, `memory/reserved` and `memory/peak`, the peak since the last log point. Only the memory of the
    main process is recorded.
    """

    def on_log(self, trainer: AbstractTrainer) -> None:
        """Record the memory; reading these counters does not synchronize with the device."""
        peak = host_peak_gib()
        if peak is not None:
            record(trainer, "memory/host_peak", peak, Provenance.MACHINE)
        device = trainer.device
        if device.type == "cuda":
            record(trainer, "memory/allocated", torch.cuda.memory_allocated(device) / GIB, Provenance.MACHINE)
            record(trainer, "memory/reserved", torch.cuda.memory_reserved(device) / GIB, Provenance.MACHINE)
            record(trainer, "memory/peak", torch.cuda.max_memory_allocated(device) / GIB, Provenance.MACHINE)
            torch.cuda.reset_peak_memory_stats(device)


class MovingAverage(Callback):
    """Records exponential moving averages of metrics over the whole run, as `<name>_ema`.

    Each value moves the average by `1 - decay` of the difference. The average has bias correction, as in Adam (Kingma,
    Ba: Adam, 2015): it is the mean of all values with weights 1 for the newest, `decay` for the previous one, and so
    on. It is recorded at log points, and after epochs for metrics that are measured there. Inf and nan do not count.

    Args:
        *names: names of metrics; "train/loss" if none is given. A name that is never recorded is ignored.
        decay: factor, at least 0 and below 1.

    Raises:
        ConfigurationError: an argument is invalid.

    Examples:
        >>> average = ts.callbacks.MovingAverage("val/loss", decay=0.5)
        >>> trainer = ts.Trainer(module, args, callbacks=[average])
        >>> trainer.train()
        >>> loss = trainer.history.get_latest_metric("val/loss_ema")
    """

    expects_all_events = False

    def __init__(self, *names: str, decay: float = 0.9) -> None:
        if not all(isinstance(name, str) and name for name in names):
            raise ConfigurationError(f"MovingAverage{names!r}: write names of metrics, such as 'train/loss'.")
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise ConfigurationError(f"decay={decay!r}: write a number of at least 0 and below 1, such as 0.9.")
        self._decay = float(decay)
        self._averaged = names or ("train/loss",)
        self.on_ready()

    def on_ready(self) -> None:
        """Begin with no values."""
        self._sums: dict[str, list[float]] = {name: [0.0, 0.0] for name in self._averaged}
        self._seen = dict.fromkeys(self._sums, 0)

    def on_log(self, trainer: AbstractTrainer) -> None:
        """Add the new values."""
        known = trainer.history.get_metric_names()
        for name, sums in self._sums.items():
            new = trainer.history.records(name, self._seen[name]) if name in known else []
            self._seen[name] += len(new)
            finite = [one.value for one in new if math.isfinite(one.value)]
            for value in finite:
                sums[0] = self._decay * sums[0] + value
                sums[1] = self._decay * sums[1] + 1.0
            if finite:
                record(trainer, f"{name}_ema", sums[0] / sums[1], trainer.history.provenance_of(name))

    def on_epoch_end(self, trainer: AbstractTrainer) -> None:
        """Add the values of validations and epochs."""
        self.on_log(trainer)

    def get_state(self) -> dict[str, Any]:
        """Return the weighted sums and the numbers of values in them."""
        return {"sums": {name: list(sums) for name, sums in self._sums.items()}, "seen": dict(self._seen)}

    def update_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `get_state` for the metrics that are averaged here."""
        for name in self._sums:
            if name in state["sums"]:
                self._sums[name], self._seen[name] = list(state["sums"][name]), int(state["seen"][name])
