"""One run: the loop with its data, its reports and its checkpoints, epoch by epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import SequentialSampler

from trainstack.backends import Clipping, Communicator, TrainerBackend, Workload, World
from trainstack.errors import ModuleContractError, PrivacyBudgetError, annotate
from trainstack.stage import Stage
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.collector import as_arguments
from trainstack.trainer.evaluation import Evaluation, eval_mode, evaluation_batches, named_loaders
from trainstack.trainer.history import RunHistory
from trainstack.trainer.hooks import Hooks
from trainstack.trainer.logs import RunLogger
from trainstack.trainer.loop import TrainLoop, train_windows
from trainstack.trainer.module_interface import ModuleInterface
from trainstack.trainer.optimizers import checked_optimizers_schedulers
from trainstack.trainer.order import mix
from trainstack.trainer.progress import NoProgress, ProgressDisplay
from trainstack.trainer.reporting import Reporter
from trainstack.trainer.run_state import RunState
from trainstack.trainer.seeding import capture_rng, isolated_rng, restore_rng
from trainstack.trainer.signatures import check_signatures
from trainstack.trainer.snapshot import finite_tensors
from trainstack.trainer.sources import Window
from trainstack.trainer.training_data import TrainingData

MOST_PENDING_STEPS = 1000
"""The losses of at most so many steps wait on the device, however far apart log points are."""


class Run:
    """A module made ready on a stack.

    Args:
        module: its state is restored already; its optimizers' is not yet.
        args: of the trainer.
        stack: the outermost layer, opened.
        world: what `open` returned.
        state: where the run stands.
        history: where metrics go.

    Attributes:
        data: the training data and the plan.
        loop: what the loop works with.
        pending_rng: the random state to go on with; used up when training goes on.
        epoch_rng: the random state that the epoch under way began with.
        busy: whether a step, a hook or a validation is under way, so that a checkpoint has to wait.
        save_asked: whether one waits.
        watched: names of the parameters and buffers that must stay finite.
    """

    def __init__(
        self,
        module: ModuleInterface,
        args: TrainerArguments,
        stack: TrainerBackend,
        world: World,
        state: RunState,
        history: RunHistory,
    ) -> None:
        self.module, self.args, self.stack, self.world = module, args, stack, world
        self.state, self.history = state, history
        self.log = RunLogger(args.log_level)
        check_signatures(module, self.log)
        self.pending_rng: Mapping[str, Any] | None = None
        self.epoch_rng: Mapping[str, Any] | None = None
        self.busy = self.save_asked = False
        with isolated_rng(mix(state.seed), world.device):
            self.data = TrainingData(module, args, world, state.seed, self.log)
        module.plan, module._history, module._run_state = self.data.plan, RunHistory(), state
        self.hooks = Hooks(module)
        self.loop = self._make_loop()
        module._history = history  # what a layer tried out on the module was written elsewhere
        self.watched = finite_tensors(module, self.loop.work)

    def _make_loop(self) -> TrainLoop:
        args, plan = self.args, self.data.plan
        epochs = args.epochs - self.state.epoch if args.reset_optimizers_schedulers else args.epochs
        made = self.module.get_optimizers_schedulers(plan.estimated_global_steps_per_epoch, max(epochs, 1))
        optimizers, schedulers = checked_optimizers_schedulers(made, self.module, self.log)
        work = Workload.of(self.module, optimizers, self.world, _clipping(args), self.data.training_set)
        work = self.stack.prepare(work)
        keep = args.collect_train_outputs
        return TrainLoop(
            self.stack,
            work,
            self.hooks,
            schedulers=schedulers,
            state=self.state,
            skip_nonfinite=args.nonfinite == "skip",
            keep_epoch_outputs=self.hooks.epoch_outputs if keep == "auto" else bool(keep),
        )

    def train_epoch(self, reporter: Reporter, save: Callable[[bool], None], save_every: int | None) -> None:
        """Train what is left of the epoch under way, validate and save.

        Args:
            reporter: told at log points.
            save: writes a checkpoint; called with True at steps that are multiples of `save_every`.
            save_every: global steps, or None.
        """
        state, loop = self.state, self.loop
        self.busy = True
        windows = self._begin_epoch()
        reporter.start_epoch(state, self.data.plan)
        loop.attend = lambda: self._attend(reporter, save, save_every)
        loop.attend_at = self._next_attention(reporter, save_every)
        cap = self.args.max_train_steps_per_epoch
        try:
            train_windows(loop, islice(windows, None if cap is None else max(0, cap - state.steps_in_epoch)))
        except Exception as error:
            annotate(error, f"in epoch {state.epoch}, global step {state.current_step}")
            raise
        if not state.steps_in_epoch:
            raise ModuleContractError(
                f"the loader that get_train_dataloader returned for epoch {state.epoch} gave no batch at all. Return a "
                "loader over data; an iterator that is used up has to be made anew in each call."
            )
        reporter.end_training_epoch(state, loop.meter)
        self._end_train_epoch()
        self._validate(reporter)
        state.finish_epoch()
        reporter.end_epoch(state, self.data.plan)
        self._save(save, self.save_asked)

    def _begin_epoch(self) -> Iterator[Window]:
        """Call the hook and ask for data; within an epoch both see the random state that the epoch began with."""
        state, hook, device = self.state, self.hooks.begin_train_epoch, self.world.device
        within = state.steps_in_epoch > 0
        now = self.pending_rng or capture_rng(device)
        if within and self.epoch_rng is not None:
            restore_rng(self.epoch_rng, device)
        else:
            self.restore_rng_once()
            self.epoch_rng = capture_rng(device)
        if hook is not None:
            hook(state.global_step, state.epoch)
        windows = self.data.windows(state, self.stack.sampling)
        if within:
            restore_rng(now, device)
            self.pending_rng = None
            if self.loop.epoch_outputs is not None:
                self.log.warning(
                    f"resumed within epoch {state.epoch}: on_end_train_epoch gets the outputs of the steps from here "
                    "on, those before the interruption are gone."
                )
        return windows

    def _save(self, save: Callable[[bool], None], force: bool) -> None:
        """Save at a step boundary, where everything that goes into a checkpoint fits together."""
        self.busy = self.save_asked = False
        save(force)
        self.busy = True

    def evaluate(
        self, stage: Stage, loaders: Mapping[str, Any], *, keep: bool, reporter: Reporter | None = None
    ) -> dict[str, Any]:
        """Run the step of `stage` over each loader; returns outputs by loader where `keep` asks for them.

        Modes and random state are afterwards what they were before.
        """
        hook = self.hooks.end_val_epoch if stage is Stage.VAL else None
        step, collected, was_busy = self.state.global_step, dict[str, Any](), self.busy
        self.busy = True
        seed = mix(self.state.seed, stage.value, step, self.world.rank)
        with isolated_rng(seed, self.world.device), eval_mode(self.module):
            for key, loader in loaders.items():
                outputs = self._evaluate(
                    stage, key, loader, keep, NoProgress() if reporter is None else reporter.progress
                )
                if keep:
                    collected[key] = outputs
                if hook is not None:
                    hook(step, *(as_arguments(outputs) if keep and self.hooks.val_outputs else ()), key=key)
        self.busy = was_busy
        return collected

    def _evaluate(self, stage: Stage, key: str, loader: Any, keep: bool, progress: ProgressDisplay) -> Any:
        """Evaluate one loader on all processes; what they collected, joined, if it is to be kept."""
        world = self.world
        evaluation = Evaluation(self.stack, self.loop.work, stage, self.state.global_step, keep_outputs=keep)
        batches, in_parts = evaluation_batches(
            loader,
            seed=self.state.seed,
            world=world,
            limit=self.args.max_val_steps_per_epoch,
        )
        progress.start_validation(key, None)
        evaluation.run(batches, progress)
        progress.end_validation()
        comm = world.comm if in_parts else Communicator()
        if not sum(comm.gather(evaluation.batches)):
            self.log.warning(f"the {stage.name.lower()} loader {key!r} gave no batch at all.")
        self._record_loss(stage, key, evaluation.mean_loss(comm))
        if evaluation.outputs is None:
            return None
        outputs = evaluation.outputs.all_outputs
        return self.stack.gather(outputs) if in_parts else outputs

    def val_loaders(self) -> dict[str, Any]:
        """The module's validation loaders by name; empty if it has none."""
        loaders = self.module.get_val_dataloaders(sampler=SequentialSampler, batch_size=self.args.val_batch_size)
        return named_loaders(loaders, "get_val_dataloaders")

    def _validate(self, reporter: Reporter) -> None:
        with isolated_rng(mix(self.state.seed), self.world.device):
            loaders = self.val_loaders()
        if loaders:
            self.evaluate(Stage.VAL, loaders, keep=self.hooks.val_outputs, reporter=reporter)

    def _end_train_epoch(self) -> None:
        hook, collector = self.hooks.end_train_epoch, self.loop.epoch_outputs
        if hook is not None and collector is not None and self.hooks.epoch_outputs and collector.is_empty:
            self.log.warning("on_end_train_epoch is left out: the outputs it takes were lost in the interruption.")
        elif hook is not None:
            outputs = self.stack.gather(collector.all_outputs) if collector is not None else []
            hook(self.state.global_step, *(as_arguments(outputs) if self.hooks.epoch_outputs else ()))
        if collector is not None:
            collector.reset()

    def _record_loss(self, stage: Stage, key: str, loss: float | None) -> None:
        if loss is not None:
            name = stage.name.lower() if key == "default" else f"{stage.name.lower()}/{key}"
            step, epoch = self.state.global_step, self.state.epoch
            self.history.update_metric(f"{name}/loss", loss, step=step, epoch=epoch)

    def _attend(self, reporter: Reporter, save: Callable[[bool], None], save_every: int | None) -> int:
        """What is due at this step: log, save, paint. Returns the next step at which something is."""
        state, step = self.state, self.state.global_step
        if step % self.args.log_interval == 0:
            reporter.log_point(state, self.loop.meter, self.loop.work.optimizers)
        elif step % MOST_PENDING_STEPS == 0:  # at the same steps on every process
            self.loop.meter.drain()
            reporter.write()
        if self.save_asked or (save_every is not None and step % save_every == 0):
            self._save(save, True)
        if state.steps_in_epoch >= reporter.progress.next_look:
            reporter.look(state)
        return self._next_attention(reporter, save_every)

    def _next_attention(self, reporter: Reporter, save_every: int | None) -> int:
        step, interval = self.state.global_step, self.args.log_interval
        look = reporter.progress.next_look - self.state.steps_in_epoch
        due = [interval - step % interval, MOST_PENDING_STEPS - step % MOST_PENDING_STEPS, max(1, look)]
        if save_every is not None:
            due.append(save_every - step % save_every)
        return step + min(due)

    @property
    def why_over(self) -> str | None:
        """Why no further step may be made, as a sentence; None if one may."""
        sampling = self.stack.sampling
        return sampling.why_over() if sampling is not None and sampling.steps_left() == 0 else None

    def refuse_over(self) -> None:
        """Refuse to train when no step may be made.

        Raises:
            PrivacyBudgetError: saying what is used up.
        """
        if self.state.epoch < self.args.epochs and self.why_over is not None:
            raise PrivacyBudgetError(self.why_over)

    def restore_rng_once(self) -> None:
        """Go on with the random state of the checkpoint, if that has not happened yet."""
        if self.pending_rng is not None:
            restore_rng(self.pending_rng, self.world.device)
            self.pending_rng = None


def _clipping(args: TrainerArguments) -> Clipping:
    if args.clip_grad_value is not None:
        return Clipping(kind="value", limit=args.clip_grad_value)
    if args.clip_grads:
        return Clipping(kind="norm", limit=args.max_grad_norm)
    return Clipping()
