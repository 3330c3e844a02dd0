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
        training: the number of the training, counted from 1. Each is resumed until it ends, and then another one
            begins.
        at_step: the last finished global step that was observed, every 2 ms.
        resumed_from: the global step from which the next process resumed; 0 if there was no checkpoint yet.
        seconds: the time for which the killed process had trained.
        while_saving: whether it left a partial checkpoint.
        within: the position in its epoch from which the next process resumed: "start" (after its first steps), "middle"
            or "end" (with its last step, or its beginning); "" if the length of an epoch is not known.
        counts: whether the next process restored a checkpoint and had steps left to train. Other kills prove nothing.
        surroundings: of the process that resumed.
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
    """The result of `verify_resume`.

    Attributes:
        backend: the backend string.
        nproc: processes of the training.
        steps: global steps of the whole training.
        seconds: the duration of the uninterrupted training.
        kills: in their order, including those that do not count.
        asked: the requested number of counting kills.
        model_hash: xxh3-128 of the module's file in the last checkpoint of the uninterrupted training.
        trainings: the number of trainings that were started for kills.
        divergence: the first difference of the last killed training from the uninterrupted one; None if the last
            checkpoints agree in every bit.
        untracked: if they do not, attributes of the module and the callbacks that training changes and that no
            `get_state` returns.
        blind_to: a parameter that was not restored in one more resume, to test this test, if that training ended with
            the same bits; "" if it did not.
        not_covered: the cases that were not tried, as text.
        folder: the folder of both trainings, if they differ.
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
        """The number of kills that count: the next process restored a checkpoint and had steps left to train."""
        return sum(kill.counts for kill in self.kills)

    @property
    def same(self) -> bool:
        """Whether each killed and resumed training ended with the bits of the uninterrupted one.

        Raises:
            ConfigurationError: nothing is proved, because no kill counts, or because the comparison does not notice a
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
        """Whether the run has the same bits after kills, and if not, the next steps of the user, in a few sentences."""
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
            "To find the step at which they diverge, write DefaultCheckpointerArguments(keep_last=None)."
        )
        went_on = [kill.resumed_from for kill in self.kills if kill.training == self.trainings and kill.resumed_from]
        if not went_on or divergence.diverged_at <= min(went_on):
            return (
                f"{where} No training had been resumed by then: the training is not repeatable even without a "
                "kill. Look for random numbers that args.seed does not set, for the clock, for the order of sets of "
                "strings (each process has another PYTHONHASHSEED), and for operations that are not deterministic "
                "(torch.use_deterministic_algorithms(True) names them)."
            )
        if self.untracked:
            names = ", ".join(self.untracked)
            return (
                f"{where} Training changes {names}, and get_state does not return it, so a new process begins with "
                "the values of __init__. Return it from get_state of the module or the callback and restore it in "
                "update_state, or register it as a buffer."
            )
        return (
            f"{where} Among the attributes of the module, its submodules and the callbacks, all changed ones are "
            "saved. Objects of other classes are not compared. Look for other dependencies of a step: a global "
            "variable, such an object, a data set that changes, a file, the clock. Return its state from the module's "
            "get_state and restore it in update_state."
        )
