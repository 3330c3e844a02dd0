"""Events and contexts around an evaluation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from trainstack.stage import Stage
from trainstack.trainer.events.event import Event
from trainstack.trainer.order import mix
from trainstack.trainer.seeding import isolated_rng

if TYPE_CHECKING:
    from trainstack.trainer.evaluator import Evaluator

Rest = ParamSpec("Rest")
Result = TypeVar("Result")
Evaluate = Callable[Concatenate["Evaluator", Stage, Rest], Result]


def with_events(evaluate: Evaluate[Rest, Result]) -> Evaluate[Rest, Result]:
    """Put `Evaluator.evaluate` into callbacks' contexts, and between the events if it validates.

    Subscribers get random numbers of their own, like all of an evaluation. One that is broken off does not end, and one
    that only tries out a few batches is none of theirs.
    """

    @functools.wraps(evaluate)
    def announced(evaluator: Evaluator, stage: Stage, /, *arguments: Rest.args, **named: Rest.kwargs) -> Result:
        run = evaluator._run
        events, state = run.events, run.state
        announce = stage is Stage.VAL and named.get("only") is None
        with isolated_rng(mix(state.seed, stage.value, state.global_step, run.world.rank), run.world.device):
            if announce:
                events.fire(Event.VALIDATION_BEGIN)
            with events.evaluation_contexts():
                result = evaluate(evaluator, stage, *arguments, **named)
            if announce:
                history = run.sink.history  # not the run's, where the validation is no part of it
                measured = history.values_at(state.global_step) if events.has(Event.VALIDATION_END) else {}
                events.fire(Event.VALIDATION_END, measured)
        return result

    return announced
