"""Checkpointers."""

from trainstack.compat.pymarlin.utils.checkpointer.checkpoint_utils import (
    AbstractCheckpointer,
    DefaultCheckpointer,
    DefaultCheckpointerArguments,
)

__all__ = ["AbstractCheckpointer", "DefaultCheckpointer", "DefaultCheckpointerArguments"]
