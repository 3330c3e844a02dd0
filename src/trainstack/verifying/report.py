"""What came of it: where each kill struck, and whether the ends agree."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One SIGKILL.

    Attributes:
        training: which training it was; each goes on until it ends, and then another one begins. Counted from 1.
        at_step: the global step that was last finished, as far as was seen: looked at every 2 ms.
        resumed_from: the global step that the next process went on from; 0 where there was no checkpoint yet.
        seconds: how long the killed process had trained.
        while_saving: whether it left a checkpoint half written.
    """

    training: int
    at_step: int
    resumed_from: int
    seconds: float
    while_saving: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReport:
    """What `verify_resume` found.

    Attributes:
        backend: the backend string.
        nproc: processes of the training.
        steps: global steps of the whole training.
        seconds: what the unbroken training took.
        kills: in their order.
        model_hash: xxh3-128 of the module's file in the last checkpoint of the unbroken training.
        difference: the first thing that differs at the end and by how much, a tensor if there is one; None if every
            bit of the last checkpoints agrees.
        folder: where both trainings lie, if they differ.
    """

    backend: str
    nproc: int
    steps: int
    seconds: float
    kills: tuple[Kill, ...]
    model_hash: str
    difference: str | None = None
    folder: Path | None = None

    @property
    def same(self) -> bool:
        """Whether each training that was killed and resumed ended with the bits of the unbroken one."""
        return self.difference is None

    def __str__(self) -> str:
        processes = f", {self.nproc} processes" if self.nproc > 1 else ""
        lines = [
            f"backend {self.backend!r}{processes}: {self.steps} steps, unbroken in {self.seconds:.1f} s",
            "kill  training  at step  resumed from  seconds",
        ]
        for number, kill in enumerate(self.kills, 1):
            begin = f"step {kill.resumed_from}" if kill.resumed_from else "the start"
            saving = "  while saving" if kill.while_saving else ""
            lines.append(
                f"{number:>4}  {kill.training:>8}  {kill.at_step:>7}  {begin:>12}  {kill.seconds:>7.2f}{saving}"
            )
        return "\n".join([*lines, self.verdict])

    @property
    def verdict(self) -> str:
        """In one sentence, whether the run survives."""
        if self.same:
            return (
                f"the same bits: module (xxh3-128 {self.model_hash[:12]}), optimizers, schedulers, random states and "
                f"history, after {len(self.kills)} kills"
            )
        return f"NOT THE SAME: {self.difference}\nBoth are kept in {self.folder}"
