"""`Rounds` makes all ranks run the same number of forward passes in an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from trainstack.backends import Borrowed, TrainerBackend, Workload
from trainstack.stage import Stage
from trainstack.trainer.core.borrowing import muted_log, restored_after
from trainstack.trainer.core.module_snapshot import ModuleSnapshot
from trainstack.trainer.core.state import RunState

Pair = tuple[Any, int | None]
"""A batch, and its number of samples; None if it is unknown."""


class Rounds:
    """The batches of this rank, one in each round. In each round all ranks run one forward pass.

    The ranks agree on each round in a small exchange, so their numbers of batches may differ and need not be known. A
    rank without a batch evaluates a borrowed one and drops the outputs: its first batch, or that of another rank if it
    never had one. Logs, buffers and random states are restored after a borrowed pass.

    Args:
        pairs: the batches of this rank.
        stack: the stack whose `forward` runs.
        work: the result of `stack.prepare`.
        stage: the stage of the evaluation.
        state: the counters of the run.
        should_stop: called before each round. The evaluation ends on all ranks if it returns True on one of them.

    Attributes:
        is_over: whether no rank has a batch, or a rank stops.
        stopped_early: whether a rank stopped while batches were left.
    """

    is_over: bool
    stopped_early: bool

    def __init__(
        self,
        pairs: Iterator[Pair],
        stack: TrainerBackend,
        work: Workload,
        stage: Stage,
        state: RunState,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        self._pairs, self._stack, self._work, self._stage, self._state = pairs, stack, work, stage, state
        self._should_stop = should_stop or (lambda: False)
        self._number = 0
        self._borrowed: Any = None
        self.is_over = self.stopped_early = False

    def __iter__(self) -> Iterator[Pair]:
        while not self.is_over:
            pair = self.next_batch()
            if pair is not None:
                yield pair

    def next_batch(self) -> Pair | None:
        """The batch of this rank in the next round; None after a borrowed pass, or when the evaluation is over."""
        pair, comm = next(self._pairs, None), self._work.world.comm
        place = f"round {self._number} of a {self._stage.name.lower()} pass"
        having, stopping = comm.sum([pair is not None, self._should_stop()], place)
        self.is_over = bool(stopping) or not having
        self.stopped_early = bool(stopping and having)
        if self.is_over:
            return None
        if not self._number:
            self._borrowed = pair[0] if pair is not None and having == comm.size else self._lend(pair, place)
        self._number += 1
        if pair is None:
            self._evaluate_borrowed()
        return pair

    def _lend(self, pair: Pair | None, place: str) -> Any:
        """A batch of this rank, or of the first rank that has one."""
        comm = self._work.world.comm
        lender = comm.gather(pair is not None, place).index(True)
        lent = comm.gather(pair[0] if pair is not None and comm.rank == lender else None, place)
        return lent[lender] if pair is None else pair[0]

    def _evaluate_borrowed(self) -> None:
        work, state = self._work, self._state
        with muted_log(work.module, state), restored_after(work, state, ModuleSnapshot(work.module)) as begin:
            self._stack.forward(work, self._stage, Borrowed(self._borrowed, begin), state.global_step)
