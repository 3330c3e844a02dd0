"""`Borrowed`, the micro-batch of a rank that has no samples for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Borrowed:
    """A micro-batch that a rank runs with weight 0, so that all ranks run the same passes.

    If a rank has fewer micro-batches in a step than others, it borrows samples that another rank trains on. Its forward
    and backward pass join the collectives of the others, and add nothing to gradients, logs and outputs.

    Args:
        batch: a collated batch.
        begin: called directly before the module gets the batch, after a layer has broadcast buffers.
    """

    batch: Any
    begin: Callable[[], None]
    __slots__ = ("batch", "begin")

    def __init__(self, batch: Any, begin: Callable[[], None] = lambda: None) -> None:
        self.batch, self.begin = batch, begin

    def open(self) -> Any:
        """The batch, immediately before the module is called with it."""
        self.begin()
        return self.batch
