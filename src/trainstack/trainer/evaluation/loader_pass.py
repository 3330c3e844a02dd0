"""One pass over a loader without training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import islice, tee
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler

from trainstack.backends import Communicator, TrainerBackend, Workload, World
from trainstack.backends.losses import RETURN_THE_TENSOR, is_number, loss_item
from trainstack.backends.single_process import after_copies
from trainstack.errors import ConfigurationError, ModuleContractError, annotate
from trainstack.stage import Stage
from trainstack.trainer.arg_matching import as_named
from trainstack.trainer.core.modes import get_modes, set_modes
from trainstack.trainer.core.random_state import IsolatedIterator, LoaderGenerators
from trainstack.trainer.core.samples import checked_weight, differing_lengths, samples_in
from trainstack.trainer.data.loading import Fetcher
from trainstack.trainer.data.sample_counts import counted_batches
from trainstack.trainer.data.sharding import StreamDigest
from trainstack.trainer.data.step_batches import custom_batch_weight, sums_losses, unsupported_order_reason
from trainstack.trainer.data.torch_classes import draws_first_batch_alone, makes_lists_of_fields
from trainstack.trainer.evaluation.collector import OutputCollector
from trainstack.trainer.evaluation.logged_means import LoggedValues, divided_sum, means_of
from trainstack.trainer.module_interface import ModuleInterface
from trainstack.trainer.tracking.progress import ProgressDisplay


def missing_loss_message(outputs: Any, stage: Stage, *, is_consumed: bool) -> str | None:
    """A warning if a step probably should have returned a loss; else None.

    A step that returns predictions for a metric or a hook needs no loss. If the outputs contain a single number, or an
    item with "loss" in its name, the loss is in the wrong place.

    Args:
        outputs: the outputs of the first batch, in which no loss was found.
        stage: the stage of the step.
        is_consumed: whether a metric or a hook uses the outputs.
    """
    if outputs is None or stage is Stage.PREDICT:
        return None
    name = stage.name.lower()
    if is_number(loss := loss_item(outputs)):
        return (
            f"{name}_step returned a {type(loss).__name__} as its loss, which must be a tensor: no {name}/loss is "
            f"recorded. {RETURN_THE_TENSOR}"
        )
    named = as_named(outputs)
    items = list(outputs) if isinstance(outputs, tuple | list) else [] if named is None else list(named.values())
    misplaced = any(_is_single(item) for item in items) or any("loss" in str(key).lower() for key in named or ())
    if is_consumed and not misplaced:
        return None
    single = [key for key, item in (named or {}).items() if _is_single(item)]
    metric = f" For a metric, call self.log({single[0]!r}, ...) in {name}_step." if single else ""
    return (
        f"{name}_step returned {_described(outputs, items, named)}: no loss was found, so no {name}/loss is recorded. "
        f"Return (loss, ...) or a dict with the key 'loss'.{metric}"
    )


def _is_single(value: Any) -> bool:
    """Whether `value` may be a loss: a number, or a floating tensor without dimensions."""
    return is_number(value) or (isinstance(value, Tensor) and not value.dim() and value.is_floating_point())


def _described(outputs: Any, items: list[Any], named: Mapping[str, Any] | None) -> str:
    kind = "tuple" if isinstance(outputs, tuple) else type(outputs).__name__
    if isinstance(outputs, Tensor):
        return f"a tensor of shape {tuple(outputs.shape)}"
    if named is not None:
        numbers = [key for key, item in named.items() if is_number(item)]
        also = f", of which {', '.join(map(repr, numbers))} are numbers, not tensors" if numbers else ""
        return f"a {'dict' if isinstance(outputs, dict) else kind} with the keys {', '.join(map(repr, named))}{also}"
    if items and all(isinstance(item, Tensor) for item in items):
        return f"a {kind} of tensors of shapes {', '.join(str(tuple(item.shape)) for item in items)}"
    return f"a {kind} of {', '.join(type(item).__name__ for item in items)}" if items else f"a {kind}"


EVALUATION_EPOCH = (1 << 32) - 1
"""Replaces the epoch in the seeds of evaluated samples, so that their augmentation is the same in each evaluation. No
training reaches this epoch."""


def named_loaders(loaders: Any, where: str) -> dict[str, Any]:
    """The result of `get_val_dataloaders` as a dict; empty for None.

    Raises:
        ModuleContractError: the result is not a loader, a dict of loaders by name, or None.
    """
    if loaders is None:
        return {}
    if isinstance(loaders, Tensor) or (
        isinstance(loaders, list | tuple) and any(isinstance(loader, DataLoader) for loader in loaders)
    ):
        what = "A tensor goes into a DataLoader: DataLoader(TensorDataset(tensor), batch_size=...)"
        if not isinstance(loaders, Tensor):
            what = 'Give several DataLoaders as a dict by name: return {"a": loader_a, "b": loader_b}'
        raise ModuleContractError(f"{where} gave a {type(loaders).__name__}. {what}.")
    named = loaders if isinstance(loaders, dict) else {"default": loaders}
    for key, loader in named.items():
        if not isinstance(key, str) or isinstance(loader, str | bytes) or not hasattr(loader, "__iter__"):
            end = ", or None" if where.startswith("get_") else ""  # which is refused elsewhere
            raise ModuleContractError(
                f"{where} returned {type(loader).__name__} under {key!r}. Return a DataLoader, a dict of DataLoaders "
                f"by name{end}."
            )
    return named


def check_batch_size(batch_size: Any) -> None:
    """Refuse values other than None and positive integers.

    Raises:
        ConfigurationError: it is another value, such as 0.
    """
    whole = isinstance(batch_size, Integral) and not isinstance(batch_size, bool)
    if batch_size is not None and not (whole and batch_size >= 1):
        raise ConfigurationError(f"batch_size={batch_size!r}: write an integer of at least 1.")


def loaders_over(
    module: ModuleInterface, given: Any, default_size: int, batch_size: int | None, collate_fn: Any
) -> Any:
    """Make loaders over data sets, also in a dict by name. Loaders are returned unchanged.

    An object with a length and items is a data set if its class is from torch, if it is not iterable, if it has
    `__getitems__`, or if `batch_size` or `collate_fn` is given.

    Args:
        module: makes the loaders.
        given: a loader, a data set, or a dict of these by name.
        default_size: samples in a batch if `batch_size` is None.
        batch_size: samples in a batch.
        collate_fn: makes batches; None for the choice of `build_dataloader` of the module.

    Raises:
        ConfigurationError: `batch_size` or `collate_fn` is given with a loader.
    """
    if isinstance(given, dict):
        return {key: loaders_over(module, one, default_size, batch_size, collate_fn) for key, one in given.items()}
    is_asked = batch_size is not None or collate_fn is not None
    if isinstance(given, IterableDataset) and is_asked:
        return DataLoader(given, batch_size=batch_size or default_size, collate_fn=collate_fn)
    has_items = hasattr(given, "__len__") and hasattr(given, "__getitem__")
    known = isinstance(given, Dataset) or not hasattr(given, "__iter__") or hasattr(given, "__getitems__")
    if isinstance(given, DataLoader | Tensor) or not has_items or not (known or is_asked):
        if is_asked:
            raise ConfigurationError(
                f"batch_size={batch_size!r} and collate_fn={collate_fn!r} with a {type(given).__name__}, which already "
                "has batches. Give the data set, or remove both arguments."
            )
        return given
    options = {} if collate_fn is None else {"collate_fn": collate_fn}
    return module.build_dataloader(given, SequentialSampler, batch_size or default_size, **options)


def evaluation_batches(
    loader: Any,
    *,
    seed: int,
    world: World,
    limit: int | float | None = None,
    fast_paths: bool = True,
    sharding: str = "trainer",
    digest: StreamDigest | None = None,
    in_turns: bool = False,
) -> tuple[Iterator[tuple[Any, int | None]], bool]:
    """The batches of `loader` that this process evaluates.

    A map-style data set is split into batches in data set order, for any sampler, and each process gets a contiguous
    range of batches. So the batches are the same on any number of processes, and outputs joined in the order of the
    ranks are in data set order. A loader with a custom order is read and evaluated completely on each process. Its
    iterator uses a random state that is the same on all ranks and in every evaluation.

    Args:
        loader: the loader that the module returned.
        seed: the seed of the samples' random numbers.
        world: the rank of this process and the number of processes.
        limit: the largest number of batches on each process. A float is a fraction of all batches of the loader.
        fast_paths: whether torch's loaders may be read by `fast_batches`, and rows of a `TensorDataset` at once.
        sharding: "loader" if a loader with a custom order gives each process different batches.
        digest: receives the batches that must be equal on all processes; may be None.
        in_turns: give each process every n-th batch instead of a contiguous range.

    Returns:
        each batch with its number of samples, or None if that is unknown; and whether the other processes evaluate the
        rest. If not, each process evaluates everything.

    Raises:
        ConfigurationError: `limit` is a fraction, and the loader has no length.
    """
    if unsupported_order_reason(loader) is not None:
        generators = LoaderGenerators(seed, EVALUATION_EPOCH)
        pairs: Iterator[tuple[Any, int | None]] = IsolatedIterator(
            generators,
            lambda: after_copies(counted_batches(loader, fast_paths=fast_paths)),
            first_alone=draws_first_batch_alone(loader),
        )
        presharded = sharding == "loader" and world.size > 1
        if digest is not None and not presharded and world.size > 1:
            pairs = digest.read(pairs)
        return islice(pairs, _part(limit, loader) if isinstance(limit, float) else limit), presharded
    size = loader.batch_size
    number, begin, count = _share(loader, world, limit)
    end = min(len(loader.dataset), (begin + count) * size)
    indices, counts = tee(_parts(begin * size, end, size))  # a process may get nothing
    if in_turns:
        every = _parts(0, min(len(loader.dataset), number * size), size)
        indices, counts = tee(islice(every, world.rank, None, world.size))
    batches = Fetcher(loader, seed, fast_paths=fast_paths).batches(EVALUATION_EPOCH, indices)
    return zip(batches, map(len, counts), strict=True), True


def count_batches(loader: Any, world: World, limit: int | float | None = None) -> int | None:
    """The number of batches of `loader` that `evaluation_batches` gives to this process; None if it is unknown.

    A loader with a custom order may end earlier than its length.
    """
    if unsupported_order_reason(loader) is None:
        return _share(loader, world, limit)[2]
    try:
        length = len(loader)
    except Exception:  # it has none; the number is for the display, whose absence is not an error
        return None
    return min(length, _part(limit, loader) if isinstance(limit, float) else length if limit is None else limit)


def _share(loader: Any, world: World, limit: int | float | None) -> tuple[int, int, int]:
    """The number of batches over all processes, and of this process the first batch and the number."""
    number = -(-len(loader.dataset) // loader.batch_size)
    if isinstance(limit, float):
        number = math.ceil(Fraction(str(limit)) * number)
    elif limit is not None:
        number = min(number, limit * world.size)
    low, extra = divmod(number, world.size)
    return number, world.rank * low + min(world.rank, extra), low + (world.rank < extra)


def _parts(begin: int, end: int, size: int) -> Iterator[Tensor]:
    """The integers of [`begin`, `end`) in parts of `size`. They are made in blocks to limit the memory."""
    block = size * max(1, _BLOCK // size)
    for first in range(begin, end, block):
        yield from torch.split(torch.arange(first, min(first + block, end)), size)


_BLOCK = 2**16
"""Integers in a block, 512 KiB, so that the cost of a block is small for each part."""


def sample_count_mismatch(loader: Any, counts: Sequence[int | None]) -> str | None:
    """A warning if the numbers of evaluated samples and of samples in the data set differ; else None.

    Args:
        loader: the loader that was evaluated to its end.
        counts: the number of evaluated samples of each process with a part; None if it is unknown.
    """
    dataset = getattr(loader, "dataset", None)
    known = [count for count in counts if count is not None]
    if not hasattr(dataset, "__len__") or isinstance(dataset, IterableDataset) or len(known) < len(counts):
        return None
    length, evaluated = len(dataset), sum(known)  # type: ignore[arg-type]
    if evaluated == length:
        return None
    return (
        f"{evaluated} samples were evaluated and the data set has {length}, so metrics do not use each sample once. "
        f"The loader has a custom order, because {unsupported_order_reason(loader) or 'its batches differ'}. Give it "
        "sampler=sampler(dataset) with the `sampler` argument of the method, which also divides the data among "
        "processes. For a part of the data, use a torch.utils.data.Subset."
    )


def on_main_only(module: nn.Module, world: World, stage: Stage, sharding: str) -> bool:
    """Whether only rank 0 evaluates, by `evaluate_on_main` of the module.

    Raises:
        ConfigurationError: `evaluate_on_main` is not a bool, or each rank has different data.
    """
    wanted, name = getattr(module, "evaluate_on_main", False), type(module).__name__
    if not isinstance(wanted, bool):
        raise ConfigurationError(
            f"{name}.evaluate_on_main is {wanted!r}. Write True to evaluate whole loaders on rank 0, or False."
        )
    if wanted and world.size > 1 and sharding == "loader":
        raise ConfigurationError(
            f"{name}.evaluate_on_main is True, but with data_sharding='loader' each process has a different part of "
            f"the {stage.name.lower()} data, and rank 0 cannot read the parts of the others. Write "
            f"data_sharding={{{stage.name.lower()!r}: 'trainer'}}, or evaluate_on_main = False."
        )
    return wanted and world.size > 1


def _part(fraction: float, loader: Any) -> int:
    """The number of batches for a fraction of `loader`, rounded up."""
    try:
        return math.ceil(Fraction(str(fraction)) * len(loader))
    except TypeError:
        raise ConfigurationError(
            f"max_val_steps_per_epoch={fraction} is a fraction, and a validation loader has no length. Write a number "
            "of batches."
        ) from None


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """A block in which all submodules are in eval mode. Their modes are restored after it."""
    modes = get_modes(module)
    module.eval()
    try:
        yield
    finally:
        set_modes(module, modes)


@contextmanager
def evaluation_pass(stack: TrainerBackend, work: Workload) -> Iterator[None]:
    """A block for a pass without training. The stack prepares for it, and undoes that also after an exception."""
    stack.begin_evaluation(work)
    try:
        yield
    finally:
        stack.end_evaluation(work)


def samples_if_known(batch: Any, *, lists_are_fields: bool) -> int | None:
    """The result of `samples_in`; None if it cannot tell."""
    try:
        return samples_in(batch, lists_are_fields=lists_are_fields)
    except ModuleContractError:
        return None


class LoaderPass:
    """One pass over one loader.

    Args:
        stack: the outermost layer.
        work: the result of `stack.prepare`.
        stage: the stage of the step method.
        step: its argument `global_step`.
        keep_outputs: collect the outputs.
        loader: the loader. Its `collate_fn` determines how to count the samples of a batch without a known number.

    Attributes:
        outputs: the collected outputs; None without `keep_outputs`.
        batches: the number of evaluated batches.
        samples: the number of evaluated samples; None if they could not be counted.
        logged: the values that the steps have logged.
        stopped_early: whether `run` ended before the last batch.
        is_consumed: whether a metric or a hook uses the outputs, so that they need no loss.
        loss_message: the warning about a missing loss in the first step; None without one.
        count_message: the warning about the first batch whose number of samples is doubtful; None without one.
    """

    stack: TrainerBackend
    work: Workload
    stage: Stage
    step: int
    outputs: OutputCollector | None
    batches: int
    stopped_early: bool

    def __init__(
        self,
        stack: TrainerBackend,
        work: Workload,
        stage: Stage,
        step: int,
        *,
        keep_outputs: bool = True,
        loader: Any = None,
    ) -> None:
        self.stack, self.work, self.stage, self.step = stack, work, stage, step
        self.outputs = OutputCollector() if keep_outputs else None
        self.batches, self.stopped_early = 0, False
        self.samples: int | None = 0
        self.logged = LoggedValues()
        self.is_consumed = True
        self.loss_message: str | None = None
        self.count_message: str | None = None
        self._lists_are_fields, self._sums = makes_lists_of_fields(loader), sums_losses(work.module)
        self._losses: list[Tensor] = []
        self._weights: list[float] = []

    def run(
        self,
        pairs: Iterable[tuple[Any, int | None]],
        progress: ProgressDisplay,
        should_stop: Callable[[], bool] | None = None,
        on_batch: Callable[[Any, Any], None] | None = None,
    ) -> None:
        """Evaluate batches, each with its number of samples if that is known, and poll `progress`.

        The pass ends after a batch if `should_stop` returns True. `on_batch` is called with the outputs of each step
        and its batch.
        """
        forward, work, stage, step = self.stack.forward, self.work, self.stage, self.step
        collect = None if self.outputs is None else self.outputs.collect
        counted: float = 0
        try:
            with torch.no_grad():
                for batch, samples in pairs:
                    outputs = forward(work, stage, batch, step)
                    if collect is not None:
                        collect(outputs)
                    if on_batch is not None:
                        on_batch(outputs, batch)
                    may_be_loss = type(outputs) is not Tensor or not outputs.dim() or not self.batches
                    if may_be_loss or self.logged.waits_for_weight:
                        self._keep_numbers(outputs, batch, samples)
                    if samples is None:
                        samples = samples_if_known(batch, lists_are_fields=self._lists_are_fields)
                    counted += math.nan if samples is None else samples
                    self.batches += 1
                    if self.batches >= progress.next_poll:
                        progress.poll(self.batches, lambda: None)
                    if should_stop is not None and should_stop():
                        self.stopped_early = True
                        break
        except Exception as error:
            annotate(error, f"in batch {self.batches} of {stage.name.lower()} at global step {step}")
            if "does not require grad" in str(error):
                name = f"{stage.name.lower()}_step"
                annotate(error, f"gradients are off in {name}. Write `with torch.enable_grad():` around that code")
            raise
        self.samples = None if math.isnan(counted) else int(counted)

    def _keep_numbers(self, outputs: Any, batch: Any, samples: int | None) -> None:
        """Keep the loss in `outputs`, if it is a 0-dim floating-point tensor, and weigh the values that the step has
        logged. Other outputs are predictions."""
        loss = loss_item(outputs)
        has_loss = isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point()
        if has_loss or self.logged.waits_for_weight:
            weight = self._weight_of(batch, samples)
            self.logged.weigh(weight)
            if has_loss:
                self._losses.append(loss.detach().clone())  # user code may write to it later
                self._weights.append(weight)
        if not has_loss and not self.batches:
            self.loss_message = missing_loss_message(outputs, self.stage, is_consumed=self.is_consumed)

    def _weight_of(self, batch: Any, samples: int | None) -> float:
        """The number of items in the means of `batch`."""
        weigh = custom_batch_weight(self.work.module)
        if weigh is not None:
            return checked_weight(weigh(batch))
        if samples is not None:
            return float(samples)
        weight = float(samples_in(batch, lists_are_fields=self._lists_are_fields))
        self.count_message = self.count_message or differing_lengths(batch)
        return weight

    def means(self, comm: Communicator) -> tuple[float | None, dict[str, tuple[float, float]]]:
        """The mean of the losses, or None without a loss; and the mean and weight of each logged value, by name.

        They are weighted by `batch_weight`, over the batches of all processes of `comm`, as one sum and one weight.
        With `loss_reduction = "sum"` the losses are summed.
        """
        values = self.stack.read([*self._losses, *self.logged.tensors()])
        losses, logged = values[: len(self._losses)], self.logged.by_name(values[len(self._losses) :])
        mine = [v if self._sums else v * w for v, w in zip(losses, self._weights, strict=True) if w]
        everyone = comm.gather((mine, self._weights, logged), "the means of an evaluation")
        total = math.fsum(weight for _, weights, _ in everyone for weight in weights)
        parts = [value for one, _, _ in everyone for value in one]
        loss = divided_sum(parts, 1.0 if self._sums else total) if total else None
        return loss, means_of(logged for _, _, logged in everyone)
