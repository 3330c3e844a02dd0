"""`AbstractTrainerBackendDecorator`: a layer that passes on, explicitly, whatever it does not change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trainstack.backends.base import TrainerBackend
from trainstack.backends.workload import Workload
from trainstack.backends.world import DeviceChoice, World
from trainstack.stage import Stage

if TYPE_CHECKING:
    from trainstack.backends.dp.statement import PrivacyStatement
    from trainstack.backends.sampling import Sampling


class AbstractTrainerBackendDecorator(TrainerBackend):
    """Base class of all layers but the innermost.

    A layer overrides the verbs it changes. It *wraps* a verb when it calls `self.inner.<verb>`, and *ends* it
    when it does not: then it names the verb in `ends`. Attributes that must survive a restart go through
    `get_layer_state`.
    """

    def __init__(self, inner: TrainerBackend) -> None:
        self.inner = inner

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

    def begin_evaluation(self, work: Workload) -> None:
        self.inner.begin_evaluation(work)

    def end_evaluation(self, work: Workload) -> None:
        self.inner.end_evaluation(work)

    def start_afresh(self, *, again: bool) -> None:
        self.inner.start_afresh(again=again)

    @property
    def sampling(self) -> Sampling | None:
        return self.inner.sampling

    @property
    def stated_records(self) -> int | None:
        return self.inner.stated_records

    def privacy_statement(self) -> PrivacyStatement:
        if any(layer._acts_in("privacy_statement") for layer in self.inner.layers()):
            return self.inner.privacy_statement()
        return super().privacy_statement()  # it names the backend string of the whole stack

    def gather(self, outputs: Any) -> Any:
        return self.inner.gather(outputs)

    def read(self, tensors: Sequence[Tensor]) -> list[float]:
        return self.inner.read(tensors)

    def close(self) -> None:
        self.inner.close()

    def _acts_in(self, verb: str) -> bool:
        return getattr(type(self), verb) is not getattr(AbstractTrainerBackendDecorator, verb)
