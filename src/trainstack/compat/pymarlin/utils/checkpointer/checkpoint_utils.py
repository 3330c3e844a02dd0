"""`DefaultCheckpointer` and its arguments with PyMarlin's order and defaults."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import trainstack as ts
from trainstack.checkpointing import AbstractCheckpointer, Checkpoint, list_checkpoints
from trainstack.compat.pymarlin.utils.mutable import Mutable
from trainstack.errors import CheckpointNotFoundError

_log = logging.getLogger("trainstack")


class DefaultCheckpointerArguments(Mutable, ts.DefaultCheckpointerArguments):
    """`trainstack.DefaultCheckpointerArguments` by position as in PyMarlin.

    All checkpoints are kept, in the folder `checkpoints` of the current folder unless `save_dir` says otherwise.

    Args:
        **more: other arguments of trainstack's class.
    """

    def __init__(
        self,
        checkpoint: bool = True,
        delete_existing_checkpoints: bool = False,
        period: int = 1,
        save_dir: str | None = None,
        model_state_save_dir: str | None = None,
        load_dir: str | None = None,
        load_filename: str | None = None,
        file_prefix: str = "model",
        file_ext: str = "pt",
        log_level: str = "INFO",
        **more: Any,
    ) -> None:
        default = os.path.join(os.getcwd(), "checkpoints")
        super().__init__(
            checkpoint=checkpoint,
            delete_existing_checkpoints=delete_existing_checkpoints,
            period=period,
            save_dir=save_dir or default,
            model_state_save_dir=model_state_save_dir or default,
            load_dir=load_dir,
            load_filename=load_filename,
            file_prefix=file_prefix,
            file_ext=file_ext,
            log_level=log_level,
            **{"keep_last": None, **more},
        )


class DefaultCheckpointer(ts.DefaultCheckpointer):
    """`trainstack.DefaultCheckpointer` with PyMarlin's `get_latest_file`.

    If `load_dir` has no checkpoint, a new run starts, as in PyMarlin, with a warning in the log.
    """

    def load(self, resume: bool | str | os.PathLike[str] | None = None) -> Checkpoint:
        try:
            return super().load(resume)
        except CheckpointNotFoundError as error:
            if resume or self.args.load_filename or not self.args.load_dir:
                raise
            _log.warning(f"{error} A new run starts.")
            return Checkpoint()

    @staticmethod
    def get_latest_file(load_dir: str, file_prefix: str, file_ext: str = "pt", logger: Any = None) -> str:
        """The newest checkpoint in `load_dir` with this prefix and ending; "" if there is none.

        It is a folder, which `trainstack.read_checkpoint` reads.

        Deprecated: `last()` of a checkpointer gives it with its step and metrics.
        """
        warnings.warn(
            "get_latest_file is deprecated: write checkpointer.last(). It is a folder: read_checkpoint(path) reads it.",
            DeprecationWarning,
            stacklevel=2,
        )
        found = [
            one.path
            for one in (list_checkpoints(load_dir) if os.path.isdir(load_dir) else ())
            if one.kind == "checkpoint" and one.path.name.startswith(file_prefix) and one.path.name.endswith(file_ext)
        ]
        if not found and logger is not None:
            logger.info(f"no checkpoint in {load_dir}")
        return str(found[-1]) if found else ""


__all__ = ["AbstractCheckpointer", "Checkpoint", "DefaultCheckpointer", "DefaultCheckpointerArguments"]
