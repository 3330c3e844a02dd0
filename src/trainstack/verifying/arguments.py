"""The arguments of a training that is repeated in another folder for a test."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainstack.trainer import TrainerArguments


def arguments_in(folder: Path, args: TrainerArguments, saving: Mapping[str, Any], **changes: Any) -> TrainerArguments:
    """The arguments of the same training in `folder`: with the same steps, and without effects outside of it.

    It signs and scrubs nothing, so it needs no key. It does not refuse another environment, which the caller compares.

    Args:
        folder: the output folder.
        args: of the training.
        saving: changes of its checkpointer's arguments.
        **changes: of its other arguments.
    """
    checkpointer = {
        "save_dir": None,
        "model_state_save_dir": None,
        "load_dir": None,
        "load_filename": None,
        "delete_existing_checkpoints": False,
        "sign_key": None,
        "scrub_every_s": None,
    }
    fixed = {
        "output_dir": str(folder),
        "local_dir": None,
        "overwrite": False,
        "resume_mode": "full",
        "strict_resume": False,
        "reset_optimizers_schedulers": False,
        "writer_args": None,
        "progress": "none",
    }
    made = dataclasses.replace(args.checkpointer_args, **{**checkpointer, **saving})
    return dataclasses.replace(args, **{**fixed, **changes, "checkpointer_args": made})
