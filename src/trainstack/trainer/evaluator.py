"""Evaluating a run's module: every sample of every loader once, whoever asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import SequentialSampler

from trainstack.backends import Communicator
from trainstack.errors import ModuleContractError, annotate
from trainstack.stage import Stage
from trainstack.trainer.collector import as_arguments
from trainstack.trainer.evaluated import EvaluationOutputs
from trainstack.trainer.evaluation import Evaluation, eval_mode, evaluation_batches, miscounted, named_loaders
from trainstack.trainer.events.evaluating import with_events
from trainstack.trainer.history import RunHistory
from trainstack.trainer.metrics import Metrics, numbers_in
from trainstack.trainer.module_interface import ModuleInterface
from trainstack.trainer.order import mix
from trainstack.trainer.progress import NoProgress
from trainstack.trainer.reporting import Reporter
from trainstack.trainer.seeding import isolated_rng

if TYPE_CHECKING:
    from trainstack.trainer.run import Run


class Evaluator:
    """Runs the steps of validation, test and prediction, between training steps or by themselves.

    Attributes:
        metrics: of the run.
        has_validated: whether a validation that belongs to training has been finished.
    """

    def __init__(self, run: Run, metrics: Any = None) -> None:
        self._run = run
        self.metrics = Metrics(metrics, run.module)
        self._said = set[str]()
        self.has_validated = False

    def loaders_of(self, stage: Stage) -> dict[str, Any]:
        """The module's loaders for `stage` by name; empty if it has none."""
        run, where = self._run, "get_val_dataloaders" if stage is Stage.VAL else "get_test_dataloaders"
        size = run.args.val_batch_size or run.data.plan.micro_batch
        few = run.data.few_to_validate(size) if stage is Stage.VAL else None
        validates = run.module._own_val_step or type(run.module).val_step is not ModuleInterface.val_step
        if few is not None and validates:
            return {"default": few}
        return named_loaders(getattr(run.module, where)(sampler=SequentialSampler, batch_size=size), where)

    def validate(self, reporter: Reporter) -> None:
        """A validation within or after an epoch of training; nothing if the module has no data for it."""
        run = self._run
        with isolated_rng(mix(run.state.seed), run.world.device):
            loaders = self.loaders_of(Stage.VAL)
        if loaders:
            self.evaluate(Stage.VAL, loaders, keep=run.hooks.val_outputs, reporter=reporter)
        self.has_validated = True

    def try_out(self, batches: int) -> None:
        """Run `val_step` and the metrics over the first `batches` of each loader, and forget about it."""
        run = self._run
        with isolated_rng(mix(run.state.seed), run.world.device):
            loaders = self.loaders_of(Stage.VAL)
        try:
            with self._history(RunHistory()) as history:
                self.evaluate(Stage.VAL, loaders, keep=False, history=history, only=batches)
        except Exception as error:
            annotate(error, "while sanity_val_steps tried out the validation before training")
            raise

    def by_itself(self, stage: Stage, dataloaders: Any, log: bool | None) -> EvaluationOutputs:
        """Evaluate the module's loaders for `stage`, or others.

        Args:
            stage: VAL or TEST.
            dataloaders: one loader, a dict of them by name, or None for the module's.
            log: whether metrics go to the history; None for: only within training.
        """
        run = self._run
        with self._history(run.history if log or (log is None and run.busy) else RunHistory()) as history:
            given = named_loaders(dataloaders, "the caller") if dataloaders is not None else self.loaders_of(stage)
            if not given and stage is Stage.TEST:
                raise ModuleContractError(
                    f"{type(run.module).__name__} has no test data. Define get_test_dataloaders(sampler, batch_size)."
                )
            outputs = self.evaluate(stage, given, keep=True, history=history)
            if history is not run.history:
                logged = {name: history.get_latest_metric(name) for name in sorted(history.get_metric_names())}
                outputs.metrics = logged | outputs.metrics
            return outputs

    @contextmanager
    def _history(self, history: RunHistory) -> Iterator[RunHistory]:
        """A block in which what the module logs goes to `history`."""
        module = self._run.module
        before, module._history = module._history, history
        try:
            yield history
        finally:
            module._history = before

    @with_events
    def evaluate(
        self,
        stage: Stage,
        loaders: Mapping[str, Any],
        *,
        keep: bool,
        reporter: Reporter | None = None,
        history: RunHistory | None = None,
        only: int | None = None,
    ) -> EvaluationOutputs:
        """Run the step of `stage` over each loader; returns metrics, and outputs by loader where `keep` asks for them.

        Modes and random state are afterwards what they were before. With a `reporter` the pass is a part of training:
        it may be broken off, and loaders of an interrupted validation that are done already are left out. Metrics are
        recorded in `history`, the run's if None. With `only` so many batches a process, no hook is called.

        Raises:
            Stopped: it was broken off.
        """
        run = self._run
        hook = run.hooks.end_val_epoch if stage is Stage.VAL and only is None else None
        step, collected, was_busy = run.state.global_step, EvaluationOutputs(), run.busy
        seed = mix(run.state.seed, stage.value, step, run.world.rank)
        self.metrics.check_loaders(list(loaders))
        run.busy = True
        done = 0 if reporter is None else run.state.loaders_done
        try:
            run.stack.begin_evaluation(run.loop.work)
            for key, loader in islice(loaders.items(), done, None):
                with isolated_rng(seed, run.world.device), eval_mode(run.module):
                    outputs, values = self._evaluate(stage, key, loader, keep, reporter, only)
                    collected.metrics |= self._record(stage, key, values, history or run.history)
                    if keep:
                        collected[key] = outputs
                    if hook is not None:
                        hook(step, *(as_arguments(outputs) if keep and run.hooks.val_outputs else ()), key=key)
                if reporter is not None:
                    run.state.finish_loader()
        finally:
            run.busy = was_busy
        return collected

    def _evaluate(
        self, stage: Stage, key: str, loader: Any, keep: bool, reporter: Reporter | None, only: int | None
    ) -> tuple[Any, dict[str, Any]]:
        """Evaluate one loader on all processes; what they collected, joined, if it is to be kept, and the metrics."""
        run = self._run
        world = run.world
        evaluation = Evaluation(run.stack, run.loop.work, stage, run.state.global_step, keep_outputs=keep)
        limit = only or (run.args.max_val_steps_per_epoch if stage is Stage.VAL else None)
        batches, in_parts = evaluation_batches(
            loader, seed=run.state.seed, world=world, limit=limit, fast_paths=run.loop.work.fast_paths
        )
        measured = None if stage is Stage.PREDICT else self.metrics.over(key, world, in_parts=in_parts)
        progress = NoProgress() if reporter is None else reporter.progress
        progress.start_validation(key, None)
        evaluation.run(
            batches,
            progress,
            interrupted=None if reporter is None else run.stopper.interrupts,
            also=None if measured is None else measured.add,
        )
        progress.end_validation()
        if evaluation.slip is not None:
            self._say_once(evaluation.slip)
        comm = world.comm if in_parts else Communicator()
        told = world.comm.gather((evaluation.batches, evaluation.samples, evaluation.broken_off))
        if any(broken_off for *_, broken_off in told):
            run.stopper.settle()
        if not sum(batches for batches, *_ in told):
            run.log.warning(f"the {stage.name.lower()} loader {key!r} gave no batch at all.")
        elif limit is None:
            counts = [samples for _, samples, _ in told] if in_parts else [evaluation.samples]
            which, what = f"{stage.name.lower()} loader {key!r}", miscounted(loader, counts)
            if what is not None:
                self._say_once(f"{which}: {what}")
        values = {"loss": evaluation.mean_loss(comm), **({} if measured is None else measured.results(comm))}
        if evaluation.outputs is None:
            return None, values
        outputs = evaluation.outputs.all_outputs
        return (run.stack.gather(outputs) if in_parts else outputs), values

    def _say_once(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._run.log.warning(what)

    def _record(self, stage: Stage, key: str, values: Mapping[str, Any], history: RunHistory) -> dict[str, Any]:
        """Record what is a number under its full name; returns everything under such names."""
        state, named = self._run.state, dict[str, Any]()
        place = stage.name.lower() if key == "default" else f"{stage.name.lower()}/{key}"
        for name, value in values.items():
            if name == "loss" and value is None:
                continue
            for inner, number in numbers_in(name, value):
                full = f"{place}/{inner}"
                if number is None:
                    named[full] = value
                    self._say_once(
                        f"{full} is not one number, so it is returned by validate and test, and not recorded."
                    )
                else:
                    named[full] = float(number)
                    history.update_metric(full, named[full], step=state.global_step, epoch=state.epoch)
        return named
