"""Where a run stands. The loop advances it, checkpoints keep it, hooks and bars read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(slots=True)
class RunState:
    """Counters of one run.

    Attributes:
        seed: of data order and samples' random numbers; a resumed run keeps the one it began with.
        epoch: the epoch under way, or to begin next.
        last_epoch: the last epoch that is wholly finished; -1 before.
        global_step: global steps finished since the run began, those included that moved nothing.
        batches: micro-batches finished on this process since the run began.
        skipped_steps: global steps that moved nothing.
        steps_in_epoch: global steps finished in `epoch`.
        samples_in_epoch: samples consumed in `epoch` over all processes: the cursor of the data order.
        batches_in_epoch: micro-batches consumed in `epoch` on this process.
        validated: loaders finished of the validation after `epoch`; -1 while it trains, until its hooks have run.
        validating: loaders finished of a validation within `epoch`; -1 while none is under way.
        current_step: the step under way, or the last finished; where logged values belong.
        order: how the samples of `epoch` come, in words; empty before its first, or where that is not known.
    """

    seed: int = 0
    epoch: int = 0
    last_epoch: int = -1
    global_step: int = 0
    batches: int = 0
    skipped_steps: int = 0
    steps_in_epoch: int = 0
    samples_in_epoch: int = 0
    batches_in_epoch: int = 0
    validated: int = -1
    validating: int = -1
    current_step: int = 0
    order: str = ""

    def finish_epoch(self) -> None:
        """The epoch under way is over; the next begins at its first sample."""
        self.last_epoch = self.epoch
        self.epoch += 1
        self.steps_in_epoch = self.samples_in_epoch = self.batches_in_epoch = 0
        self.validated, self.order = -1, ""

    @property
    def loaders_done(self) -> int:
        """Loaders finished of the validation under way, within or after the epoch."""
        return max(0, self.validating if self.validated < 0 else self.validated)

    def finish_loader(self) -> None:
        """One more loader of the validation under way is finished."""
        if self.validated < 0:
            self.validating = self.loaders_done + 1
        else:
            self.validated += 1

    def get_state(self) -> dict[str, int | str]:
        """All of it."""
        return asdict(self)

    def update_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `get_state` returned; other keys are ignored."""
        for field in fields(self):
            if field.name in state:
                kind: Any = type(getattr(self, field.name))
                setattr(self, field.name, kind(state[field.name]))
