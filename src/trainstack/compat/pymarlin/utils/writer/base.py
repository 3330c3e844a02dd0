"""`WriterInitArguments` and `Writer`, PyMarlin's interface of writers."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import trainstack as ts
from trainstack.compat.pymarlin.utils.mutable import Mutable
from trainstack.trainer.argument_checks import WriterArguments

_log = logging.getLogger("trainstack")


class WriterInitArguments(Mutable, WriterArguments):
    """The folder of TensorBoard's files. Other logs and the report are in the folder of the run.

    Args:
        tb_log_dir: relative to the current folder, or to `tb_logpath_parent_env`. A run after the first one writes to a
            folder in there, such as `run-1`; PyMarlin deletes the files of the first.
        tb_logpath_parent_env: the environment variable that names the folder above.
        tb_log_multi: of TensorBoard's `add_scalars`; values of `update_multi` are recorded as separate scalars.
        tb_log_hist_steps: of histograms, which the history does not record.
        model_log_level: of `log_model`, which the history does not record.
    """

    def __init__(
        self,
        tb_log_dir: str | None = "logs",
        tb_logpath_parent_env: str | None = None,
        tb_log_multi: bool = False,
        tb_log_hist_steps: int = 20000,
        model_log_level: str = "INFO",
    ) -> None:
        parent = os.environ.get(tb_logpath_parent_env, "") if tb_logpath_parent_env else ""
        super().__init__(tb_log_dir=os.path.join(parent, tb_log_dir or "logs"))
        unused = {
            "tb_log_multi": tb_log_multi is not False,
            "tb_log_hist_steps": tb_log_hist_steps != 20000,
            "model_log_level": model_log_level != "INFO",
        }
        if any(unused.values()):
            names = ", ".join(name for name, is_set in unused.items() if is_set)
            _log.info(f"WriterInitArguments: {names} has no effect, for writers get scalars only.")

    @property
    def log_dir(self) -> str | None:
        return None


class Writer(ts.Writer):
    """Base class of a writer with PyMarlin's methods, among which `log_scalar` is called."""

    def __init__(self, logger: Any = None) -> None:
        self.logger = _log if logger is None else logger

    def log_scalar(self, k: str, v: float, step: int) -> None:
        """Write the value `v` of `k` at a global step. Does nothing by default."""

    def flush(self) -> None:
        """Called after each group of values. Does nothing by default."""

    def finish(self) -> None:
        """Called at the end of the run. Does nothing by default."""

    def write(self, records: Sequence[ts.Record]) -> None:
        for record in records:
            self.log_scalar(record.name, record.value, record.step)
        self.flush()

    def close(self) -> None:
        self.finish()
