"""`Provenance`, the origin of a recorded value, and `MetricGuard`, which acts on it in private runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING

from trainstack.errors import PrivacyError

if TYPE_CHECKING:
    from trainstack.backends import TrainerBackend


class Provenance(IntEnum):
    """The data from which a recorded value was computed. Of several provenances the largest holds.

    Attributes:
        PUBLIC: no record: counts, learning rates.
        COVERED: values that the privacy layer has released with noise, and public values.
        MACHINE: times, rates and memory, which depend on the sizes of samples. They are recorded and decide nothing.
        EVALUATION: validation or test data, and released weights. Covered if the data are declared public.
        PRIVATE: training data, without noise. Values of unknown origin are private.
    """

    PUBLIC = 0
    COVERED = 1
    MACHINE = 2
    EVALUATION = 3
    PRIVATE = 4


_OF_THE_LOSS = ("train/loss", "train/loss_epoch")


class MetricGuard:
    """Decides for the values of a private run which are recorded, and which may decide about the training.

    A value that was computed from training data without noise is not recorded at all, so that it reaches no log, no
    file and no display, unless the run shows such values. Decisions about the training (schedules, early stopping,
    the choice of a checkpoint) may read values that are public or covered.

    Args:
        shows_private: record values that were computed from training data without noise.
        public_evaluation: validation and test data are declared public.
        released: the names, without `train/`, of the metrics that the privacy layer releases with noise.

    Attributes:
        hidden: the names of the metrics that were not recorded.
    """

    def __init__(
        self, *, shows_private: bool = False, public_evaluation: bool = False, released: tuple[str, ...] = ()
    ) -> None:
        self._shows_private, self._public_evaluation = shows_private, public_evaluation
        self._released = {f"train/{name}{suffix}" for name in released for suffix in ("", "_epoch")}
        self._known: dict[str, Provenance] = {}
        self.hidden: set[str] = set()

    def admit(self, name: str, provenance: Provenance) -> bool:
        """Whether a value of the metric `name` is to be recorded; notes its provenance if it is."""
        if provenance is Provenance.EVALUATION and self._public_evaluation:
            provenance = Provenance.COVERED
        if not self.shows(provenance):
            self.hidden.add(name)
            return False
        self._known[name] = max(self._known.get(name, provenance), provenance)
        return True

    def shows(self, provenance: Provenance) -> bool:
        """Whether a value of this provenance may be written anywhere."""
        return provenance is not Provenance.PRIVATE or self._shows_private

    def provenance_of(self, name: str) -> Provenance:
        """The largest provenance of the values recorded under `name`; private if it is not known."""
        return self._known.get(name, Provenance.PRIVATE)

    def may_decide(self, name: str) -> bool:
        """Whether values of the metric `name` are public or covered."""
        return self.provenance_of(name) <= Provenance.COVERED

    def usable(self, values: Mapping[str, float]) -> dict[str, float]:
        """The values, by name, that are public or covered."""
        return {name: value for name, value in values.items() if self.may_decide(name)}

    def require(self, name: str, who: str) -> None:
        """Refuse that `who` decides about the training by the metric `name`; one that is not known yet passes.

        Raises:
            PrivacyError: the metric was computed from records without noise, or will be.
        """
        provenance = self._known[name] if name in self._known else self._expected(name)
        if provenance is None or provenance <= Provenance.COVERED:
            return
        if provenance is Provenance.EVALUATION:
            source, cure = (
                "validation or test data",
                "If these data are public, or hold no record whose privacy matters, write "
                "DifferentialPrivacyArguments(public_validation=True). Or use a noisy metric of the training",
            )
        elif provenance is Provenance.MACHINE:
            source, cure = "times or memory, which depend on the sizes of samples,", "Use a noisy metric"
        else:
            source, cure = "training data", "Use a noisy metric"
        telemetry = "telemetry={'loss': (0, 10)} in DifferentialPrivacyArguments records 'train/loss' with noise"
        raise PrivacyError(
            f"{who} decides by {name!r}, which is computed from {source} without noise. The decision changes the "
            f"training or the choice of weights, and epsilon does not cover that. {cure}: {telemetry}. A validation "
            "on public data with public_validation=True is covered as well."
        )

    def _expected(self, name: str) -> Provenance | None:
        """The provenance of a metric without a record, by its name; None if that does not show it."""
        if name in self._released:
            return Provenance.COVERED
        if name in self.hidden:
            return Provenance.PRIVATE
        if _is_evaluation(name):
            return Provenance.COVERED if self._public_evaluation else Provenance.EVALUATION
        return Provenance.PRIVATE if name in _OF_THE_LOSS else None

    def get_state(self) -> dict[str, int]:
        """The provenance of each metric, by name."""
        return {name: int(provenance) for name, provenance in self._known.items()}

    def update_state(self, state: Mapping[str, int]) -> None:
        """Load the result of `get_state`."""
        self._known = {str(name): Provenance(value) for name, value in state.items()}
        if not self._public_evaluation:  # an earlier start may have declared the data public
            for name in filter(_is_evaluation, self._known):
                self._known[name] = max(self._known[name], Provenance.EVALUATION)

    def take_private(self, names: Iterable[str]) -> set[str]:
        """The restored metrics among `names` that this run does not record; states of older versions have none.

        The guard forgets their values: a metric that is released with noise may have the same name.
        """
        for name in names:
            older = Provenance.EVALUATION if _is_evaluation(name) else Provenance.PRIVATE
            self._known.setdefault(name, older)
        if self._shows_private:
            return set()
        found = {name for name in names if self._known[name] is Provenance.PRIVATE}
        for name in found:
            del self._known[name]
        return found


def _is_evaluation(name: str) -> bool:
    return name.split("/")[0] in ("val", "test")


def guard_of(stack: TrainerBackend) -> MetricGuard | None:
    """The guard of a run on `stack`; None if the stack has no privacy layer."""
    if not stack.is_private:
        return None
    private = [layer for layer in stack.layers() if layer.private]
    return MetricGuard(
        shows_private=not any(layer.hides_losses for layer in private),
        public_evaluation=all(layer.public_validation for layer in private),
        released=tuple(name for layer in private for name in layer.released_metrics),
    )
