"""`TrainerBase` opens the backend, and restores and prepares a run, for the methods of a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from trainstack._tensor_classes import has_meta
from trainstack.backends import World
from trainstack.checkpointing import AbstractCheckpointer, Checkpoint, DefaultCheckpointer, WarmStartReport
from trainstack.errors import ConfigurationError, annotate
from trainstack.trainer.abstract_trainer import AbstractTrainer
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.context import RunContext, nothing
from trainstack.trainer.core.module_extras import ModuleExtras
from trainstack.trainer.core.state import RunState, UserState
from trainstack.trainer.events import Event, Events
from trainstack.trainer.events.optimizer_modes import trained_weights_of
from trainstack.trainer.resume.left_out_weights import note_initial_weights, with_left_out_weights
from trainstack.trainer.resume.lineage import lineage_of
from trainstack.trainer.resume.loading import LOADING
from trainstack.trainer.resume.rank_zero import wait_for_all_ranks
from trainstack.trainer.resume.restoring import restore_module, select_resume_state, start_from_weights
from trainstack.trainer.resume.resume_changes import report_changes
from trainstack.trainer.resume.saving import Saver
from trainstack.trainer.run.stopping import Stopper

if TYPE_CHECKING:
    from trainstack.trainer.reporting.reporter import Reporter
    from trainstack.trainer.run.run import Run


class TrainerBase(AbstractTrainer):
    """The parts of a trainer, and the run that it prepares when a method needs it."""

    checkpointer: DefaultCheckpointer | AbstractCheckpointer
    events: Events
    user_state: UserState
    warm_start_report: WarmStartReport | None = None
    _context: RunContext
    _saver: Saver
    _stopper: Stopper
    _metrics: Any  # metrics given by the user, by name
    _run: Run | None = None
    _reporter: Reporter | None = None
    _evaluation: Run | None = None  # evaluates until a run is prepared for training
    _training = _finished = _making_ready = _is_made = _is_copy = False
    _copied_states: Mapping[str, Any] | None = None

    @property
    def args(self) -> TrainerArguments:
        """The current arguments; `on_init` of a callback may replace them."""
        return self._context.args

    @args.setter
    def args(self, args: TrainerArguments) -> None:
        self._context.args = args

    @property
    def world(self) -> World:
        """The rank of this process, the number of processes, and the device."""
        return self._context.world

    def _ready(self, *, to_train: bool = False) -> Run:
        """Open the backend, restore the state to resume from, and prepare the module; only at the first call.

        With `to_train`, only the owner of the directories selects the checkpoint to resume from.
        """
        if self._run is not None and to_train and not self._finished:
            with self._context.fail_together():
                self._saver.owner.take()
        if self._run is None:
            if self._making_ready:
                raise ConfigurationError(
                    "the trainer's plan or state was used while the trainer prepares the module. Use self.plan in "
                    "get_optimizers_schedulers and get_train_dataloader."
                )
            self._making_ready = True
            try:
                with self._context.fail_together():
                    self._make_ready(to_train)
            except BaseException:
                self._run = None
                self.state.update_state(RunState(seed=self.args.seed).get_state())
                raise
            finally:
                self._making_ready = False
        return cast("Run", self._run)

    def _make_ready(self, to_train: bool) -> None:
        from trainstack.trainer.run.agreement import agree_on_setup
        from trainstack.trainer.run.preflight import import_for_optimizers
        from trainstack.trainer.run.run import Run
        from trainstack.trainer.run.run_states import resume_training

        if self.world.size > 1:
            import_for_optimizers()
        agree_on_setup(self._context)
        checkpoint = self._restore(to_train)
        self._evaluation = None
        self._run = Run(self._context, self._stopper, self._saver, self._metrics)
        self._context.extras.begin()
        self.events.fire(Event.READY)
        if self._is_copy:  # callbacks forget their states at READY
            self.events.update_state(self._copied_states)
        if checkpoint.is_empty:
            self.trainer_backend.on_fresh_start(retry=self.args.resume == "auto")
        else:
            resume_training(self._run, checkpoint, self.update_state)
        self._context.extras.is_fixed = True

    def _restore(self, to_train: bool) -> Checkpoint:
        """Load the weights of the module, and return the checkpoint to resume from; an empty one for a new run.

        Weights to start from are loaded once, so that an evaluation before training does not change the weights.
        """
        context = self._context
        self._saver.choose_directory(to_train=to_train)
        if not context.extras.is_fixed:
            context.extras = ModuleExtras(self.module)
        checkpoint = with_left_out_weights(context, self.load_checkpoints(), self._saver)
        checkpoint = select_resume_state(checkpoint, context)
        context.give_values = nothing
        if has_meta(self.module):
            if not self.checkpointer.keeps_frozen:
                raise ConfigurationError(
                    "keep_frozen=False with a module that was built on the meta device: a resume compares the frozen "
                    "weights before they have values. Write keep_frozen=True, or build the frozen part without "
                    "torch.device('meta')."
                )
            context.give_values = partial(self._initialize, checkpoint)
        else:
            self._give_weights(checkpoint)
        self.state.update_state(checkpoint.trainer_state or {})
        return checkpoint

    def _initialize(self, checkpoint: Checkpoint) -> None:
        """Initialize a placed module that was built on the meta device, and then load its weights."""
        from trainstack.backends.sharding.meta import initialize_meta

        is_loaded = checkpoint.is_empty and self.args.init_weights_from is not None and self.args.init_weights_strict
        initialize_meta(self.module, self.world, stored=not is_loaded)
        self._give_weights(checkpoint)

    def _give_weights(self, checkpoint: Checkpoint) -> None:
        context = self._context
        if not checkpoint.is_empty:
            with wait_for_all_ranks(self.world, LOADING, self.args.rank_zero_timeout_s):
                restore_module(self.module, checkpoint)
        if self._evaluation is None or not checkpoint.is_empty:
            saver = self._saver
            self.warm_start_report = start_from_weights(
                context, saver.load_weights, saver.fetch, resumed=not checkpoint.is_empty
            )
            if self.warm_start_report is not None:
                self.events.fire(Event.LOAD_MODEL, self.warm_start_report)
        if checkpoint.is_empty and not self.checkpointer.keeps_frozen:
            note_initial_weights(self._context, self._saver)

    def _ready_to_evaluate(self) -> Run:
        """Prepare the run without training data and optimizers, as long as nothing is trained.

        Training then prepares the module again. If a layer cannot be prepared twice, or if a user's function subscribes
        to `READY`, the run is prepared for training at once.
        """
        again = all(layer.prepares_again for layer in self.trainer_backend.layers())
        if self._run is not None or not again or self.events.has_foreign(Event.READY):
            return self._ready()
        if self._evaluation is None:
            if self._making_ready:
                return self._ready()  # raises the error for a use during preparation
            self._making_ready = True
            try:
                with self._context.fail_together():
                    self._evaluation = self._make_evaluation()
            finally:
                self._making_ready = False
        return self._ready_with_optimizers() if self._evaluation is None else self._evaluation

    def _ready_with_optimizers(self) -> Run:
        """Call `_ready`, for an evaluation whose weights an optimizer computes from its state."""
        try:
            return self._ready()
        except Exception as error:
            annotate(
                error,
                "raised while the optimizer of the checkpoint was created, which computes the evaluated weights. Give "
                "the module the optimizer and the training data of the run. Or evaluate the export of the run: "
                "TrainerArguments(resume=False, init_weights_from='.../checkpoint-model-...').",
            )
            raise

    def _make_evaluation(self) -> Run | None:
        """Make a run without optimizers; None if the evaluated weights depend on the state of an optimizer."""
        from trainstack.trainer.run.agreement import agree_on_setup
        from trainstack.trainer.run.run import Run
        from trainstack.trainer.run.run_states import resume_evaluation

        agree_on_setup(self._context)
        checkpoint = self._restore(to_train=False)
        if trained_weights_of(checkpoint.metadata) is not None:
            return None
        run = Run(self._context, self._stopper, self._saver, self._metrics, trains=False)
        resume_evaluation(run, checkpoint)
        return run

    def _prepared(self, name: str) -> Run:
        """Return the run for the member `name`; an error while the trainer or the module is being prepared."""
        if self._run is None and (self._making_ready or not self._is_made):
            raise ConfigurationError(
                f"trainer.{name} was used before the optimizers and the plan exist. Use it in on_ready or later, not "
                "in on_init or in the methods that create optimizers and loaders."
            )
        return self._ready()

    def _take_checkpoint(
        self, *, pinned: bool = False, after: BaseException | None = None, everywhere: bool = False
    ) -> Checkpoint:
        from trainstack.trainer.run.run_states import take_checkpoint

        made = take_checkpoint(self._ready(), self.get_state, pinned=pinned, after=after, everywhere=everywhere)
        made.lineage = lineage_of(self._context, made.metadata or {})
        return made

    def load_checkpoints(self) -> Checkpoint:
        """Return the checkpoint to continue from, as `args.resume` selects it; an empty one if there is none.

        Large tensors in it are read from the files when they are used, and are read-only.
        """
        return self._saver.load()

    def get_state(self) -> dict[str, Any]:
        """Return counters and states of optimizers, schedulers and running means. Override it to add to the state."""
        return self._ready().loop.get_state()

    def update_state(self, state: Mapping[str, Any] | None) -> None:
        """Restore `state` from `get_state`; None has no effect.

        Raises:
            CheckpointMismatchError: the optimizers or schedulers differ from those of the checkpoint.
        """
        if state:
            run, fresh = self._ready(), self.args.reset_optimizers_schedulers
            run.loop.update_state(state, fresh_optimizers=fresh, log=run.log)
            if not self._making_ready:  # a resume reports these with its other changes
                report_changes(run.loop.optimizer_states.changes, self._context)
