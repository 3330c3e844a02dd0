"""`Evaluator` evaluates every sample of every loader once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.data import SequentialSampler

from trainstack.backends import Communicator, Workload, World
from trainstack.backends.processes.gathering import gather_to_main
from trainstack.errors import ConfigurationError, ModuleContractError, PrivacyError, annotate
from trainstack.stage import Stage
from trainstack.trainer.context import RunContext
from trainstack.trainer.core.order import mix
from trainstack.trainer.core.random_state import isolated_rng
from trainstack.trainer.core.state_tree import copied
from trainstack.trainer.data.epochs import set_epoch
from trainstack.trainer.data.record_sources import shares_records
from trainstack.trainer.data.sharding import StreamDigest, check_not_presharded, refuse_unlike_streams, stream_name
from trainstack.trainer.data.step_batches import unsupported_order_reason
from trainstack.trainer.data.torch_classes import makes_lists_of_fields
from trainstack.trainer.data.training_data import TrainingData
from trainstack.trainer.evaluation.collector import as_arguments
from trainstack.trainer.evaluation.loader_pass import (
    LoaderPass,
    check_batch_size,
    count_batches,
    eval_mode,
    evaluation_batches,
    evaluation_pass,
    loaders_over,
    named_loaders,
    on_main_only,
    sample_count_mismatch,
    samples_if_known,
)
from trainstack.trainer.evaluation.logged_means import add_loader, mean_of_loaders
from trainstack.trainer.evaluation.metrics import MetricPass, Metrics, numbers_in
from trainstack.trainer.evaluation.outputs import EvaluationOutputs, Kept, check_kept
from trainstack.trainer.evaluation.rounds import Rounds
from trainstack.trainer.events import Event
from trainstack.trainer.events.hooks import Hooks
from trainstack.trainer.module_interface import ModuleInterface
from trainstack.trainer.reporting.reporter import Reporter
from trainstack.trainer.tracking.history import RunHistory
from trainstack.trainer.tracking.progress import NoProgress
from trainstack.trainer.tracking.provenance import Provenance


class StopRequests(Protocol):
    """The methods of `Stopper` for a validation within training. A protocol, because imports never run up the tree."""

    def interrupts(self) -> bool:
        """Whether to interrupt the validation."""

    def stop_if_requested(self) -> None:
        """Stop on all processes, if any has a request."""


class BegunValidation(Protocol):
    """The progress of the beginning of a validation.

    Attributes:
        announced: whether the subscribers of `VALIDATION_BEGIN` have been called in this process.
    """

    announced: bool


class Validations(Protocol):
    """The methods of `Beginnings` for a validation within training. A protocol for the same reason."""

    def validation(self) -> AbstractContextManager[BegunValidation]:
        """A block for the calls that begin a validation. They change the state once."""

    def whole_or_undone(self) -> AbstractContextManager[None]:
        """A block that restores the states if it raises."""

    def end_validation(self) -> None:
        """Note that the validation has finished."""


class Evaluator:
    """Runs the steps of validation, test and prediction, within training or separately.

    Args:
        context: the context of the run.
        metrics: the metrics, which are updated in validation and test.
        data: the training data, with the plan and the samples of `overfit_batches`.
        hooks: the hooks of the module.
        stopper: tells whether to interrupt a validation within training.
        validations: keeps the state from before a validation within training.
        work: returns the current workload.

    Attributes:
        metrics: the metrics of the run.
        has_validated: whether a validation within training has finished.
    """

    has_validated: bool

    def __init__(
        self,
        context: RunContext,
        *,
        metrics: Metrics,
        data: TrainingData,
        hooks: Hooks,
        stopper: StopRequests,
        validations: Validations,
        work: Callable[[], Workload],
    ) -> None:
        self.metrics = metrics
        self._context, self._data, self._hooks, self._stopper, self._work = context, data, hooks, stopper, work
        self._validations, self._logged = validations, set[str]()
        self._public = dict[str, Any]()  # datasets that were checked to have no record of the training data
        self.has_validated = False
        self._running = set[Stage]()

    @property
    def _batch_size(self) -> int:
        return self._context.args.val_batch_size or self._data.plan.micro_batch

    def loaders_of(self, stage: Stage, batch_size: int | None = None) -> dict[str, Any]:
        """The module's loaders for `stage` by name, by default with the batch size of the arguments; empty if it has
        none."""
        module, where = self._context.module, "get_val_dataloaders" if stage is Stage.VAL else "get_test_dataloaders"
        size = batch_size or self._batch_size
        few = self._data.overfit_val_loader(size) if stage is Stage.VAL else None
        validates = self._context.val_step or type(module).val_step is not ModuleInterface.val_step
        named = named_loaders(getattr(module, where)(sampler=SequentialSampler, batch_size=size), where)
        if few is not None and validates:
            return dict.fromkeys(named or ["default"], few)  # keeps the names of metrics, for monitors
        return named

    def validate(self, reporter: Reporter) -> None:
        """Validate within or after an epoch of training. Does nothing if the module has no validation data."""
        with self._validations.validation() as begun:
            with self._isolated_rng():
                loaders = self.loaders_of(Stage.VAL)
            if loaders and not begun.announced:
                begun.announced = True
                with isolated_rng(self._seed(Stage.VAL), self._context.world.device), self._only_one(Stage.VAL):
                    self._context.events.fire(Event.VALIDATION_BEGIN)
        if loaders:
            self.evaluate(Stage.VAL, loaders, keep=self._hooks.val_outputs, reporter=reporter)
        else:
            self._finish()

    def sanity_check(self, batches: int | None) -> dict[str, Any]:
        """Run `val_step` and the metrics on the first batches of each loader. The caller restores all states.

        Args:
            batches: the number of batches on each process; None for all.

        Returns:
            losses and metrics by name.
        """
        with self._isolated_rng():
            loaders = self.loaders_of(Stage.VAL)
        try:
            with self._context.sink.redirect(self._fresh_history(), self._context.state) as history:
                most = 1 << 62 if batches is None else batches  # `only=None` would be a real validation
                return self.evaluate(Stage.VAL, loaders, keep=False, history=history, only=most).metrics
        except Exception as error:
            annotate(error, "while sanity_val_steps tested the validation before training")
            raise

    def loaders_over(self, given: Any, batch_size: int | None, collate_fn: Any, where: str) -> dict[str, Any]:
        """Loaders by name for a loader, a data set or a dict of them. `where` names the caller in errors."""
        check_batch_size(batch_size)
        if given is None:
            raise ConfigurationError(f"{where} gave None instead of data. Give a loader or a data set.")
        made = loaders_over(self._context.module, given, self._batch_size, batch_size, collate_fn)
        return named_loaders(made, where)

    def run_standalone(
        self,
        stage: Stage,
        dataloaders: Any,
        log: bool | None,
        keep_outputs: Kept = True,
        *,
        batch_size: int | None = None,
        collate_fn: Any = None,
        pad_value: float | None = None,
    ) -> EvaluationOutputs:
        """Evaluate the module's loaders for `stage`, or others.

        Args:
            stage: VAL or TEST.
            dataloaders: a loader, a data set, a dict of them by name, or None for the module's loaders.
            log: whether to record metrics in the history; None to record them only within training.
            keep_outputs: whether to collect outputs even if no hook needs them, and on which processes.
            batch_size: samples in a batch on each process, for data sets and the module's loaders.
            collate_fn: makes batches of data sets.
            pad_value: see `OutputCollector.all_outputs_alike`.
        """
        context = self._context
        recorded = context.history if log or (log is None and context.busy) else self._fresh_history()
        with context.sink.redirect(recorded, context.state) as history:
            if dataloaders is None:
                check_batch_size(batch_size)
                given = self.loaders_of(stage, batch_size)
            else:
                given = self.loaders_over(dataloaders, batch_size, collate_fn, "the caller")
            if not given and stage is Stage.TEST:
                raise ModuleContractError(
                    f"{type(context.module).__name__} has no test data. Define get_test_dataloaders(sampler, "
                    "batch_size)."
                )
            keep = self._kept(keep_outputs)
            outputs = self.evaluate(stage, given, keep=keep, history=history, pad_value=pad_value)
            if history is not context.history:
                names = sorted(history.get_metric_names())
                outputs.metrics = {name: history.get_latest_metric(name) for name in names} | outputs.metrics
            return outputs

    def _kept(self, asked: Kept) -> Kept:
        """The outputs to keep for the caller and for a hook.

        Raises:
            ConfigurationError: the caller wants them on some processes only, and a hook needs them on all.
        """
        check_kept(asked)
        if isinstance(asked, str) and self._hooks.val_outputs and self._context.world.size > 1:
            raise ConfigurationError(
                f"keep_outputs={asked!r}, and {type(self._context.module).__name__}.on_end_val_epoch gets the outputs "
                "on each process. Write keep_outputs=True, or remove the parameters for outputs from the hook."
            )
        return asked or self._hooks.val_outputs

    def evaluate(
        self,
        stage: Stage,
        loaders: Mapping[str, Any],
        *,
        keep: Kept,
        reporter: Reporter | None = None,
        history: RunHistory | None = None,
        only: int | None = None,
        pad_value: float | None = None,
    ) -> EvaluationOutputs:
        """Run the step of `stage` over each loader. Returns metrics, and outputs by loader if `keep` asks for them.

        Modes and random states are restored. A loader is marked as done before its hook is called, so that the hook is
        not called twice if it raises and `train()` is called again.

        Args:
            stage: the stage of the step.
            loaders: the loaders by name.
            keep: selects the processes that keep the outputs.
            reporter: given for a validation within training. It may be interrupted, and continues with the loaders that
                are not done.
            history: records the metrics; None for the history of the run.
            only: the number of batches on each process for a sanity check, which calls no hook; None for all batches.
            pad_value: see `OutputCollector.all_outputs_alike`.

        Raises:
            Stopped: the validation was interrupted.
            ConfigurationError: an evaluation of this stage is already running.
        """
        context, hooks = self._context, self._hooks
        state, world = context.state, context.world
        announced = stage is Stage.VAL and only is None
        hook = hooks.end_val_epoch if announced else None
        step, collected = state.global_step, EvaluationOutputs()
        seed, in_training = self._seed(stage), reporter is not None
        if context.stack.is_private:
            self._check_public(loaders)
        with self._evaluating(stage, seed, announced, in_training):
            self.metrics.check_loaders(list(loaders))
            done, logged = (state.finished_loaders, state.logged_means) if in_training else ([], {})
            left = {key: loader for key, loader in loaders.items() if key not in done}
            with self._busy(), evaluation_pass(context.stack, self._work()):
                for key, loader in left.items():
                    undone = self._validations.whole_or_undone() if in_training else nullcontext()
                    with isolated_rng(seed, world.device), eval_mode(context.module), undone:
                        outputs, values, means = self._evaluate(stage, key, loader, keep, reporter, only, pad_value)
                    collected.metrics |= self._record(stage, key, values, history or context.history)
                    add_loader(logged, means)
                    if keep and not (keep == "main" and not world.is_main):
                        collected[key] = outputs
                    if in_training:
                        state.finished_loaders = [*state.finished_loaders, key]
                    if key == next(reversed(left)):
                        collected.metrics |= self._record_logged(logged)
                    if hook is not None:
                        hook(step, *(as_arguments(outputs) if keep and hooks.val_outputs else ()), key=key)
        return collected

    def _check_public(self, loaders: Mapping[str, Any]) -> None:
        """Refuse an evaluation on the training data if the evaluation data are declared public.

        Copies of records in other memory are not detected.

        Raises:
            PrivacyError: a loader reads records of the training data set.
        """
        if not any(layer.public_validation for layer in self._context.stack.layers()):
            return
        training = self._data.dataset
        for key, loader in loaders.items():
            dataset = getattr(loader, "dataset", None)
            if self._public.get(key) is dataset or not isinstance(dataset, Sized):
                continue
            if shares_records(dataset, training):
                raise PrivacyError(
                    f"the loader {key!r} reads records of the training data set, and public_validation=True declares "
                    "the data of validations and tests public. Validate on other data, or remove public_validation."
                )
            self._public[key] = dataset

    @contextmanager
    def _evaluating(self, stage: Stage, seed: int, announced: bool, in_training: bool) -> Iterator[None]:
        """A block inside the contexts of callbacks, and between the events of a validation if it is `announced`.

        Subscribers use the random state of the evaluation. An interrupted validation does not fire its last event, and
        a sanity check is not announced. The first event of a validation within training is fired before this block.
        """
        context, events = self._context, self._context.events
        # with such a layer, a hook may log a private attribute that train_step has set
        keeps_values = any(layer.keeps_values for layer in context.stack.layers())
        provenance = Provenance.PRIVATE if keeps_values else Provenance.EVALUATION
        with isolated_rng(seed, context.world.device), context.sink.evaluating(provenance):
            with self._only_one(stage):
                if announced and not in_training:
                    events.fire(Event.VALIDATION_BEGIN)
                with events.evaluation_contexts():
                    yield
            if in_training:
                self._finish()
            if announced:
                history = context.sink.history  # for a separate validation, this is not the history of the run
                measured = history.values_at(context.state.global_step) if events.has(Event.VALIDATION_END) else {}
                events.fire(Event.VALIDATION_END, measured)

    def _finish(self) -> None:
        """Note that a validation within training has finished."""
        self._context.state.finish_validation()
        self._validations.end_validation()
        self.has_validated = True

    @contextmanager
    def _busy(self) -> Iterator[None]:
        before, self._context.busy = self._context.busy, True
        try:
            yield
        finally:
            self._context.busy = before

    @contextmanager
    def _only_one(self, stage: Stage) -> Iterator[None]:
        if stage in self._running:
            name = "validate" if stage is Stage.VAL else stage.name.lower()
            raise ConfigurationError(
                f"trainer.{name}() was called within an evaluation of the same stage, so its hooks would call it again "
                f"and again. Call it in on_end_train_step, on_validation_end or on_epoch_end, or return the other data "
                "as a second loader from get_val_dataloaders."
            )
        self._running.add(stage)
        try:
            yield
        finally:
            self._running.discard(stage)

    def _fresh_history(self) -> RunHistory:
        """A temporary history with the guard of the run's history."""
        return RunHistory(guard=self._context.history.guard)

    def _seed(self, stage: Stage) -> int:
        state = self._context.state
        return mix(state.seed, stage.value, state.global_step, self._context.world.rank)

    def _isolated_rng(self) -> AbstractContextManager[None]:
        return isolated_rng(mix(self._context.state.seed), self._context.world.device)

    def _evaluate(
        self,
        stage: Stage,
        key: str,
        loader: Any,
        keep: Kept,
        reporter: Reporter | None,
        only: int | None,
        pad_value: float | None,
    ) -> tuple[Any, dict[str, Any], dict[str, tuple[float, float]]]:
        """Evaluate one loader on all processes.

        Returns:
            the joined outputs, if they are kept; the metrics; the mean and weight of each logged value.
        """
        context, stack, state = self._context, self._context.stack, self._context.state
        world, work = context.world, self._work()
        evaluation = LoaderPass(stack, work, stage, state.global_step, keep_outputs=bool(keep), loader=loader)
        limit = only or (context.args.max_val_steps_per_epoch if stage is Stage.VAL else None)
        digest = StreamDigest()
        batches, in_parts = self._batches(stage, loader, limit, digest)
        measured = None if stage is Stage.PREDICT else self.metrics.over(key, world, stage, in_parts=in_parts)
        evaluation.is_consumed = measured is not None or not self._expects_loss(stage)
        if reporter is not None and world.is_main:
            reads_all = on_main_only(context.module, world, stage, context.args.data_sharding_of(stage))
            reporter.progress.start_validation(key, count_batches(loader, World() if reads_all else world, limit))
        self._run_pass(evaluation, batches, measured, reporter, announced=only is None)
        for message in (evaluation.loss_message, evaluation.count_message):
            self._warn_once(message)
        comm = world.comm if in_parts else Communicator()
        # Outputs of one value lose their list in a prediction. A rank without a batch learns of it from the others.
        is_single = stage is Stage.PREDICT and evaluation.outputs is not None and evaluation.outputs.is_single
        counts = evaluation.batches, evaluation.samples, is_single
        facts = *counts, evaluation.stopped_early, (digest.batches, digest.value)
        by_rank = world.comm.gather(facts, f"the end of a {stage.name.lower()} pass over the loader {key!r}")
        self._check_pass(stage, key, loader, by_rank, in_parts=in_parts, whole=limit is None)
        loss, logged = evaluation.means(comm)
        values = {"loss": loss, **({} if measured is None else measured.results(comm))}
        outputs = None if evaluation.outputs is None else evaluation.outputs.all_outputs_alike(comm, pad_value)
        outputs = self._gathered(stage, outputs, keep) if in_parts else outputs
        return outputs[0] if outputs and any(single for _, _, single, *_ in by_rank) else outputs, values, logged

    def _run_pass(
        self,
        evaluation: LoaderPass,
        batches: Iterator[tuple[Any, int | None]],
        measured: MetricPass | None,
        reporter: Reporter | None,
        *,
        announced: bool,
    ) -> None:
        """Run `evaluation` on the batches. It runs in rounds if all ranks must make the same forward passes."""
        stage, sink = evaluation.stage, self._context.sink
        progress = NoProgress() if reporter is None else reporter.progress
        should_stop = None if reporter is None else self._stopper.interrupts
        rounds = self._rounds(stage, batches, should_stop)
        if rounds is not None:  # ranks decide together whether to stop
            batches, should_stop = iter(rounds), None
        batches, on_batch = self._with_events(stage, batches, measured) if announced else (batches, None)
        with nullcontext() if stage is Stage.PREDICT else sink.collecting(evaluation.logged.add):
            evaluation.run(
                batches,
                progress,
                should_stop=should_stop,
                on_batch=on_batch or (None if measured is None else measured.add),
            )
        progress.end_validation()
        if rounds is not None:
            evaluation.stopped_early = rounds.stopped_early

    def _gathered(self, stage: Stage, outputs: Any, keep: Kept) -> Any:
        """Gather the outputs of all ranks, as far as `keep` asks for them."""
        if keep == "main":
            return gather_to_main(self._context.world.comm, outputs, f"the outputs of {stage.name.lower()}")
        return self._context.stack.gather(outputs) if keep is True else outputs

    def _rounds(
        self, stage: Stage, batches: Iterator[tuple[Any, int | None]], should_stop: Callable[[], bool] | None = None
    ) -> Rounds | None:
        """`batches` in rounds, with the same number of forward passes on all ranks; None if the numbers may differ."""
        context = self._context
        if context.world.size == 1 or not any(layer.evaluates_together for layer in context.stack.layers()):
            return None
        return Rounds(batches, context.stack, self._work(), stage, context.state, should_stop)

    def _with_events(
        self, stage: Stage, batches: Iterator[tuple[Any, int | None]], measured: MetricPass | None
    ) -> tuple[Iterator[tuple[Any, int | None]], Callable[[Any, Any], None] | None]:
        """`batches` with an event before each, and a function to call after each; None if no event follows a batch."""
        begin = self._context.events.bound(Event.VALIDATION_BATCH_BEGIN)
        end = self._context.events.bound(Event.VALIDATION_BATCH_END)

        def announced() -> Iterator[tuple[Any, int | None]]:
            for pair in batches:
                begin(pair[0], stage)  # type: ignore[misc]
                yield pair

        def after(outputs: Any, batch: Any) -> None:
            if measured is not None:
                measured.add(outputs, batch)
            end(batch, outputs, stage)  # type: ignore[misc]

        return announced() if begin is not None else batches, after if end is not None else None

    def stream(self, stage: Stage, loader: Any) -> Iterator[tuple[Any, int | None]]:
        """Yield the outputs of the step of `stage` for each batch of `loader`, in data set order, on all processes.

        The outputs are on the CPU. The second item is the number of samples in the batch; None if it is unknown. Each
        round evaluates one batch on each process. Between two rounds, the modes of the module and the random states are
        restored.
        """
        context, world = self._context, self._context.world
        if context.stack.is_private:
            self._check_public({"default": loader})
        digest, number = StreamDigest(), 0
        pairs, in_parts = self._batches(stage, loader, None, digest, in_turns=True)
        fields = makes_lists_of_fields(loader)
        batches = ((one, samples_if_known(one, lists_are_fields=fields) if n is None else n) for one, n in pairs)
        rounds = self._rounds(stage, batches)
        take = partial(next, batches, None) if rounds is None else rounds.next_batch
        while True:
            seed = mix(self._seed(stage), number)
            with context.fail_together(), self._evaluating(stage, seed, announced=False, in_training=False):
                own = self._evaluate_one(stage, take, number)
                place = f"round {number} of a {stage.name.lower()} stream"
                by_rank = world.comm.gather(own, place) if in_parts else [own]
            if not any(by_rank):
                break
            yield from (one for part in by_rank for one in part)
            number += 1
        if not number:
            context.log.warning(f"the {stage.name.lower()} loader gave no batch at all.")
        digests = world.comm.gather((digest.batches, digest.value), f"the end of a {stage.name.lower()} stream")
        refuse_unlike_streams(stream_name(loader), digests, stage.name.lower())

    def _evaluate_one(
        self, stage: Stage, take: Callable[[], tuple[Any, int | None] | None], number: int
    ) -> list[tuple[Any, int | None]]:
        """The outputs for the next batch of `take` and its number of samples, in a list; empty without a batch."""
        context, work = self._context, self._work()
        try:
            with self._busy(), evaluation_pass(context.stack, work), eval_mode(context.module), torch.no_grad():
                pair = take()
                if pair is None:
                    return []
                outputs = context.stack.forward(work, stage, pair[0], context.state.global_step)
                return [(copied(outputs, on_host=True), pair[1])]
        except Exception as error:
            annotate(error, f"in batch {number} of a {stage.name.lower()} stream")
            raise

    def _batches(
        self, stage: Stage, loader: Any, limit: int | float | None, digest: StreamDigest, in_turns: bool = False
    ) -> tuple[Iterator[tuple[Any, int | None]], bool]:
        """The batches for this rank, and whether the other ranks evaluate the rest."""
        context, world, name = self._context, self._context.world, stage.name.lower()
        sharding = context.args.data_sharding_of(stage)
        check_not_presharded(loader, world.size, sharding, name)
        set_epoch(loader, context.state.epoch, in_own_order=unsupported_order_reason(loader) is not None)
        on_main = on_main_only(context.module, world, stage, sharding)
        if on_main and world.rank:
            return iter(()), True
        batches, in_parts = evaluation_batches(
            loader,
            seed=context.state.seed,
            world=World(device=world.device) if on_main else world,
            limit=limit,
            fast_paths=self._work().fast_paths,
            sharding=sharding,
            digest=digest,
            in_turns=in_turns,
        )
        return batches, in_parts or on_main

    def _check_pass(
        self, stage: Stage, key: str, loader: Any, by_rank: list[Any], *, in_parts: bool, whole: bool
    ) -> None:
        """Check the number of batches and samples, early stops and digests of all ranks."""
        name = f"{stage.name.lower()} loader {key!r}"
        if any(stopped_early for *_, stopped_early, _ in by_rank):
            self._stopper.stop_if_requested()
        refuse_unlike_streams(stream_name(loader), [digest for *_, digest in by_rank], stage.name.lower())
        presharded = in_parts and self._context.args.data_sharding_of(stage) == "loader"
        if not any(batches for batches, *_ in by_rank):
            self._context.log.warning(f"the {name} gave no batch at all.")
        elif whole and not (presharded and unsupported_order_reason(loader)):
            counts = [samples for _, samples, *_ in by_rank]
            mismatch = sample_count_mismatch(loader, counts if in_parts else [counts[self._context.world.rank]])
            self._warn_once(mismatch and f"{name}: {mismatch}")

    def _expects_loss(self, stage: Stage) -> bool:
        """Whether outputs without a loss are probably a mistake, by the hooks and the module."""
        return stage is Stage.VAL and not self._hooks.val_outputs and not self._context.module._may_lack_loss

    def _warn_once(self, message: str | None) -> None:
        if message is not None and message not in self._logged:
            self._logged.add(message)
            self._context.log.warning(message)

    def _record(self, stage: Stage, key: str, values: Mapping[str, Any], history: RunHistory) -> dict[str, Any]:
        """Record the numbers among `values` by their full names. Returns all values by these names."""
        state, named = self._context.state, dict[str, Any]()
        place = stage.name.lower() if key == "default" else f"{stage.name.lower()}/{key}"
        for name, value in values.items():
            if name == "loss" and value is None:
                continue
            for inner, number in numbers_in(name, value):
                full = f"{place}/{inner}"
                if number is None:
                    named[full] = value
                    self._warn_once(
                        f"{full} is not one number, so validate and test return it, and it is not recorded."
                    )
                else:
                    self._context.sink.claim(full)
                    named[full] = float(number)
                    when = {"step": state.global_step, "epoch": state.epoch}
                    history.update_metric(full, named[full], **when, provenance=Provenance.EVALUATION)
        return named

    def _record_logged(self, logged: Mapping[str, list[list[float]]]) -> dict[str, float]:
        """Record the means of the logged values over all loaders. Returns them by name."""
        means = {name: mean_of_loaders(parts) for name, parts in logged.items()}
        for name, mean in means.items():
            self._context.sink.record(name, mean)
        return means
