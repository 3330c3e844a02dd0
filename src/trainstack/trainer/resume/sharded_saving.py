"""Save a checkpoint of which each rank writes its own rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from trainstack.checkpointing import Checkpoint, DefaultCheckpointer
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.shards import has_shards

Result = TypeVar("Result")


class SavingRanks:
    """The communication of the ranks while they save. See `sharded.commit.Ranks`.

    Args:
        context: the context of the run.
        on_main: calls a function on the main process while the others wait in the store.
    """

    def __init__(self, context: RunContext, on_main: Callable[[Callable[[], Any], str], Any]) -> None:
        self._comm, self._on_main = context.world.comm, on_main
        self.rank, self.size = context.world.rank, context.world.size
        self.longest_s = context.args.rank_zero_timeout_s
        self._said: dict[str, str] = {}  # for a single process, which has no store

    def on_main(self, function: Callable[[], Result], what: str) -> Result:
        """The result of `function` on rank 0."""
        result: Result = self._on_main(function, what)
        return result

    def raise_if_any(self, error: BaseException | None, what: str) -> None:
        """Raise on all ranks if one of them has failed."""
        self._comm.raise_if_any(error, what)

    def put(self, name: str, text: str) -> None:
        """Write `text` to the store."""
        self._said[name] = text
        if self.size > 1:
            self._comm.put(name, text)

    def get_if_all(self, names: Sequence[str]) -> list[str] | None:
        """The texts under `names`; None until all exist."""
        if self.size > 1:
            return self._comm.get_if_all(names)
        return [self._said[name] for name in names] if all(name in self._said for name in names) else None

    def is_broken(self) -> bool:
        """Whether a rank has failed."""
        return self._comm.aborted


def saves_by_rows(context: RunContext) -> bool:
    """Whether each rank writes its part: `DefaultCheckpointer` with `is_sharded`, and a sharded module."""
    checkpointer = context.checkpointer
    return isinstance(checkpointer, DefaultCheckpointer) and checkpointer.is_sharded and has_shards(context.module)


def save_by_rows(
    context: RunContext, checkpoint: Checkpoint, force: bool, on_main: Callable[[Callable[[], Any], str], Any]
) -> str | None:
    """Write `checkpoint`, of which each rank has its rows. All ranks call this. Returns the path, as `save` does."""
    checkpointer = context.checkpointer
    assert isinstance(checkpointer, DefaultCheckpointer)
    ranks = SavingRanks(context, on_main)
    return checkpointer.save_sharded(checkpoint, context.state.last_epoch, force, ranks)
