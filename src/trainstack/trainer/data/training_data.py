"""`TrainingData` gets the loader of the module, and derives order and plan from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.utils.data import RandomSampler

from trainstack.backends import World
from trainstack.backends.fast_paths import fast_paths_enabled
from trainstack.backends.random_streams import RandomStreams
from trainstack.backends.workload import Sampling, TrainingSet
from trainstack.errors import CheckpointMismatchError, ConfigurationError, ModuleContractError, PrivacyError, annotate
from trainstack.stage import Stage
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.order import OrderCursor, RankSlice
from trainstack.trainer.core.plan import TrainingPlan
from trainstack.trainer.core.random_state import LoaderGenerators, Seed
from trainstack.trainer.core.state import RunState, is_stateful
from trainstack.trainer.data.as_is import compare_first_step
from trainstack.trainer.data.combined_loaders import CombinedLoader, Combiner
from trainstack.trainer.data.epoch_lengths import EpochLengths
from trainstack.trainer.data.epochs import datasets_in, set_epoch, tell_users_datasets
from trainstack.trainer.data.fixed_samples import Samples, sample_hashes
from trainstack.trainer.data.library_orders import LengthGroupedSampler
from trainstack.trainer.data.loader_checks import (
    check_plan,
    check_sampler,
    warn_of_no_length,
    warn_of_small_parts,
    warn_of_unseedable,
)
from trainstack.trainer.data.loader_state import LoaderState, missing_state_description
from trainstack.trainer.data.loading import Fetcher
from trainstack.trainer.data.overfitting import OverfitSubset, like
from trainstack.trainer.data.own_generators import WHOLE_EPOCH, own_generators
from trainstack.trainer.data.packing import PackedDataset
from trainstack.trainer.data.presharded import PreshardedSource
from trainstack.trainer.data.record_sources import most_repeats
from trainstack.trainer.data.sample_counts import SampleCounter
from trainstack.trainer.data.sharding import StreamCheck, check_not_presharded
from trainstack.trainer.data.step_batches import (
    CustomOrderSource,
    OrderedSource,
    PoissonSource,
    StepBatches,
    WeightFn,
    custom_batch_weight,
    describe_order,
    order_of,
    sum_steps,
    sums_losses,
    unsupported_order_reason,
)
from trainstack.trainer.module_interface import MicroBatchInfo, ModuleInterface

_EMPTY = "get_train_dataloader returned a loader over an empty data set. Return a loader with data."


class TrainingData:
    """The training data of one run.

    Args:
        module: the module. Its `get_train_dataloader` is called for the plan, and at the start of each epoch.
        args: the arguments with batch sizes and limits.
        world: the processes that share the data.
        state: the state of the run, with seed and version of the order.
        log: logs warnings about the order of the data.
        public_dataset_size: the length of the data set in the plan, if the true length is private.
        streams: the random streams of samples and loaders in a private run; None to seed them from `state`.
        asks: False for a run without training, which calls no `get_train_dataloader`.

    Attributes:
        plan: the numbers of steps and batch sizes.
        loader: the last result of `get_train_dataloader`.
        sample_hashes: the hashes of three fixed samples by index, from the loader for the plan; empty until set.
        epoch_hashes: the same hashes from the loader of the current epoch, if `hashes_epochs` is True.
        hashes_epochs: whether to compute `epoch_hashes`.
        lengths: updates the plan with the length of each epoch.
        loader_state: saves and restores the state of a stateful loader.
        dataset: the data set of the loader for the plan; None if it has none.
        training_set: the description of the data for the layers of the stack.
    """

    loader_state: LoaderState
    lengths: EpochLengths
    training_set: TrainingSet
    plan: TrainingPlan
    dataset: Any | None
    _fetcher: Fetcher | None = None
    _cursor: OrderCursor | None = None
    _sampled_loader: Any = None  # of the current epoch, in a private run

    def __init__(
        self,
        module: ModuleInterface,
        args: TrainerArguments,
        world: World,
        state: RunState,
        log: RunLogger,
        public_dataset_size: int | None = None,
        streams: RandomStreams | None = None,
        *,
        asks: bool = True,
    ) -> None:
        seed, order_version = self._seed, self._order_version = state.seed, state.order_version
        self._module, self._args, self._world, self._log = module, args, world, log
        self._public_dataset_size, self._is_sampled = public_dataset_size, streams is not None
        self._sample_seed: Seed = seed if streams is None else streams
        self._fast_paths, self._asks = fast_paths_enabled(args.fast_paths), asks
        self._custom_order_logged = self._lengths_differ_logged = self._choice_logged = self.hashes_epochs = False
        self.loader: Any = None
        self.sample_hashes: Samples = {}
        self.epoch_hashes: Samples = {}
        self.lengths = EpochLengths(log)
        self._combiner = Combiner(args, seed, order_version, private=self._is_sampled)
        global_batch = args.global_batch_size(world.size)
        self._overfit = OverfitSubset(args.overfit_batches, global_batch, seed, order_version)
        self._sharding = args.data_sharding_of(Stage.TRAIN)
        self.loader_state = LoaderState(log, fast_paths=self._fast_paths, split_by_rank=self._sharding == "loader")
        self._stream_check: StreamCheck | None = None
        self.plan = self._make_plan(None)
        loader = self._ask() if asks else None
        self.loader_state.attach(loader)
        self.plan = self._make_plan(loader)
        self.training_set = self._training_set(loader)
        check_plan(module, self.plan)
        warn_of_small_parts(loader, self.plan, args.gpu_batch_size_limit, log)
        if loader is not None:
            self._warn_of_sharding(loader)
            warn_of_unseedable(loader, self._sample_seed, log)
            warn_of_no_length(self.plan, log)

    def _warn_of_sharding(self, loader: Any) -> None:
        if self._sharding == "loader" and self._world.size > 1 and not self._is_presharded(loader):
            self._log.warning(
                "data_sharding='loader' is not used in training: the data set of the loader has indices, so the "
                "library orders it and splits it among the processes. Give the loader all of the data. If each process "
                "has a different part, give it a custom sampler or batch sampler."
            )

    def iter_steps(self, state: RunState, sampling: Sampling | None = None) -> Iterator[StepBatches]:
        """The remaining global steps of `state.epoch`. If `sampling` is given, it draws the samples.

        Raises:
            CheckpointMismatchError: the epoch began with its data in another order.
            ModuleContractError: the module has no usable training data.
        """
        generators = LoaderGenerators(self._sample_seed, state.epoch)
        told = tell_users_datasets(self.loader, state.epoch)
        with generators:  # random numbers of the method must be the same on all ranks
            loader = self._ask()
        if loader is None:
            raise ModuleContractError(
                f"{type(self._module).__name__}.get_train_dataloader returned None. Return a DataLoader: "
                "DataLoader(dataset, batch_size=batch_size, sampler=sampler(dataset))."
            )
        if self.hashes_epochs:  # before the first step, because samples may depend on the state of the module
            self.epoch_hashes = self.hash_samples()
        reason, self._cursor = unsupported_order_reason(loader), None
        set_epoch(loader, state.epoch, in_own_order=reason is not None, told=told)
        check_sampler(loader, is_sampled=self._is_sampled)  # again, with the length of this epoch
        if sampling is not None:
            return self._sampled(loader, sampling, state)
        self.plan = self._module.plan = self.lengths.follow(self.plan, self._make_plan(loader), state)
        _keep_order(state, self._describe_order(loader))
        if reason is None:
            steps = self._ordered(loader).iter_steps(state.epoch, state.samples_in_epoch, state.batches_in_epoch)
        else:
            self._log_custom_order(reason, loader, state)
            steps = self._unordered(loader, generators, state)
            if not state.global_step and custom_batch_weight(self._module) is None:
                steps = compare_first_step(steps, loader, self.plan, self._log)
        return sum_steps(steps) if sums_losses(self._module) else steps

    def _describe_order(self, loader: Any) -> str:
        """`describe_order`, with the global batch if the order depends on it."""
        order = describe_order(loader)
        grouped = isinstance(getattr(loader, "sampler", None), LengthGroupedSampler)
        return f"{order} in batches of {self.plan.global_batch}" if grouped else order

    def close(self) -> None:
        """End the loader's workers. Another pass starts new ones."""
        self._fetcher = None

    def set_plan(self, plan: TrainingPlan) -> None:
        """Replace the plan by another one for the same data, also in the module.

        Raises:
            ConfigurationError: the plan splits batches, and the module forbids it.
        """
        check_plan(self._module, plan)
        self.plan = self._module.plan = plan

    def current_indices(self, state: RunState, position: int) -> list[int] | None:
        """The samples of a micro-batch of the current step, by its position; None if they are unknown."""
        share = self._share(state.epoch, state.samples_in_epoch)
        borrowed = 0 if share is None else len(share.borrowed)
        if share is not None and position < borrowed:
            return []
        return self.indices_of(state.epoch, state.samples_in_epoch, position - borrowed)

    def indices_of(self, epoch: int, first: int, position: int) -> list[int] | None:
        """The samples of a micro-batch of a step; None if they are unknown.

        Args:
            epoch: the epoch of the step.
            first: the position of the step's first sample in the order of the epoch.
            position: the position of the micro-batch in the step, without borrowed ones.
        """
        share = self._share(epoch, first)
        if share is None or position >= len(share.micro_batches):
            return None
        return share.micro_batches[position].tolist()

    def _share(self, epoch: int, first: int) -> RankSlice | None:
        if self._cursor is None or self._args.overfit_batches or isinstance(self.loader, CombinedLoader):
            return None
        return self._cursor.share(epoch, first)

    def hash_samples(self) -> Samples:
        """Hashes of three fixed samples of `loader`."""
        return sample_hashes(self.loader, self._seed)

    def micro_batch(self, state: RunState) -> MicroBatchInfo:
        """The current micro-batch of `train_step`. In a private run it is always number 0 of 1.

        There the micro-batch of a record depends on the other sampled records, and these must not change its gradient.
        """
        if self._is_sampled or state.current_step <= state.global_step:
            return MicroBatchInfo()
        position = state.micro_batch
        share = None if self._cursor is None else self._cursor.share(state.epoch, state.samples_in_epoch)
        count = self.plan.accumulation if share is None else len(share.all_micro_batches)
        samples = [] if state.borrowed else self.current_indices(state, position)
        return MicroBatchInfo(number=position, count=count, samples=None if samples is None else tuple(samples))

    def compare_streams(self) -> None:
        """Compare the batches that the ranks have read from the same stream. All ranks call this together.

        Raises:
            ModuleContractError: they have read different batches.
        """
        if self._stream_check is not None:
            self._stream_check.compare()

    def _unordered(self, loader: Any, generators: LoaderGenerators, state: RunState) -> Iterator[StepBatches]:
        """The steps of a loader with a custom order, from the loader's state in the checkpoint if there is one."""
        world, accumulation = self._world, self.plan.accumulation
        counter, weigh = None, self._batch_weight()
        if weigh is None:
            weigh = counter = SampleCounter(loader, self._warn_once, accumulation * world.size)
        if not is_stateful(loader):  # a stateful loader is saved with the states of its generators
            own_generators(loader, besides=self._module).seed(self._sample_seed, state.epoch, WHOLE_EPOCH)
        within = state.batches_in_epoch > 0
        batches, positioned = self.loader_state.begin(loader, generators, within=within, counter=counter)
        if self._is_presharded(loader):
            # Ranks may have read different numbers of batches, and the checkpoint has that of rank 0.
            done = 0 if positioned else state.steps_in_epoch * accumulation
            return PreshardedSource(batches, accumulation, weigh, world.comm).iter_steps(done)
        done = 0 if positioned else state.batches_in_epoch
        check = self._stream_check = None if world.size == 1 else StreamCheck(world.comm, accumulation * world.size)
        if check is not None:
            batches = check.read(loader, batches)
        source = CustomOrderSource(batches, accumulation, weigh, world.rank, world.size)
        steps = source.iter_steps(state.epoch, state.samples_in_epoch, done)
        return steps if check is None else check.begin(steps)

    def _is_presharded(self, loader: Any) -> bool:
        """Whether each rank trains on all batches of its loader."""
        several = self._world.size > 1 and self._sharding == "loader"
        return several and loader is not None and unsupported_order_reason(loader) is not None

    def _batch_weight(self) -> WeightFn | None:
        """`custom_batch_weight`. At the first batch, it logs the choice of a `SupervisedModule`."""
        module: Any = self._module
        weigh = custom_batch_weight(module)
        if weigh is None or self._choice_logged or not hasattr(module, "weight_choice"):
            return weigh

        def first(batch: Any) -> float:
            count = weigh(batch)
            if not self._choice_logged and module.weight_choice:
                self._choice_logged = True
                self._log.info(f"the loss counts as a mean over {module.weight_choice}; loss_weight changes that.")
            return count

        return first

    def _warn_once(self, message: str) -> None:
        if not self._lengths_differ_logged:
            self._lengths_differ_logged = True
            self._log.warning(message)

    def _training_set(self, loader: Any) -> TrainingSet:
        problem = "get_train_dataloader returned None" if loader is None else unsupported_order_reason(loader)
        length = None if problem else len(loader.dataset)
        self.dataset = getattr(loader, "dataset", None)
        # Not the fetcher of the epochs, which would be replaced within an epoch that has another loader.
        fetcher: list[Fetcher] = []

        def fetch(index: Tensor) -> Any:
            newest = loader if self._sampled_loader is None else self._sampled_loader
            if not fetcher or not fetcher[0].serves(newest):
                alone = self._is_sampled
                fetcher[:] = [Fetcher(newest, self._seed, fast_paths=self._fast_paths, one_by_one=alone)]
            return fetcher[0].load(0, index)

        packed = next((one for one in datasets_in(self.dataset) if isinstance(one, PackedDataset)), None)
        if packed is not None and self._is_sampled:
            raise PrivacyError(
                "a row of a PackedDataset has several documents, and a private run bounds the gradient of each record. "
                "With rows as records, several people may share a bound. Train on the data set itself, with padding."
            )
        return TrainingSet(
            length=length,
            fetch=fetch,
            global_batch=self.plan.global_batch,
            max_micro_batch=self._args.gpu_batch_size_limit or max(length or 0, self.plan.global_batch),
            total_steps=self.plan.total_steps,
            problem=problem,
            repeats=most_repeats(loader.dataset) if length and self._is_sampled else 1,
        )

    def _sampled(self, loader: Any, sampling: Sampling, state: RunState) -> Iterator[StepBatches]:
        plan = self.plan
        assert plan.steps_per_epoch is not None
        if sums_losses(self._module):
            raise ConfigurationError(
                f"{type(self._module).__name__}.loss_reduction is 'sum', but a private run bounds and adds the "
                "gradients of single records. Return one loss for each record, or their mean."
            )
        if custom_batch_weight(self._module) is not None and not self._choice_logged:
            self._choice_logged = True
            self._log.info(
                "batch_weight is not used in private training: each sample counts once, for any number of items, "
                "because the gradient of each sample is clipped separately. Evaluation uses it."
            )
        problem = unsupported_order_reason(loader)
        if problem is not None or len(loader.dataset) != self.training_set.length:
            raise ModuleContractError(
                f"get_train_dataloader returned another loader: {problem or f'it has {len(loader.dataset)} samples'}. "
                f"The run was planned for {self.training_set.length} samples with indices. Return the same data in "
                "every epoch."
            )
        self._sampled_loader = loader
        source = PoissonSource(
            self._fetcher_of(loader), sampling, self.training_set, plan.accumulation, self._world.comm
        )
        return source.iter_steps(state.epoch, state.global_step + 1, plan.steps_per_epoch - state.steps_in_epoch)

    def _fetcher_of(self, loader: Any) -> Fetcher:
        if self._fetcher is None or not self._fetcher.serves(loader):
            self._fetcher = Fetcher(loader, self._sample_seed, fast_paths=self._fast_paths)
        return self._fetcher

    def _ask(self) -> Any:
        try:
            loader = self._module.get_train_dataloader(sampler=RandomSampler, batch_size=self.plan.micro_batch)
        except Exception as error:
            if isinstance(error, ValueError) and "num_samples=0" in str(error):  # raised by torch's sampler
                raise ModuleContractError(_EMPTY) from error
            annotate(error, f"raised in {type(self._module).__name__}.get_train_dataloader")
            raise
        for one in loader.values() if isinstance(loader, Mapping) else [loader]:
            check_not_presharded(one, self._world.size, self._sharding)
            check_sampler(one, is_sampled=self._is_sampled)
        loader = self._combiner.combine(loader, self.plan)
        if loader is not None and not hasattr(loader, "__iter__"):
            raise ModuleContractError(
                f"get_train_dataloader returned a {type(loader).__name__}, which cannot be iterated over. "
                "Return a DataLoader."
            )
        asked, has = self.plan.micro_batch, getattr(loader, "batch_size", None)
        if loader is not None and unsupported_order_reason(loader) is None and has != asked:
            raise ModuleContractError(
                f"get_train_dataloader was called with batch_size={asked} and returned a loader with "
                f"batch_size={has}. Pass batch_size to the DataLoader, and set train_batch_size and "
                "gpu_batch_size_limit in TrainerArguments. If batch_size has another meaning in this loader, return "
                "trainstack.as_is(loader), whose batches are not changed."
            )
        self.loader = loader
        if loader is None or not self._args.overfit_batches:
            return loader
        return self._overfit.of(loader, self.plan.accumulation * self._world.size)

    def overfit_val_loader(self, batch_size: int) -> Any:
        """With `overfit_batches`, a loader over the training samples, in a fixed order; else None."""
        loader = self._ask() if self._args.overfit_batches else None
        if loader is None or unsupported_order_reason(loader) is not None:
            return loader
        return like(loader, loader.dataset, batch_size)

    def _make_plan(self, loader: Any) -> TrainingPlan:
        args, lengths = self._args, {}
        if loader is not None and unsupported_order_reason(loader) is None:
            records = self._public_dataset_size or len(loader.dataset)
            lengths = {"dataset_length": records, "drop_last": loader.drop_last}
            if not len(loader.dataset):
                raise ModuleContractError(_EMPTY)
        elif loader is not None:
            length = None
            with suppress(TypeError):  # the loader has no length
                length = len(loader)
            if self._is_presharded(loader):  # the ranks with fewer batches take part until the end
                by_rank = self._world.comm.gather(length, "the length of the training loader")
                length = None if None in by_rank else max(by_rank) * self._world.size
            lengths = {} if length is None else {"loader_length": length}
        global_batch, size = args.global_batch_size(self._world.size), self._world.size
        return TrainingPlan.make(
            train_batch_size=global_batch if self._asks else -(-global_batch // size) * size,
            gpu_batch_size_limit=args.gpu_batch_size_limit,
            world_size=self._world.size,
            epochs=args.epochs,
            max_steps_per_epoch=_unless_unknown(args.max_train_steps_per_epoch, loader),
            max_steps=_unless_unknown(args.max_steps, loader),
            is_sampled=self._is_sampled,
            **lengths,
        )

    def _ordered(self, loader: Any) -> OrderedSource:
        plan, world, length = self.plan, self._world, len(loader.dataset)
        if plan.global_batch > length and loader.drop_last:
            raise ConfigurationError(
                f"train_batch_size={plan.global_batch} with drop_last=True and {length} samples leaves no global step. "
                "Write a smaller train_batch_size, or drop_last=False."
            )
        order = order_of(
            loader,
            global_batch=plan.global_batch,
            micro_batch=plan.micro_batch,
            world_size=world.size,
            rank=world.rank,
            seed=self._seed,
            drop_last=loader.drop_last,
            version=self._order_version,
        )
        self._cursor = OrderCursor(order)
        return OrderedSource(self._fetcher_of(loader), order, self._batch_weight(), world.comm)

    def _log_custom_order(self, reason: str, loader: Any, state: RunState) -> None:
        if self._custom_order_logged:
            return
        self._custom_order_logged = True
        done = state.batches_in_epoch
        resume = (
            f"The first {done} batches of this epoch are read and skipped. It depends on the loader whether the rest "
            "is the same as in an uninterrupted run."
            if done
            else "A resume within an epoch reads and skips the earlier batches."
        )
        if is_stateful(loader) and (not done or self.loader_state.is_pending):
            resume = "Its state is saved in each checkpoint, and restored in a resume."
            resume += missing_state_description(loader)
        self._log.warning(
            f"the training data has the loader's order, because {reason}. Its batches are used without a change: a "
            f"global step has {self._batches_a_step()}, and the library cannot ensure that each sample is used "
            f"once. {self._describe_sharding(loader)}{resume}"
        )

    def _batches_a_step(self) -> str:
        each, size = self.plan.accumulation, self._world.size
        return f"{each} of them" if size == 1 else f"{each} of them on each of {size} processes"

    def _describe_sharding(self, loader: Any) -> str:
        size, taken = self._world.size, self.plan.accumulation
        if size == 1:
            return ""
        if self._is_presharded(loader):
            return "Each process trains on all batches of its loader (data_sharding='loader'). "
        return (
            f"Each process reads all batches and trains on every {size}th: {taken} of {taken * size} in a step. If "
            "each process has different batches, write data_sharding='loader'. "
        )


def _unless_unknown(limit: int | float | None, loader: Any) -> int | float | None:
    """`limit`, or None if it is a fraction of the length of a loader and there is no loader yet."""
    return None if loader is None and isinstance(limit, float) else limit


def _keep_order(state: RunState, order: str) -> None:
    """Note the order of the samples of the current epoch, and refuse another order within it."""
    if state.steps_in_epoch and state.order not in ("", order):
        raise CheckpointMismatchError(
            f"the samples of epoch {state.epoch} came {state.order} until global step {state.global_step}, and would "
            f"now come {order}, so the remaining samples are unknown. Return the same loader as at the beginning of "
            "the epoch from get_train_dataloader, or resume from a checkpoint at the end of an epoch."
        )
    state.order = order
