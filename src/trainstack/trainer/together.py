"""Methods of a trainer that all processes call together: when one of them fails there, none waits for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from trainstack.trainer.determinism import deterministic

if TYPE_CHECKING:
    from trainstack.trainer.properties import TrainerProperties

Owner = TypeVar("Owner", bound="TrainerProperties")
Rest = ParamSpec("Rest")
Result = TypeVar("Result")


def by_all(method: Callable[Concatenate[Owner, Rest], Result]) -> Callable[Concatenate[Owner, Rest], Result]:
    """Let a failure of `method` in one process be the failure of all: see `Communicator.together`."""

    @functools.wraps(method)
    def together(trainer: Owner, /, *args: Rest.args, **kwargs: Rest.kwargs) -> Result:
        def where() -> str:
            return f"epoch {trainer.state.epoch}, global step {trainer.state.current_step}"

        with deterministic(trainer.args.deterministic), trainer.world.comm.together(where):
            return method(trainer, *args, **kwargs)

    return together
