"""The methods of a trainer that print, and that pass values and files to the writers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from trainstack.errors import ConfigurationError
from trainstack.trainer.mixins.base import TrainerBase
from trainstack.trainer.tracking.provenance import Provenance

if TYPE_CHECKING:
    from trainstack.trainer.reporting.reporter import Reporter


class OutputMixin(TrainerBase):
    """Output on one process, and to the writers."""

    def print(
        self,
        *values: Any,
        once: Literal["world", "node"] = "world",
        sep: str = " ",
        end: str = "\n",
        file: TextIO | None = None,
        flush: bool = True,
    ) -> None:
        """Call `print` on one process.

        Args:
            *values: values to print.
            once: `"world"` for the main process, `"node"` for the first process of each machine.
            sep: as for `print`.
            end: as for `print`.
            file: as for `print`; None for the current `sys.stdout`.
            flush: as for `print`.
        """
        if self.is_main_process if once == "world" else self.world.local_rank == 0:
            print(*values, sep=sep, end=end, file=sys.stdout if file is None else file, flush=flush)

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        """Pass a file or folder to the trackers among the writers for upload, on the main process.

        A private run uploads any file: you are responsible for its content being public.

        Args:
            path: file or folder; do not change it before training has ended, because the upload may be later.
            name: name in the tracker; None for the name of the file.

        Raises:
            ConfigurationError: there is no such file, or no training is running.
        """
        path = Path(path).absolute()
        reporter = self._writing("log_artifact")
        if self.is_main_process and not path.exists():
            raise ConfigurationError(f"log_artifact: there is no file or folder {path}. Write it first.")
        reporter.log_artifact(path, name or path.name)

    def _log_media(self, kind: str, name: str, make: Callable[[], Any], provenance: Provenance | None) -> None:
        self._writing(kind)
        self._context.sink.record_media(kind, name, make, provenance)

    def _writing(self, method: str) -> Reporter:
        """Return the reporter, whose writers are open, for `method`."""
        if self._reporter is None:
            raise ConfigurationError(
                f"trainer.{method} was called while no training is running, so no writer is open. Call it in a hook "
                "or a subscriber of an event, such as on_end_val_epoch or on_train_end."
            )
        return self._reporter
