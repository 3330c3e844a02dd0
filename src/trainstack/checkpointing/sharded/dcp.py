"""Export of weights in the format of `torch.distributed.checkpoint`. This library writes that format and never reads
it.

Its metadata is a pickle, and it has no hashes.
"""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from trainstack.checkpointing import filesystem
from trainstack.errors import CheckpointError


def write_distributed(weights: Mapping[str, torch.Tensor], path: str | os.PathLike[str]) -> Path:
    """Write `weights` as the folder `path`, for `torch.distributed.checkpoint.load`. Returns its path.

    The names are those of the state dict, without an outer key.

    Raises:
        CheckpointError: `path` exists, or the file system refused.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter  # here, because it takes half a second
    from torch.distributed.checkpoint.state_dict_saver import save

    target = Path(path).absolute()
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists, and is not replaced. Use another path.")
    temporary = target.with_name(f".tmp-{target.name}-{uuid.uuid4().hex}")
    try:
        filesystem.make_directories(target.parent)
        writer = FileSystemWriter(temporary, sync_files=True)
        with warnings.catch_warnings():  # torch 2.13.0 warns that `no_dist` saves in a single process, as intended
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            save(dict(weights), storage_writer=writer, no_dist=True)
        filesystem.sync_directory(temporary)
        filesystem.rename(temporary, target)
        filesystem.sync_directory(target.parent)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error}. Free space, or use another path.") from error
    finally:
        with suppress(OSError):
            filesystem.remove_tree(temporary)
    return target
