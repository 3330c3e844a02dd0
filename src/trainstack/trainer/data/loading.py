"""Load samples by index, each with a separate random seed."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate, get_worker_info

from trainstack.backends.random_streams import RandomStreams
from trainstack.backends.single_process import after_copies
from trainstack.errors import annotate
from trainstack.trainer.core.order import mix
from trainstack.trainer.core.random_state import Seed, preserve_host_rng, seed_sample
from trainstack.trainer.data.epochs import call_set_epoch, datasets_in
from trainstack.trainer.data.kept_numbers import KeptNumbers
from trainstack.trainer.data.own_generators import OwnGenerators
from trainstack.trainer.data.salted_seeds import SaltedSeeds
from trainstack.trainer.data.torch_classes import is_usual, stacks_tensors
from trainstack.trainer.data.worker_signals import (
    end_with_parent,
    end_workers,
    explain_death,
    ignore_signals,
    signals_wait,
)


class WorkerStart:
    """A `worker_init_fn` for the library's loaders.

    A worker runs until its loader ends it or the training process has ended. Terminals, torchrun and schedulers send
    signals to whole groups of processes. If a signal killed a worker, its loader would raise within the last step
    before the stop. So a worker ignores these signals.

    `get_worker_info().dataset` becomes the user's dataset. torch fetches from the `SeededDataset` around it, which is
    hidden from user code.

    Args:
        then: the `worker_init_fn` of the user's loader; None without one.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        ignore_signals()
        end_with_parent()
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, SeededDataset):
            object.__setattr__(info, "dataset", info.dataset.users_dataset)  # torch 2.13.0: a frozen dataclass
        if self._then is not None:
            self._then(worker)


_live_iterators: weakref.WeakKeyDictionary[Any, weakref.finalize[Any, Any]] = weakref.WeakKeyDictionary()


def shutdown_workers_with(owner: object, iterator: Any) -> weakref.finalize[Any, Any]:
    """End the workers of a loader's iterator when `owner` is deleted, and at the latest when Python exits.

    torch ends them when the iterator is deleted. If this happens in a reference cycle, the queue for that message is
    already closed, and torch waits 10 s for each worker. When Python exits, torch sends them a SIGTERM, which they
    ignore (see `WorkerStart`), and waits forever.

    Returns:
        a finalizer that ends them when it is called the first time.
    """
    if iterator not in _live_iterators:
        # Private, checked on torch 2.13.0. Without this method torch ends the workers, with the delays above.
        shut_down = getattr(iterator, "_shutdown_workers", None)
        ending = weakref.finalize(owner, end_workers, iterator, shut_down or (lambda: None))
        ending.atexit = False  # too late: `_shutdown_all` is registered later than torch's handler, so it runs before
        _live_iterators[iterator] = ending
    return _live_iterators[iterator]


def end_workers_with_pass(owner: object, iterator: Iterator[Any], *, persistent: bool) -> Iterator[Any]:
    """The batches of a loader's iterator. Its workers end after the pass, also after an error, or with `owner`."""
    if not hasattr(iterator, "_shutdown_workers"):  # torch 2.13.0: only the class with workers has the method
        return iterator
    return _end_after(iterator, (lambda: None) if persistent else shutdown_workers_with(owner, iterator))


def _end_after(iterator: Iterator[Any], ending: Callable[[], Any]) -> Iterator[Any]:
    try:
        yield from iterator
    except Exception as error:
        explain_death(error, iterator)
        raise
    finally:
        ending()


def explain_worker_deaths(error: BaseException) -> None:
    """Add a note to `error` if a worker has died.

    torch raises in a handler of SIGCHLD, so the error may come from any line of the main thread.
    """
    for iterator in list(_live_iterators):
        explain_death(error, iterator)


@atexit.register
def _shutdown_all() -> None:
    for ending in list(_live_iterators.values()):
        ending()


class PartOfDataset(Subset[Any]):
    """A `Subset` that the library makes. `get_worker_info().dataset` shows the dataset inside it."""


class SeededDataset(Dataset[Any]):
    """A dataset whose samples use random generators that are seeded only from (seed, epoch, index).

    In a private run, samples are fetched one at a time by `__getitem__`, because `__getitems__` could make a sample
    depend on the others of its micro-batch. Numbers that the dataset stores from a sample are restored. `collate_fn`
    gets new secret states for each batch: states from the first sample would link the steps in which the same sample
    comes first. Seeds that the dataset sets, such as the index, are mixed with the secret: see `SaltedSeeds`.

    Args:
        dataset: the user's dataset.
        seed: the seed of the run, or the streams of a private run.
        collate_fn: makes batches of the samples. It may use random numbers as well.
        one_by_one: fetch samples only by `__getitem__`, also outside of the epochs of a private run.
    """

    one_by_one: bool
    generators: OwnGenerators

    def __init__(self, dataset: Any, seed: Seed, collate_fn: Any = None, *, one_by_one: bool = False) -> None:
        self.dataset = dataset
        self.seed = seed
        self.one_by_one = one_by_one or isinstance(seed, RandomStreams)
        self.generators = OwnGenerators(train_dataset=dataset, collate_fn=collate_fn)
        self._epoch_of_copy: int | None = None

    @property
    def users_dataset(self) -> Any:
        """The dataset of the user's loader."""
        return self.dataset.dataset if type(self.dataset) is PartOfDataset else self.dataset

    def _set_epoch_of_copy(self, epoch: int) -> None:
        """In a persistent worker, set the epoch of the worker's copy of the dataset, if it has changed.

        The trainer sets the epoch only in its own process.
        """
        if self._epoch_of_copy == epoch or get_worker_info() is None:
            return
        if self._epoch_of_copy is not None:
            call_set_epoch(datasets_in(self.dataset), epoch)
        self._epoch_of_copy = epoch

    def _seed_sample(self, epoch: int, index: int) -> None:
        seed_sample(self.seed, epoch, index)
        self.generators.seed(self.seed, epoch, index)

    def _seed_batch(self, epoch: int, index: int) -> None:
        """Seed the generators for code that draws for several samples. The first of them is `index`."""
        seed = self.seed
        if isinstance(seed, RandomStreams):
            seed, index = (RandomStreams.from_system() if seed.is_secret else seed), _BATCH
        seed_sample(seed, epoch, index)
        self.generators.seed(seed, epoch, index)

    def _fetches_batches(self) -> bool:
        """Whether the dataset loads several samples at once. A `worker_init_fn` may change that."""
        dataset = self.dataset
        while type(dataset) is PartOfDataset or is_usual(dataset, Subset):
            dataset = dataset.dataset  # a Subset has `__getitems__`, and uses that of its dataset if it exists
        return callable(getattr(dataset, "__getitems__", None))

    def __getitems__(self, keys: list[tuple[int, int]]) -> Any:
        """The samples of one micro-batch. A key is (epoch, index)."""
        self._set_epoch_of_copy(keys[0][0])
        if self._fetches_batches() and not self.one_by_one:
            self._seed_batch(*keys[0])
            return self.dataset.__getitems__([index for _, index in keys])
        samples, seed, kept = [], self.seed, KeptNumbers(self.dataset) if self.one_by_one else None
        for epoch, index in keys:
            self._seed_sample(epoch, index)
            try:
                with SaltedSeeds(seed, "sample", index) if isinstance(seed, RandomStreams) else nullcontext():
                    sample = self.dataset[index]
            except Exception as error:
                annotate(error, f"raised by the data set for sample {index}")
                raise
            samples.append(sample if kept is None else kept.restore(sample))
        if isinstance(seed, RandomStreams):  # else `collate_fn` continues with the numbers of the last sample
            self._seed_batch(*keys[0])
        return samples


_BATCH = -2
"""Replaces the index of a sample in the seed of a batch, in a private run with a debug seed. No sample has it."""


def loading_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments for a `DataLoader` that loads and collates as `loader` does."""
    names = ["num_workers", "collate_fn", "pin_memory", "timeout", "multiprocessing_context"]
    if loader.num_workers > 0:  # DataLoader refuses the argument without workers
        names.append("prefetch_factor")
    return {name: getattr(loader, name) for name in names}


class _ForgetfulCollate:
    """The `collate_fn` of a private run. Numbers that it stores from a batch are restored."""

    def __init__(self, collate_fn: Any) -> None:
        self._collate_fn = collate_fn

    def __call__(self, samples: Any) -> Any:
        kept = KeptNumbers(self._collate_fn)
        return kept.restore(self._collate_fn(samples))


class Fetcher:
    """Makes collated batches from index tensors, as the user's loader would.

    Args:
        loader: a map-style `DataLoader`. Its data set, `collate_fn`, workers and pinning are used, but not its sampler
            and batch size.
        seed: the seed of the samples' generators, or the streams of a private run.
        fast_paths: whether rows of a `TensorDataset` may be indexed at once instead of collated.
        one_by_one: see `SeededDataset`.
    """

    def __init__(
        self, loader: DataLoader[Any], seed: Seed, *, fast_paths: bool = True, one_by_one: bool = False
    ) -> None:
        self.loader = loader
        self.seed = seed
        self._fast_paths = fast_paths
        self._seeded = SeededDataset(loader.dataset, seed, loader.collate_fn, one_by_one=one_by_one)
        keeps_nothing = not self._seeded.one_by_one or not self.may_mix_records()
        self._collate = loader.collate_fn if keeps_nothing else _ForgetfulCollate(loader.collate_fn)
        self._keys = _KeyBatches()
        self._workers: DataLoader[Any] | None = None

    def serves(self, loader: DataLoader[Any]) -> bool:
        """Whether `loader` has the same data and options, so that this fetcher and its workers can be kept."""
        mine = self.loader
        return mine is loader or (
            not mine.persistent_workers  # persistent workers have an older copy of the dataset
            and all(getattr(mine, name) is getattr(loader, name) for name in ("dataset", "worker_init_fn"))
            and loading_options(mine) == loading_options(loader)
        )

    def batches(self, epoch: int, indices: Iterable[Tensor]) -> Iterator[Any]:
        """One collated batch for each index tensor, in order. The generators of the process do not change."""
        plain = _plain_tensors(self.loader) if self._fast_paths else None
        if plain is not None:
            tensors, chosen = plain
            if chosen is None:
                return ([tensor.index_select(0, row) for tensor in tensors] for row in indices)
            rows = (chosen[index] for index in indices)
            return ([tensor[row] for tensor in tensors] for row in rows)  # a `Subset` may have negative indices
        loader = self.loader
        if loader.num_workers > 0 or (loader.pin_memory and torch.accelerator.is_available()):
            batches = self._from_workers(epoch, indices)
        else:
            batches = (self.load(epoch, index) for index in indices)
        # Batches of workers and of torch's `collate_fn` have new memory. Others may share it with the dataset, also
        # with pinning, which does not copy pinned tensors.
        return batches if loader.num_workers > 0 or stacks_tensors(loader.collate_fn) else after_copies(batches)

    def may_mix_records(self) -> bool:
        """Whether the user's code makes a batch of several samples."""
        return self.loader.collate_fn is not default_collate

    def load(self, epoch: int, index: Tensor) -> Any:
        """One collated batch, loaded in this process."""
        with preserve_host_rng(), self._seeded.generators.preserved():
            samples = self._seeded.__getitems__([(epoch, i) for i in index.tolist()])
            return self._collate(samples)

    def _from_workers(self, epoch: int, indices: Iterable[Tensor]) -> Iterator[Any]:
        self._keys.now = ([(epoch, i) for i in index.tolist()] for index in indices)
        if self._workers is None:
            self._workers = DataLoader(
                self._seeded,
                batch_sampler=self._keys,
                worker_init_fn=WorkerStart(self.loader.worker_init_fn),
                generator=_workers_generator(self.seed),
                persistent_workers=self.loader.persistent_workers,
                **{**loading_options(self.loader), "collate_fn": self._collate},
            )
        with signals_wait(self.loader.multiprocessing_context):
            iterator = iter(self._workers)
        if self.loader.num_workers > 0:
            shutdown_workers_with(self, iterator)
            yield from end_workers_with_pass(self, iterator, persistent=self.loader.persistent_workers)
            return
        while True:
            with preserve_host_rng(), self._seeded.generators.preserved():
                batch = next(iterator, None)
            if batch is None:
                return
            yield batch


def _workers_generator(seed: Seed) -> torch.Generator:
    """The generator from which torch draws the initial seeds of workers."""
    generator = torch.Generator()
    if isinstance(seed, RandomStreams):
        seed.seed_each([generator], "workers")
        return generator
    # Shifted by one: a seed of 63 bits is the same number with and without a sign.
    return generator.manual_seed(mix(seed) >> 1)


class _KeyBatches:
    """A batch sampler whose batches are set before each pass."""

    def __init__(self) -> None:
        self.now: Iterator[list[tuple[int, int]]] = iter(())

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self.now


def _plain_tensors(loader: DataLoader[Any]) -> tuple[tuple[Tensor, ...], Tensor | None] | None:
    """The tensors and selected rows of a `TensorDataset` or a `Subset` of one with the default collation, else None.

    Indexing the tensors gives the same bits and strides as collating rows, without a Python call for each row. This
    does not hold for tensors in another memory format: an indexed batch keeps it, a collated one is contiguous.
    """
    if not stacks_tensors(loader.collate_fn) or loader.num_workers or loader.pin_memory:
        return None
    dataset: Any = loader.dataset
    subsets, chosen = list[Any](), None
    while type(dataset) is PartOfDataset or is_usual(dataset, Subset):
        subsets.append(dataset.indices)
        dataset = dataset.dataset
    if not is_usual(dataset, TensorDataset):
        return None
    for indices in subsets:
        rows = _as_rows(indices)
        if rows is None:
            return None
        chosen = rows if chosen is None else rows[chosen]
    plain = all(type(t) is Tensor and t.layout is torch.strided and t.is_contiguous() for t in dataset.tensors)
    return (dataset.tensors, chosen) if plain else None


def _as_rows(indices: Any) -> Tensor | None:
    """`indices` of a `Subset` as int64; None for other kinds of indices, such as a mask."""
    if isinstance(indices, range):
        return torch.arange(indices.start, indices.stop, indices.step)
    if type(indices) in (list, tuple):
        usual = all(kind is int or issubclass(kind, np.integer) for kind in set(map(type, indices)))
        return torch.tensor(indices, dtype=torch.int64) if usual else None
    if type(indices) is np.ndarray and indices.ndim == 1 and indices.dtype.kind in "iu":
        return torch.from_numpy(indices.astype(np.int64))
    if type(indices) is Tensor and indices.dim() == 1 and indices.dtype in (torch.int8, torch.int16, torch.int32):
        return indices.to(torch.int64)  # uint8 is excluded, because it would be a mask
    return indices if type(indices) is Tensor and indices.dim() == 1 and indices.dtype is torch.int64 else None
