"""Events within a step: verbs that have subscribers are wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from trainstack.backends import Borrowed
from trainstack.trainer.core.several_updates import NextPart, PartResult
from trainstack.trainer.core.state_tree import copied
from trainstack.trainer.data.step_batches import MicroBatch, StepBatches
from trainstack.trainer.events.bus import Fire
from trainstack.trainer.events.calling import call_all
from trainstack.trainer.events.event import Event

Verb = TypeVar("Verb", bound=Callable[..., Any])
Bind = Callable[[Event], Fire | None]


def no_subscribers(event: Event) -> None:
    """Always return None: used by a loop without subscribers."""


def with_fetch_events(steps: Iterable[StepBatches], bind: Bind) -> Iterable[StepBatches]:
    """Wrap `steps` with the events around the fetch of each micro-batch."""
    begin, end = bind(Event.FETCH_DATA_BEGIN), bind(Event.FETCH_DATA_END)
    if begin is None and end is None:
        return steps

    def fetched() -> Iterator[StepBatches]:
        source = iter(steps)
        while True:
            if begin is not None:  # before `next`: some sources fetch the first micro-batch to find out if there is one
                begin()
            step_batches = next(source, None)
            if step_batches is None:
                return
            step_batches.micro_batches = _announced(step_batches.micro_batches, begin, end)
            yield step_batches

    return fetched()


def _announced(micro_batches: Iterator[MicroBatch], begin: Fire | None, end: Fire | None) -> Iterator[MicroBatch]:
    """Wrap `micro_batches` with the events of a fetch; the first fetch has begun already."""
    for batch, weight, last in micro_batches:
        if end is not None:
            end(batch.batch if type(batch) is Borrowed else batch)
        yield batch, weight, last
        if not last and begin is not None:
            begin()


def with_batch_events(forward: Verb, backward: Verb, bind: Bind) -> tuple[Any, Any]:
    """Wrap `forward` and `backward` with the events before each, and after both."""
    begin, before_backward = bind(Event.TRAIN_BATCH_BEGIN), bind(Event.BEFORE_BACKWARD)
    end = bind(Event.TRAIN_BATCH_END)
    if begin is None and before_backward is None and end is None:
        return forward, backward
    returned: Any = None
    given: Any = None

    def announced_forward(work: Any, stage: Any, batch: Any, step: int) -> Any:
        nonlocal returned, given
        plain = batch.batch if type(batch) is Borrowed else batch
        if type(plain) is not NextPart:  # a later part of a micro-batch has no event of its begin
            if begin is not None:
                begin(plain)
            given = None if end is None else plain
        outputs = forward(work, stage, batch, step)
        is_part = type(outputs) is PartResult
        returned = outputs if not is_part else outputs.value if outputs.ended else outputs.split()[0]
        return outputs

    def announced_backward(work: Any, loss: Any, weight: float) -> None:
        nonlocal returned
        if before_backward is not None:
            before_backward(returned)
        outputs, returned = None if end is None else copied(returned), None
        backward(work, loss, weight)
        if end is not None:
            end(given, outputs, loss.detach())

    return announced_forward, announced_backward


def chain(first: Fire | None, second: Fire | None, second_takes: slice = slice(None)) -> Fire | None:
    """Return a function that calls `first` with all arguments and `second` with some of them; see `call_all`."""
    if second is None:
        return first
    taken: Fire = lambda *given: second(*given[second_takes])  # noqa: E731
    calls = [taken] if first is None else [first, taken]
    return lambda *given: call_all(calls, *given)
