"""`ResumeReport` shows each kill and the comparison of the results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainstack.verifying.comparison import Divergence


@dataclass(frozen=True, slots=True, kw_only=True)
class KillEvent:
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
        trainings: how many were begun to be killed.
        model_hash: xxh3-128 of the module's file in the last checkpoint of the unbroken training.
        divergence: where the last training that was killed left the unbroken one; None if the last checkpoints agree in
            every bit.
        untracked: if they do not, attributes of the module that training changes and `get_state` does not return.
        folder: where both trainings lie, if they differ.
    """

    backend: str
    nproc: int
    steps: int
    seconds: float
    kills: tuple[KillEvent, ...]
    model_hash: str
    trainings: int = 0
    divergence: Divergence | None = None
    untracked: tuple[str, ...] = ()
    folder: Path | None = None

    @property
    def same(self) -> bool:
        """Whether each training that was killed and resumed ended with the bits of the unbroken one."""
        return self.divergence is None

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
        """In a few sentences, whether the run survives, and if not, what to do."""
        if self.divergence is None:
            return (
                f"the same bits: module (xxh3-128 {self.model_hash[:12]}), optimizers, schedulers, random states and "
                f"history, after {len(self.kills)} kills"
            )
        return (
            f"NOT THE SAME: {self.divergence.difference}\n{self._advice(self.divergence)}\nBoth are kept in "
            f"{self.folder}"
        )

    def _advice(self, divergence: Divergence) -> str:
        where = (
            f"Their checkpoints agree up to step {divergence.same_at} and no longer at step {divergence.diverged_at}."
        )
        went_on = [kill.resumed_from for kill in self.kills if kill.training == self.trainings and kill.resumed_from]
        if not went_on or divergence.diverged_at <= min(went_on):
            return (
                f"{where} No checkpoint had been gone on from by then: the training is not repeatable even without a "
                "kill. Look for random numbers that args.seed does not set, for the clock, and for operations that "
                "are not deterministic (torch.use_deterministic_algorithms(True) names them)."
            )
        if self.untracked:
            names = ", ".join(f"self.{name}" for name in self.untracked)
            return (
                f"{where} Training changes {names} of the module, and get_state does not return it, so a new process "
                "begins with what __init__ makes. Return it from get_state and take it back in update_state, or "
                "register it as a buffer."
            )
        return (
            f"{where} What the module's attributes hold is saved. Look for what else a step depends on: a global "
            "variable, an object with a state of its own, a data set that changes, a file, the clock. Return its state "
            "from the module's get_state and take it back in update_state."
        )
