"""`RunContext`, the parts of a run that its helpers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from trainstack.backends import TrainerBackend, World
from trainstack.checkpointing import AbstractCheckpointer
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.state import RunState, UserState
from trainstack.trainer.events import Events
from trainstack.trainer.module_interface import ModuleInterface
from trainstack.trainer.torch_settings import CompiledModels, deterministic
from trainstack.trainer.tracking.history import RunHistory
from trainstack.trainer.tracking.log_sink import LogSink


@dataclass(slots=True, kw_only=True, eq=False)
class RunContext:
    """What belongs to one trainer from its construction to its end.

    `Trainer` makes it once. Functions and classes that need several of these take the context, never the trainer or
    the run. Only `args`, `sink`, `busy` and `compiled` are ever assigned anew.

    Attributes:
        module: the user's module.
        args: the arguments in force. A callback and `train(epochs=...)` replace them, so read them
            here each time and keep no copy.
        stack: the outermost layer of the backend.
        checkpointer: writes and finds checkpoints.
        history: the recorded metrics.
        events: the subscribers.
        state: the counters of the run.
        user_state: the user's own data, saved with checkpoints.
        val_step: the function that replaces the module's method `val_step`; None for the method.
        sink: records what the module logs.
        busy: whether a step, a hook or an evaluation runs, so that a checkpoint has to wait for its end.
        compiled: the models that `compile` has compiled; None without it, and before the run is made.
    """

    module: ModuleInterface
    args: TrainerArguments
    stack: TrainerBackend
    checkpointer: AbstractCheckpointer
    history: RunHistory
    events: Events
    state: RunState
    user_state: UserState
    val_step: Callable[..., Any] | None = None
    sink: LogSink = field(default_factory=LogSink)
    busy: bool = False
    compiled: CompiledModels | None = None
    _world: World | None = field(default=None, init=False)

    @property
    def world(self) -> World:
        """This process's place among all, and its device. The first use opens the stack."""
        if self._world is None:
            self._world = self.stack.open(self.args.chosen_device)
        return self._world

    @property
    def log(self) -> RunLogger:
        """Messages that are true of all processes: the main one logs them, the others log errors only."""
        return RunLogger(self.args.log_level if self.world.is_main else "ERROR")

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """A block that all processes enter together: a failure of one there is a failure of all.

        See `Communicator.fail_together`. Operations inside are as deterministic as the arguments ask for.
        """
        with (
            deterministic(self.args.deterministic),
            self.world.comm.fail_together(lambda: f"epoch {self.state.epoch}, global step {self.state.current_step}"),
        ):
            yield
