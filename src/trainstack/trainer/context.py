"""`RunContext`, the parts of a run that its helpers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainstack.backends import TrainerBackend, World
from trainstack.backends.processes.world import current_device
from trainstack.checkpointing import AbstractCheckpointer, Lease
from trainstack.checkpointing.integrity.lineage import Lineage
from trainstack.stage import Stage
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.core.changes import Change
from trainstack.trainer.core.frozen_weights import FrozenWeights
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.module_extras import ModuleExtras
from trainstack.trainer.core.state import RunState, UserState
from trainstack.trainer.events import Events
from trainstack.trainer.module_interface import ModuleInterface, calls_given_steps
from trainstack.trainer.run_directory import RunDirectory
from trainstack.trainer.torch_settings import CompiledModels, deterministic, matmul_precision
from trainstack.trainer.tracking.history import RunHistory
from trainstack.trainer.tracking.log_sink import LogSink
from trainstack.trainer.tracking.provenance import guard_of


def nothing() -> None:
    """Stands for `sync_logs` and `log_head` while no log is open, and for `give_values` where nothing lacks values."""


def ignore(path: Path) -> None:
    """Stands for `note_saved` while no step log is open."""


@dataclass(slots=True, kw_only=True, eq=False)
class RunContext:
    """What belongs to one trainer from its construction to its end.

    `Trainer` makes it once. Functions and classes that need several of these take the context, never the trainer or
    the run. Only `args`, `sink`, `busy`, `compiled`, `sync_logs`, `log_head`, `note_saved`, `lease`, `extras`,
    `said_of_buffers`, `changes`, `give_values` and `lineage` are assigned anew.

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
        train_step: the function that replaces the module's method `train_step`; None for the method.
        val_step: likewise for `val_step`.
        sink: records what the module logs.
        busy: whether a step, a hook or an evaluation runs, so that a checkpoint has to wait for its end.
        directory: decides in which folder the run keeps its files.
        sync_logs: forces what the writers have written to the disk; called before a checkpoint is written.
        log_head: forces the step log of this process to the disk, and gives the chain after its last block; called on
            each process before a checkpoint is written.
        note_saved: is told of each checkpoint that has become safe, on the main process.
        compiled: the models that `compile` has compiled; None without it, and before the run is made.
        lease: the right to write into the directories of the run; on the main process, while it is held. What writes
            there calls its `check` first.
        extras: values that an exact resume of the module needs beside its state.
        frozen: tells which frozen weights a checkpoint can leave out.
        said_of_buffers: whether the warning about buffers that differ between ranks was given.
        changes: that a resume has found and the folder of the run has no record of yet.
        give_values: called when the stack has placed the module, before optimizers are made; gives tensors on the meta
            device their values.
        lineage: where the weights of the run come from, and facts of its data.
    """

    module: ModuleInterface
    args: TrainerArguments
    stack: TrainerBackend
    checkpointer: AbstractCheckpointer
    history: RunHistory
    events: Events
    state: RunState
    user_state: UserState
    directory: RunDirectory
    extras: ModuleExtras
    train_step: Callable[..., Any] | None = None
    val_step: Callable[..., Any] | None = None
    sink: LogSink = field(default_factory=LogSink)
    busy: bool = False
    compiled: CompiledModels | None = None
    sync_logs: Callable[[], None] = nothing
    log_head: Callable[[], str | None] = nothing
    note_saved: Callable[[Path], None] = ignore
    lease: Lease | None = None
    said_of_buffers: bool = False
    changes: list[Change] = field(default_factory=list)
    give_values: Callable[[], None] = nothing
    lineage: Lineage = field(default_factory=Lineage)
    frozen: FrozenWeights = field(init=False)
    _world: World | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.frozen = FrozenWeights(self.module)
        self.history.guard = guard_of(self.stack)

    @property
    def output_dir(self) -> Path:
        """The folder of the run, absolute; see `RunDirectory.path`."""
        return self.directory.path

    @property
    def world(self) -> World:
        """This process's place among all, and its device. The first use opens the stack."""
        if self._world is None:
            self._world = self.stack.open(self.args.chosen_device)
        return self._world

    @property
    def is_open(self) -> bool:
        """Whether the stack is open, so that the ranks have met."""
        return self._world is not None

    @property
    def log(self) -> RunLogger:
        """Messages that are true of all processes: the main one logs them, the others log errors only."""
        return RunLogger(self.args.log_level if self.world.is_main else "ERROR")

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """A block that all processes enter together: a failure of one there is a failure of all.

        See `Communicator.fail_together`. The module's steps are those that the trainer was given. Operations inside
        are as deterministic and as precise as the arguments ask for.
        """
        given = {Stage.TRAIN: self.train_step, Stage.VAL: self.val_step}
        with (
            calls_given_steps(self.module, {stage: step for stage, step in given.items() if step is not None}),
            current_device(self.world.device),  # two trainers may use different ones
            deterministic(self.args.deterministic),
            matmul_precision(self.args.float32_matmul_precision),
            self.world.comm.fail_together(lambda: f"epoch {self.state.epoch}, global step {self.state.current_step}"),
        ):
            yield
