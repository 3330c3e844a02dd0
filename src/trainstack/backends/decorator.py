"""`AbstractTrainerBackendDecorator`, a layer that wraps another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trainstack.backends.base import VERBS, TrainerBackend, Window
from trainstack.backends.processes.world import DeviceChoice, World
from trainstack.backends.workload import Workload
from trainstack.errors import ConfigurationError
from trainstack.stage import Stage

if TYPE_CHECKING:
    from trainstack.backends.privacy_statement import PrivacyStatement, WeightsOrigin
    from trainstack.backends.random_streams import RandomStreams
    from trainstack.backends.workload import Sampling


class AbstractTrainerBackendDecorator(TrainerBackend):
    """Base class of all layers except the innermost.

    A layer overrides the verbs that it changes. It *wraps* a verb if it calls `self.inner.<verb>`, and *ends* it
    otherwise; then it names the verb in `ends`. `get_layer_state` returns attributes that a checkpoint has to keep.
    """

    def __init__(self, inner: TrainerBackend) -> None:
        self.inner = inner
        if self.joins_processes:
            *_, core = inner.layers()
            core.standalone = False

    def _refuse_skipped(self) -> None:
        skipped = find_skipped([(layer.name or type(layer).__name__, layer) for layer in self.layers()])
        if skipped is not None:
            raise ConfigurationError(f"backend {self.spec!r}: {skipped.reason} Write {skipped.remedy}.")

    def layers(self) -> Iterator[TrainerBackend]:
        yield self
        yield from self.inner.layers()

    def open(self, device: DeviceChoice = "auto") -> World:
        return self.inner.open(device)

    def place(self, module: nn.Module, world: World) -> None:
        self.inner.place(module, world)

    def prepare(self, work: Workload) -> Workload:
        return self.inner.prepare(work)

    def accumulate(self, work: Workload, last: bool) -> AbstractContextManager[Any]:
        return self.inner.accumulate(work, last)

    def forward(self, work: Workload, stage: Stage, batch: Any, step: int) -> Any:
        return self.inner.forward(work, stage, batch, step)

    def backward(self, work: Workload, loss: Tensor, weight: float) -> None:
        self.inner.backward(work, loss, weight)

    def clip(self, work: Workload) -> Tensor | None:
        return self.inner.clip(work)

    def step(self, work: Workload) -> bool:
        return self.inner.step(work)

    def sum_gradients(self, work: Workload) -> None:
        self.inner.sum_gradients(work)

    def skip(self, work: Workload) -> None:
        self.inner.skip(work)

    def begin_evaluation(self, work: Workload) -> None:
        self.inner.begin_evaluation(work)

    def end_evaluation(self, work: Workload) -> None:
        self.inner.end_evaluation(work)

    def on_fresh_start(self, *, retry: bool) -> None:
        self.inner.on_fresh_start(retry=retry)

    def post_processing(self) -> AbstractContextManager[None]:
        return self.inner.post_processing()

    def schedulers_step(self) -> AbstractContextManager[None]:
        return self.inner.schedulers_step()

    def on_initial_weights(self, origin: WeightsOrigin) -> None:
        self.inner.on_initial_weights(origin)

    def announce_steps(self, steps: int, publish: Callable[[PrivacyStatement], None] | None) -> None:
        self.inner.announce_steps(steps, publish)

    def on_chosen_stop(self, steps_left: int) -> None:
        self.inner.on_chosen_stop(steps_left)

    @property
    def sampling(self) -> Sampling | None:
        return self.inner.sampling

    @property
    def public_dataset_size(self) -> int | None:
        return self.inner.public_dataset_size

    def plan_rows(self, work: Workload) -> list[tuple[str, str]]:
        return self.inner.plan_rows(work)

    def pop_released(self, window: Window) -> Mapping[str, float]:
        return self.inner.pop_released(window)

    def random_streams(self, world: World) -> RandomStreams | None:
        if self.private:
            from trainstack.backends.random_streams import RandomStreams

            return RandomStreams.from_system(world.comm)
        return self.inner.random_streams(world)

    def privacy_statement(self) -> PrivacyStatement:
        if any(layer.overrides("privacy_statement") for layer in self.inner.layers()):
            return self.inner.privacy_statement()
        return super().privacy_statement()  # with the backend string of the whole stack, not of its inner part

    def gather(self, outputs: Any) -> Any:
        return self.inner.gather(outputs)

    def read(self, tensors: Sequence[Tensor]) -> list[float]:
        return self.inner.read(tensors)

    def close(self) -> None:
        self.inner.close()

    @classmethod
    def overrides(cls, verb: str) -> bool:
        return getattr(cls, verb) is not getattr(AbstractTrainerBackendDecorator, verb)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedVerbs:
    """`verbs` that the layer `inner` overrides, and that the layer `outer` ends before they reach it."""

    inner: str
    outer: str
    verbs: tuple[str, ...]

    @property
    def reason(self) -> str:
        """The conflict, as a sentence."""
        verbs = " and ".join(self.verbs)
        return f"{self.inner!r} overrides {verbs}, and {self.outer!r} ends {verbs} before {self.inner!r} is called."

    @property
    def remedy(self) -> str:
        """The code to write if the conflict is intended."""
        verbs = ", ".join(map(repr, self.verbs))
        return f"may_be_skipped = frozenset({{{verbs}}}) in the class of {self.inner!r} if that is intended"


def find_skipped(layers: Sequence[tuple[str, type[TrainerBackend] | TrainerBackend]]) -> SkippedVerbs | None:
    """The verbs of the first layer that is not called for all verbs that it overrides; None if there is no such layer.

    The innermost layer of a stack does not count: it ends each verb that reaches it.

    Args:
        layers: classes or objects with their names, outermost first.
    """
    for position, (inner, layer) in enumerate(layers):
        kind = layer if isinstance(layer, type) else type(layer)
        if not issubclass(kind, AbstractTrainerBackendDecorator):
            continue
        for outer, around in layers[:position]:
            ended = set(around.ends) - set(layer.may_be_skipped)
            verbs = tuple(verb for verb in VERBS if verb in ended and kind.overrides(verb))
            if verbs:
                return SkippedVerbs(inner=inner, outer=outer, verbs=verbs)
    return None
