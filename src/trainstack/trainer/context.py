"""`RunContext`: the shared parts of a run."""

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
    """Default of `sync_logs` and `log_head` while no log is open, and of `give_values` if all values exist."""


def ignore(path: Path) -> None:
    """Default of `note_saved` while no step log is open."""


@dataclass(slots=True, kw_only=True, eq=False)
class RunContext:
    """Objects that belong to one trainer from its construction to its end.

    `Trainer` makes it once. Functions and classes that need several of these objects take the context, never the
    trainer or the run. Only `args`, `sink`, `busy`, `compiled`, `sync_logs`, `log_head`, `note_saved`, `lease`,
    `extras`, `said_of_buffers`, `changes`, `give_values` and `lineage` are reassigned.

    Attributes:
        module: the user's module.
        args: the current arguments. A callback and `train(epochs=...)` replace them, so read them here each time and
            keep no copy.
        stack: the outermost layer of the backend.
        checkpointer: writes and finds checkpoints.
        history: the recorded metrics.
        events: the subscribers.
        state: the counters of the run.
        user_state: the user's data, saved with checkpoints.
        train_step: function that replaces the module's method `train_step`; None for the method.
        val_step: function that replaces the module's method `val_step`; None for the method.
        sink: records the values that the module logs.
        busy: whether a step, a hook or an evaluation is running, so that a checkpoint must wait for its end.
        directory: selects the folder of the run's files.
        sync_logs: flushes the files of the writers to the disk; called before a checkpoint is written.
        log_head: flushes the step log of this process to the disk and returns the chain after its last block; called on
            each process before a checkpoint is written.
        note_saved: called with the path of each checkpoint that is completely on disk, on the main process.
        compiled: the models that `compile` has compiled; None without it, and before the run is prepared.
        lease: the right to write into the directories of the run; on the main process, while it is held. Code that
            writes there calls its `check` first.
        extras: values that an exact resume of the module needs in addition to its state.
        frozen: finds the frozen weights that a checkpoint can omit.
        said_of_buffers: whether the warning about buffers that differ between ranks was given.
        changes: changes that a resume has found and that the folder of the run does not record yet.
        give_values: initializes tensors on the meta device; called after the stack has placed the module and before
            optimizers are made.
        lineage: origin of the weights of the run, and facts about its data.
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
        """The absolute path of the run's folder; see `RunDirectory.path`."""
        return self.directory.path

    @property
    def world(self) -> World:
        """The rank of this process, the number of processes, and the device. The first use opens the stack."""
        if self._world is None:
            self._world = self.stack.open(self.args.chosen_device)
        return self._world

    @property
    def is_open(self) -> bool:
        """Whether the stack is open, so that the ranks are connected."""
        return self._world is not None

    @property
    def log(self) -> RunLogger:
        """Logger for messages that hold for all processes: the main process logs them, the others log only errors."""
        return RunLogger(self.args.log_level if self.world.is_main else "ERROR")

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """Context manager that all processes enter together: an error in one process becomes an error in all.

        See `Communicator.fail_together`. Inside it, the module uses the steps that were given to the trainer, and
        operations are as deterministic and as precise as the arguments specify.
        """
        given = {Stage.TRAIN: self.train_step, Stage.VAL: self.val_step}
        with (
            calls_given_steps(self.module, {stage: step for stage, step in given.items() if step is not None}),
            current_device(self.world.device),  # two trainers in one process may use different devices
            deterministic(self.args.deterministic),
            matmul_precision(self.args.float32_matmul_precision),
            self.world.comm.fail_together(lambda: f"epoch {self.state.epoch}, global step {self.state.current_step}"),
        ):
            yield
