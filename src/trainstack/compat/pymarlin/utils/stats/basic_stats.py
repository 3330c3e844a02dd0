"""`BasicStats` passes metrics on to the module of the newest trainer."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

from trainstack.compat.pymarlin.utils.mutable import Mutable
from trainstack.trainer.argument_checks import StatsArguments
from trainstack.trainer.trainer import Trainer

_log = logging.getLogger("trainstack")
_EXCLUDED = r"bias|LayerNorm|layer\.[3-9]|layer\.1(?!1)|layer\.2(?!3)"


class StatInitArguments(Mutable, StatsArguments):
    """`trainstack.StatsArguments` by position as in PyMarlin.

    Args:
        log_steps: global steps between two log points.
        update_system_stats: add `callbacks.MemoryMonitor`, which records memory at log points.
        log_model_steps: of `log_model`, which the history does not record.
        exclude_list: the same.
    """

    def __init__(
        self,
        log_steps: int = 1,
        update_system_stats: bool = False,
        log_model_steps: int = 1000,
        exclude_list: str = _EXCLUDED,
    ) -> None:
        super().__init__(log_steps=log_steps)
        own = {"update_system_stats": update_system_stats, "log_model_steps": log_model_steps}
        for name, value in {**own, "exclude_list": exclude_list}.items():
            object.__setattr__(self, name, value)
        if log_model_steps != 1000 or exclude_list != _EXCLUDED:
            _log.info(
                "StatInitArguments: log_model_steps and exclude_list have no effect. callbacks.GradNormMonitor() "
                "records the gradient norms of the layers."
            )


class BasicStats:
    """Records metrics in the same way as `self.log` of the module that the newest trainer trains.

    Each value is recorded at the current global step, whether `frequent` or not. A name that the trainer uses itself,
    such as "lr" or "train/loss", gets the prefix "stats/". Without a trainer nothing is recorded, with one warning in
    the log.

    Args:
        args: as in PyMarlin. Not used: the trainer has them.
        writers: the same.
    """

    def __init__(self, args: StatInitArguments | None = None, writers: Any = None) -> None:
        self._trainer: weakref.ref[Trainer] | None = None
        self._said: set[str] = set()

    def follow(self, trainer: Trainer) -> None:
        """Record in the run of `trainer` from now on."""
        self._trainer = weakref.ref(trainer)

    def update(self, k: str, v: Any, frequent: bool = False) -> None:
        """Record the number `v` under the name `k`."""
        trainer = None if self._trainer is None else self._trainer()
        sink = None if trainer is None else trainer.module._log_sink
        if trainer is None or sink is None:
            self._say("nowhere", f"global_stats.update({k!r}, ...): no Trainer runs yet, so it is not recorded.")
            return
        if sink.is_taken(k):
            self._say(k, f"global_stats: the trainer records {k!r} itself; this value is recorded as 'stats/{k}'.")
            k = f"stats/{k}"
        trainer.module.log(k, v)

    def update_multi(self, k: str, v: Mapping[str, Any], frequent: bool = False) -> None:
        """Record each number of `v` under `k`, a slash and its key."""
        for name, value in v.items():
            self.update(f"{k}/{name}", value, frequent)

    def update_matplotlib_figure(self, fig: Any, tag: str) -> None:
        """Not recorded; the log says so once."""
        self._leave_out("update_matplotlib_figure")

    def update_image(self, k: str, v: Any, dataformats: str = "HW") -> None:
        """Not recorded; the log says so once."""
        self._leave_out("update_image")

    def update_pr(self, k: str, preds: Any, labels: Any) -> None:
        """Not recorded; the log says so once."""
        self._leave_out("update_pr")

    def update_histogram(self, k: str, vals: Any, extend: bool = False) -> None:
        """Not recorded; the log says so once."""
        self._leave_out("update_histogram")

    def update_embedding(self, k: str, embs: Any, labels: Any) -> None:
        """Not recorded; the log says so once."""
        self._leave_out("update_embedding")

    def log_args(self, args: Any) -> None:
        """Not needed: the arguments of the run are written to the folder of its logs. Logged once."""
        self._leave_out("log_args")

    def log_model(self, step: int, model: Any, force: bool = False, grad_scale: float = 1) -> None:
        """Not recorded; the log says so once."""
        self._leave_out("log_model")

    def log_graph(self, model: Any, device: Any) -> None:
        """Not recorded; the log says so once."""
        self._leave_out("log_graph")

    def log_stats(self, step: int, force: bool = False) -> None:
        """Nothing to do: the trainer writes at log points."""

    def log_long_stats(self, step: int) -> None:
        """Nothing to do: the trainer writes after each epoch."""

    def _leave_out(self, method: str) -> None:
        self._say(
            method,
            f"global_stats.{method}: the history records numbers only, so this is not recorded. Write it to a "
            "SummaryWriter of your own, where trainer.is_main_process.",
        )

    def _say(self, key: str, message: str) -> None:
        if key not in self._said:
            self._said.add(key)
            _log.warning(message)


global_stats = BasicStats()
