"""Combine several training loaders: each step gets a dict with a batch of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from torch.utils.data import DataLoader

from trainstack.errors import ConfigurationError, ModuleContractError
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.core.order import EpochOrder, mix
from trainstack.trainer.core.plan import TrainingPlan
from trainstack.trainer.data.epochs import WrapsDatasets, set_epoch
from trainstack.trainer.data.library_orders import CombinedOrder, unequal_lengths
from trainstack.trainer.data.step_batches import describe_order, order_of, unsupported_order_reason

Mode = Literal["min", "max", "cycle"]

_MODES = (
    "Write combine_loaders='min' in TrainerArguments to end an epoch with the shortest loader, 'max' to end it with "
    "the longest while the others give None after their end, or 'cycle' to restart the others."
)


class CombinedDataset(WrapsDatasets):
    """A dataset of the positions of an epoch over several loaders. An item has the samples of each loader there.

    Each loader has a separate order, determined by (seed, loader, epoch). The first has the same order as without the
    others. With `"max"` a loader gives whole global batches only, so that the parts of a step have the same size.

    Args:
        loaders: the loaders by name, each over samples that the library can order.
        mode: selects the loader that ends an epoch; None if all have the same number of positions.
        batch_size: a loader with k times this batch size gives k samples at each position.
        global_batch: positions in a global step.
        seed: the seed of the orders.
        version: the version of the orders.

    Raises:
        ConfigurationError: the lengths of the loaders do not fit `mode`.
    """

    def __init__(
        self, loaders: Mapping[str, Any], mode: Mode | None, batch_size: int, global_batch: int, seed: int, version: int
    ) -> None:
        self.parts = [loader.dataset for loader in loaders.values()]
        self._names, self._mode, self._global_batch = list(loaders), mode, global_batch
        self._each = [_samples_at_a_position(name, loader, batch_size) for name, loader in loaders.items()]
        seeds = [mix(seed, place) if place else seed for place in range(len(loaders))]
        self._orders = [
            order_of(one, global_batch=k * global_batch, micro_batch=1, seed=own, version=version)
            for one, k, own in zip(loaders.values(), self._each, seeds, strict=True)
        ]
        self._epoch, self._permutations = 0, dict[tuple[int, int], EpochOrder]()
        self._lay_out()

    def _lay_out(self) -> None:
        """Compute the number of positions of an epoch, and the position at which each loader ends."""
        mode, global_batch = self._mode, self._global_batch
        positions = [order.length // k for order, k in zip(self._orders, self._each, strict=True)]
        samples = {name: order.length for name, order in zip(self._names, self._orders, strict=True)}
        if mode is None and len({order.length / k for order, k in zip(self._orders, self._each, strict=True)}) > 1:
            raise ConfigurationError(
                f"get_train_dataloader returned loaders of different lengths (samples: {samples}), so the end of an "
                f"epoch is not defined. {_MODES}"
            )
        if mode == "cycle":  # round up, to use all samples of the longest
            positions = [-(-order.length // k) for order, k in zip(self._orders, self._each, strict=True)]
        self._length = (min if mode in ("min", None) else max)(positions)
        self._ends = [
            self._length if mode == "cycle" or count >= self._length else count - count % global_batch
            for count in positions
        ]
        if not all(self._ends):
            raise ConfigurationError(
                f"a loader has too few samples for one global step of {global_batch} (samples: {samples}; at each "
                f"position: {dict(zip(self._names, self._each, strict=True))}). Write a smaller train_batch_size, or "
                "combine_loaders='cycle'."
            )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> dict[str, list[Any]]:
        return {
            name: [self._sample(place, position * k + offset) for offset in range(k)]
            for place, (name, k) in enumerate(zip(self._names, self._each, strict=True))
            if position < self._ends[place]
        }

    def set_epoch(self, epoch: int) -> None:
        """Use the order of `epoch` from now on, with the current lengths of the parts.

        Raises:
            ConfigurationError: the lengths of this epoch do not fit the mode.
            ModuleContractError: a `LengthGroupedSampler` has lengths for another number of samples.
        """
        self._epoch, self._permutations = epoch, {}
        lengths = [len(part) for part in self.parts]
        if lengths == [order.length for order in self._orders]:
            return
        for name, order, length in zip(self._names, self._orders, lengths, strict=True):
            if order.lengths is not None and len(order.lengths) != length:
                raise unequal_lengths(len(order.lengths), length, f" of the loader {name!r}")
        self._orders = [replace(order, length=n) for order, n in zip(self._orders, lengths, strict=True)]
        self._lay_out()

    def _sample(self, place: int, position: int) -> Any:
        order = self._orders[place]
        number, position = divmod(position, order.length)
        if (place, number) not in self._permutations:
            again = replace(order, seed=mix(order.seed, number)) if number else order
            self._permutations[place, number] = again.indices(self._epoch)
        return self.parts[place][int(self._permutations[place, number][position])]


def _samples_at_a_position(name: str, loader: Any, batch_size: int) -> int:
    if not len(loader.dataset):
        raise ModuleContractError(f"the loader {name!r} of get_train_dataloader is over an empty data set.")
    if loader.batch_size % batch_size:
        raise ModuleContractError(
            f"get_train_dataloader was called with batch_size={batch_size}, and the loader {name!r} has batch_size="
            f"{loader.batch_size}. Write batch_size=batch_size, or a multiple of it for a loader that gives more "
            "samples in a step."
        )
    return int(loader.batch_size // batch_size)


class CombinedCollate:
    """Makes a dict of batches, each by the `collate_fn` of its loader; None for a loader that has ended."""

    def __init__(self, collate_fns: Mapping[str, Callable[[list[Any]], Any]]) -> None:
        self.collate_fns = dict(collate_fns)

    def __call__(self, items: list[dict[str, list[Any]]]) -> dict[str, Any]:
        given = items[0]
        return {
            name: collate([sample for item in items for sample in item[name]]) if name in given else None
            for name, collate in self.collate_fns.items()
        }


class _WorkerStarts:
    """Calls the `worker_init_fn` of each loader."""

    def __init__(self, functions: list[Callable[[int], None]]) -> None:
        self._functions = functions

    def __call__(self, worker: int) -> None:
        for function in self._functions:
            function(worker)


class CombinedLoader(DataLoader[Any]):
    """A loader over a `CombinedDataset`, which is ordered, split by rank and resumed like any other.

    Its workers load the samples of all loaders. Their number is the largest `num_workers` of the loaders.
    """

    def __init__(
        self, loaders: Mapping[str, Any], mode: Mode | None, batch_size: int, global_batch: int, **order: int
    ) -> None:
        dataset = CombinedDataset(loaders, mode, batch_size, global_batch, **order)
        orders = [f"{name!r} with {len(one.dataset)} samples {describe_order(one)}" for name, one in loaders.items()]
        ends = "" if mode is None else f" (combine_loaders={mode!r})"
        every = list(loaders.values())
        most = max(every, key=lambda one: one.num_workers)
        starts = [one.worker_init_fn for one in every if one.worker_init_fn is not None]
        super().__init__(
            dataset,
            batch_size=batch_size,
            sampler=CombinedOrder(dataset, f"{', '.join(orders)}, side by side{ends}"),
            collate_fn=CombinedCollate({name: one.collate_fn for name, one in loaders.items()}),
            drop_last=any(one.drop_last for one in every),
            num_workers=most.num_workers,
            pin_memory=any(one.pin_memory for one in every),
            timeout=most.timeout,
            worker_init_fn=_WorkerStarts(starts) if starts else None,
            multiprocessing_context=most.multiprocessing_context,
            prefetch_factor=most.prefetch_factor if most.num_workers else None,
            persistent_workers=any(one.persistent_workers for one in every),
        )


class ZippedLoaders:
    """Combines the batches of several loaders, at least one of which has a custom order. The result has one, too.

    Args:
        loaders: the loaders by name.
        mode: selects the loader that ends an epoch.
    """

    def __init__(self, loaders: Mapping[str, Any], mode: Mode) -> None:
        self.loaders, self.mode = dict(loaders), mode

    def __len__(self) -> int:
        return (min if self.mode == "min" else max)(len(loader) for loader in self.loaders.values())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        streams = {name: iter(loader) for name, loader in self.loaders.items()}
        ended = set[str]()
        while True:
            batch: dict[str, Any] = {}
            for name, stream in streams.items():
                part = list[Any]()
                _take(stream, part)
                if not part:
                    ended.add(name)
                    if self.mode == "min" or len(ended) == len(streams):
                        return
                    if self.mode == "cycle":
                        streams[name] = iter(self.loaders[name])
                        _take(streams[name], part)
                batch[name] = part.pop() if part else None
            yield batch
            del batch

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the loaders and their parts."""
        for loader in self.loaders.values():
            set_epoch(loader, epoch, in_own_order=True)


def _take(stream: Iterator[Any], into: list[Any]) -> None:
    for item in stream:
        into.append(item)
        return


class Combiner:
    """Makes one loader of the result of `get_train_dataloader`.

    Args:
        args: the arguments of the run.
        seed: the seed of the orders.
        version: the version of the orders.
        private: whether the run is private and draws its records at random.
    """

    def __init__(self, args: TrainerArguments, seed: int, version: int, *, private: bool) -> None:
        self._args, self._order, self._private = args, {"seed": seed, "version": version}, private
        self._made: tuple[list[tuple[str, Any]], int, Any] | None = None

    def combine(self, returned: Any, plan: TrainingPlan) -> Any:
        """Combine a dict of loaders into one loader, whose batches are dicts. Other loaders are returned unchanged.

        For the same loaders the same object is returned, so that its workers may be kept.

        Raises:
            ModuleContractError: `returned` is a list, or a dict with other items than loaders by name.
            ConfigurationError: `combine_loaders` is needed, or does not fit the loaders.
        """
        if isinstance(returned, list | tuple) and returned and all(isinstance(one, DataLoader) for one in returned):
            raise ModuleContractError(
                f"get_train_dataloader returned a {type(returned).__name__} of loaders. Return one loader, or a dict "
                "of loaders by name: each step then gets a dict with a batch of each."
            )
        if not isinstance(returned, Mapping):
            return returned
        self._check(returned)
        parts = list(returned.items())
        if self._made is None or self._made[:2] != (parts, plan.micro_batch):
            self._made = parts, plan.micro_batch, self._combined(returned, plan)
        return self._made[2]

    def _combined(self, loaders: Mapping[str, Any], plan: TrainingPlan) -> CombinedLoader | ZippedLoaders:
        mode = self._args.combine_loaders
        if all(unsupported_order_reason(loader) is None for loader in loaders.values()):
            return CombinedLoader(loaders, mode, plan.micro_batch, plan.global_batch, **self._order)
        if mode is None:
            raise ConfigurationError(
                "get_train_dataloader returned several loaders, some with a custom order, so the end of an epoch is "
                f"not defined. {_MODES}"
            )
        return ZippedLoaders(loaders, mode)

    def _check(self, loaders: Mapping[str, Any]) -> None:
        for name, loader in loaders.items():
            if not isinstance(name, str) or isinstance(loader, Mapping | str) or not hasattr(loader, "__iter__"):
                raise ModuleContractError(
                    f"get_train_dataloader returned a dict with a {type(loader).__name__} for the key {name!r}. Return "
                    "one loader, or a dict of loaders by name: {'labelled': DataLoader(...), 'other': DataLoader(...)}."
                )
        if not loaders:
            raise ModuleContractError("get_train_dataloader returned an empty dict. Return loaders by name.")
        if self._private or self._args.overfit_batches:
            reason = "a private run draws its records from" if self._private else "overfit_batches is for"
            raise ConfigurationError(
                f"get_train_dataloader returned {len(loaders)} loaders, and {reason} one data set. Return one "
                "DataLoader."
            )
