"""`ResumeReport` shows each kill and the comparison of the results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainstack.errors import ConfigurationError
from trainstack.verifying.comparison import Divergence
from trainstack.verifying.trial import Surroundings


@dataclass(frozen=True, slots=True, kw_only=True)
class KillEvent:
    """One SIGKILL.

    Attributes:
        training: which training it was; each goes on until it ends, and then another one begins. Counted from 1.
        at_step: the global step that was last finished, as far as was seen: looked at every 2 ms.
        resumed_from: the global step that the next process went on from; 0 where there was no checkpoint yet.
        seconds: how long the killed process had trained.
        while_saving: whether it left a checkpoint half written.
        within: where in its epoch the next process went on: "start" (after its first steps), "middle" or "end" (with
            its last step, or its beginning); "" if the length of an epoch is not known.
        counts: whether the next process restored something and had something left to train. Other kills prove nothing.
        surroundings: of the process that went on.
    """

    training: int
    at_step: int
    resumed_from: int
    seconds: float
    while_saving: bool
    within: str = ""
    counts: bool = True
    surroundings: Surroundings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReport:
    """What `verify_resume` found.

    Attributes:
        backend: the backend string.
        nproc: processes of the training.
        steps: global steps of the whole training.
        seconds: what the unbroken training took.
        kills: in their order, also those that do not count.
        asked: how many kills were to count.
        model_hash: xxh3-128 of the module's file in the last checkpoint of the unbroken training.
        trainings: how many were begun to be killed.
        divergence: where the last training that was killed left the unbroken one; None if the last checkpoints agree in
            every bit.
        untracked: if they do not, attributes of the module and the callbacks that training changes and that no
            `get_state` returns.
        blind_to: the parameter that was left as `__init__` makes it in one more resume, to test this test, if that
            training ended with the same bits; "" if it did not.
        not_covered: what was not tried, in words.
        folder: where both trainings lie, if they differ.
    """

    backend: str
    nproc: int
    steps: int
    seconds: float
    kills: tuple[KillEvent, ...]
    model_hash: str
    asked: int = 1
    trainings: int = 0
    divergence: Divergence | None = None
    untracked: tuple[str, ...] = ()
    blind_to: str = ""
    not_covered: tuple[str, ...] = ()
    folder: Path | None = None

    @property
    def counting(self) -> int:
        """How many kills count: the process after it restored a checkpoint and had steps left to train."""
        return sum(kill.counts for kill in self.kills)

    @property
    def same(self) -> bool:
        """Whether each training that was killed and resumed ended with the bits of the unbroken one.

        Raises:
            ConfigurationError: nothing is proved, since no kill counts, or since the comparison does not see a
                parameter that is not restored.
        """
        if self.divergence is None and (not self.counting or self.blind_to):
            raise ConfigurationError(f"verify_resume: {self.verdict}")
        return self.divergence is None

    def __str__(self) -> str:
        processes = f", {self.nproc} processes" if self.nproc > 1 else ""
        lines = [
            f"backend {self.backend!r}{processes}: {self.steps} steps, unbroken in {self.seconds:.1f} s",
            "kill  training  at step  resumed from  seconds",
        ]
        for number, kill in enumerate(self.kills, 1):
            begin = f"step {kill.resumed_from}" if kill.resumed_from else "the start"
            notes = ["while saving"] * kill.while_saving + ["does not count"] * (not kill.counts)
            row = f"{number:>4}  {kill.training:>8}  {kill.at_step:>7}  {begin:>12}  {kill.seconds:>7.2f}"
            lines.append("  ".join([row, *notes]))
        return "\n".join([*lines, self.verdict])

    @property
    def verdict(self) -> str:
        """In a few sentences, whether the run survives, and if not, what to do."""
        if self.divergence is not None:
            return (
                f"NOT THE SAME: {self.divergence.difference}\n{self._advice(self.divergence)}\nBoth are kept in "
                f"{self.folder}"
            )
        if not self.counting:
            return (
                f"not proved: 0 of {self.asked} kills resumed within the training. Write more epochs, or let it save "
                "more often: checkpointer_args=DefaultCheckpointerArguments(every_n_steps=...)."
            )
        if self.blind_to:
            return (
                f"not proved: a training whose {self.blind_to!r} was not restored ended with the same bits, so the "
                "comparison would not see missing state. Do steps change the weights at all?"
            )
        of = "" if self.counting >= self.asked else f" of {self.asked}"
        count = f"{self.counting}{of} kill{'s' * (self.counting != 1 or bool(of))}"
        missing = f"\nnot covered: {'; '.join(self.not_covered)}" if self.not_covered else ""
        return (
            f"the same bits: module (xxh3-128 {self.model_hash[:12]}), optimizers, schedulers, random states and "
            f"history, after {count} that count{'s' * (self.counting == 1 and not of)}{missing}"
        )

    def _advice(self, divergence: Divergence) -> str:
        where = (
            f"Their checkpoints agree up to step {divergence.same_at} and no longer at step {divergence.diverged_at}."
            if divergence.same_at
            else f"Their checkpoints differ at step {divergence.diverged_at}, the first step of which both are there. "
            "To find the step at which they part, write DefaultCheckpointerArguments(keep_last=None)."
        )
        went_on = [kill.resumed_from for kill in self.kills if kill.training == self.trainings and kill.resumed_from]
        if not went_on or divergence.diverged_at <= min(went_on):
            return (
                f"{where} No checkpoint had been gone on from by then: the training is not repeatable even without a "
                "kill. Look for random numbers that args.seed does not set, for the clock, for the order of sets of "
                "strings (each process has another PYTHONHASHSEED), and for operations that are not deterministic "
                "(torch.use_deterministic_algorithms(True) names them)."
            )
        if self.untracked:
            names = ", ".join(self.untracked)
            return (
                f"{where} Training changes {names}, and get_state does not return it, so a new process begins with "
                "the values of __init__. Return it from get_state of the module or the callback and take it back in "
                "update_state, or register it as a buffer."
            )
        return (
            f"{where} Among the attributes of the module, its parts and the callbacks, no changed one was found that "
            "is not saved. Objects of other classes are not compared. Look for what else a step depends on: a global "
            "variable, such an object, a data set that changes, a file, the clock. Return its state from the module's "
            "get_state and take it back in update_state."
        )
