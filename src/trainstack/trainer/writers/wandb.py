"""Records as points of a Weights & Biases run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainstack.trainer.history import Record
from trainstack.trainer.writers.base import RunInfo
from trainstack.trainer.writers.tracker import Tracker, by_step


class WandbWriter(Tracker):
    """Logs to Weights & Biases, over `global_step`; arguments and plan are the run's config.

    Args:
        options: of `wandb.init`, such as `project`, `entity`, `name`, `tags`, `mode="offline"`. What is left out
            comes from wandb's environment variables, such as WANDB_PROJECT and WANDB_MODE.
    """

    package = extra = "wandb"

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options
        self._run: Any = None

    def start(self, run: RunInfo, known: str | None) -> str:
        """Call `wandb.init`."""
        import wandb  # type: ignore[import-not-found, unused-ignore]

        own: dict[str, Any] = {"config": dict(run.config), "dir": str(run.log_dir), "reinit": "create_new"}
        if known is not None:
            own |= {"id": known, "resume": "allow", "allow_val_change": True}
        run.log_dir.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(**(own | self._options))
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step")
        return str(self._run.id)

    def write(self, records: Sequence[Record]) -> None:
        """Log one point a step."""
        for step, epoch, values in by_step(records):
            self._run.log({"global_step": step, "epoch": epoch, **values})

    def close(self) -> None:
        """Finish the run."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()
