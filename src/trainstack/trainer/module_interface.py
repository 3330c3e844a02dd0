"""`ModuleInterface`, the class that a user writes."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from trainstack.errors import ConfigurationError, ModuleContractError
from trainstack.stage import Stage
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.core.module_extras import without_wrappers
from trainstack.trainer.core.plan import TrainingPlan
from trainstack.trainer.core.samples import samples_in
from trainstack.trainer.core.several_updates import NextPart
from trainstack.trainer.tracking.history import RunHistory, check_name
from trainstack.trainer.tracking.media import MediaLog
from trainstack.trainer.tracking.provenance import Provenance

if TYPE_CHECKING:
    from trainstack.trainer.tracking.log_sink import LogSink


def _hook(function: Callable[..., None]) -> Callable[..., None]:
    """Declare a hook whose overriding method may have fewer parameters, or outputs under their own names.

    Type checkers compare an override with the declared type, and `...` accepts each list of parameters.
    """
    return function


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Declare a method whose overriding method may have fewer parameters."""
    return function


class CallbackInterface:
    """Hooks around the loop.

    Outputs reach a hook only if it asks for them: a hook without `*outputs` in its signature costs no memory.
    Outputs are detached; those of a step lie on the training device, those of an epoch on the CPU.
    """

    @_hook
    def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
        """Before the first batch of an epoch.

        A run that goes on within an epoch calls it again, on the state from before the epoch. Afterwards the state is
        what it was: see docs/resume.md.

        Args:
            global_step: global steps finished so far.
            epoch: counted from 0.
        """

    @_hook
    def on_end_backward(self, global_step: int, loss_tensor: Tensor) -> None:
        """After the backward pass of each micro-batch.

        Args:
            global_step: number of the step under way, counted from 1.
            loss_tensor: the micro-batch's loss, 0-dim, neither scaled nor detached; its graph is freed.
        """

    @_hook
    def on_end_train_step(self, global_step: int, *train_step_collated_outputs: Any) -> None:
        """After each global step, also one that was skipped.

        Args:
            global_step: global steps finished, this one included.
            *train_step_collated_outputs: what `train_step` returned for the micro-batches of this step on this
                process, item by item, joined along dimension 0; a dict arrives as one dict.
        """

    @_hook
    def on_end_train_epoch(self, global_step: int, *train_step_collated_outputs: Any) -> None:
        """After the last step of an epoch and before validation; outputs as above, over the whole epoch."""

    @_hook
    def on_end_val_epoch(self, global_step: int, *val_step_collated_outputs: Any, key: str = "default") -> None:
        """After each validation loader.

        Args:
            global_step: global steps finished so far.
            *val_step_collated_outputs: what `val_step` returned, item by item, in data set order.
            key: the loader's key in the dict that `get_val_dataloaders` returned; "default" for a single loader.
        """

    @_hook
    def on_end_train(self, global_step: int) -> None:
        """Once, after the last epoch and its checkpoint."""


_given_steps: ContextVar[tuple[nn.Module | None, Mapping[Stage, Callable[..., Any]]]] = ContextVar(
    "given_steps", default=(None, {})
)


@contextmanager
def calls_given_steps(module: nn.Module, steps: Mapping[Stage, Callable[..., Any]]) -> Iterator[None]:
    """A block in which `forward` of `module` calls these functions in the place of its methods.

    A context variable and no attribute, for the module is the user's, and layers wrap its call: no argument reaches it.
    """
    before = _given_steps.set((module, steps))
    try:
        yield
    finally:
        _given_steps.reset(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchInfo:
    """The part of a global step that `train_step` is called for.

    Attributes:
        number: its place among the micro-batches of the step on this process, counted from 0.
        count: how many there are; at most so many for a loader with an order of its own.
        samples: the indices of its samples in the dataset; None for a loader with an order of its own, with
            `overfit_batches`, and outside of a step. Empty for a borrowed micro-batch: this rank has fewer than others
            in this step, and runs it with weight 0.
    """

    number: int = 0
    count: int = 1
    samples: tuple[int, ...] | None = None


class StepView:
    """Tells a module which micro-batch is under way. A copy, such as one in a pickled module, tells nothing."""

    def __init__(self, micro_batch: Callable[[], MicroBatchInfo] = MicroBatchInfo) -> None:
        self.micro_batch = micro_batch

    def __reduce__(self) -> tuple[type[StepView], tuple[()]]:
        return StepView, ()


class _MicroBatchUnderWay:
    """The attribute `micro_batch` of a module, unless the module assigns one itself."""

    def __get__(self, module: Any, kind: Any = None) -> MicroBatchInfo:
        view: StepView | None = getattr(module, "_step_view", None)
        return MicroBatchInfo() if view is None else view.micro_batch()


class _LoggedAlone:
    """The attribute `logged` of a module, unless the module assigns one itself."""

    def __get__(self, module: Any, kind: Any = None) -> dict[str, Any]:
        return {} if module is None else vars(module).setdefault("_logged_alone", {})


class ModuleInterface(nn.Module, CallbackInterface, MediaLog, ABC):
    """Model, steps, optimizers and data of one training task.

    A trainer sets `plan` and two private attributes: `_log_sink`, to which `log` passes values, and `_step_view`.

    Attributes:
        plan: all step arithmetic of the run; set by the trainer before it calls `get_optimizers_schedulers`.
        keep_modes: whether each part trains in the mode, training or eval, that it has when `train()` is called. By
            default parts with trainable parameters are put into training mode, except single layers.
        micro_batch: in `train_step`, which part of the global step this is; elsewhere number 0 of 1.
        loss_reduction: `"mean"` if `train_step` returns a mean over the items of its batch. `"sum"` if it returns a
            sum: then the losses and gradients of micro-batches and processes are added up. None: a mean, and what looks
            like a sum is warned about where a step is split.
        evaluate_on_main: True lets rank 0 evaluate whole loaders, for a `val_step` that carries state from batch to
            batch. The other ranks wait, and get the same losses, metrics and outputs.
        splits_batches: False refuses a run whose steps have several micro-batches, such as that of a module that
            carries state from batch to batch.
        hyperparameters: values by name that trackers show beside those of the run, such as the width of the model. Set
            them in `__init__`.
        logged: the last value of each name that was logged while no trainer ran the module, such as in a unit test of a
            step.
        metrics: not defined here. A module may have this attribute or method: metrics by name, anything with `update`,
            `compute` and `reset`; see docs/validation.md.
    """

    plan: TrainingPlan = None  # type: ignore[assignment]  # what a user writes runs after it is set
    keep_modes: bool = False
    evaluate_on_main: bool = False
    micro_batch: _MicroBatchUnderWay = _MicroBatchUnderWay()
    loss_reduction: Literal["mean", "sum"] | None = None
    splits_batches: bool = True
    hyperparameters: Mapping[str, Any] = MappingProxyType({})
    logged: _LoggedAlone = _LoggedAlone()
    _log_sink: LogSink | None = None
    _step_view: StepView | None = None
    _may_lack_loss: bool = False  # whether `val_step` is known to return no loss sometimes

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse a class without the methods that training needs.

        Raises:
            ModuleContractError: with the missing methods, and methods of other libraries that the class has.
        """
        if missing := sorted(getattr(cls, "__abstractmethods__", ())):
            raise _lacks_methods(cls, missing)
        return super().__new__(cls)

    @abstractmethod
    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> tuple[Any, Any]:
        """Make the optimizers and their schedulers.

        Args:
            estimated_global_steps_per_epoch: an upper bound; `self.plan` has the exact numbers.
            epochs: of the whole run.

        Returns:
            A list of optimizers and a list of schedulers (may be empty or None). A scheduler steps once after each
            global step that moved the weights, unless a `SchedulerConfig` says otherwise. Instead of a scheduler there
            may be a function of the optimizer that makes it.
        """

    @abstractmethod
    def get_train_dataloader(self, sampler: type, batch_size: int) -> Any:
        """Describe the training data; called for the plan, and at the start of each epoch.

        A run that goes on within an epoch calls it again, on the state from before the first call for this epoch.

        Args:
            sampler: call it with the data set: `DataLoader(ds, sampler=sampler(ds), batch_size=batch_size)`.
            batch_size: samples a micro-batch.

        Returns:
            A `DataLoader`. Data set, `collate_fn`, workers and `drop_last` are taken from it; the order is the
            library's own (a permutation of seed and epoch), unless the loader has a custom sampler, an iterable
            data set or is no `DataLoader`: then its batches are used as they come. With a `LengthGroupedSampler` the
            batches hold samples of like lengths. A dict of loaders gives each step a dict with a batch of each, as
            `TrainerArguments.combine_loaders` says.
        """

    def get_val_dataloaders(self, sampler: type, batch_size: int) -> Any:
        """Describe the validation data: one loader, a dict of loaders by key, or None for no validation."""
        return None

    def get_test_dataloaders(self, sampler: type, batch_size: int) -> Any:
        """Describe the test data for `Trainer.test`: one loader, a dict of loaders by key, or None."""
        return None

    @abstractmethod
    def train_step(self, global_step: int, batch: Any, device: torch.device) -> Any:
        """Compute the loss of one micro-batch.

        Args:
            global_step: number of the step under way, counted from 1.
            batch: what the loader gave, its tensors on `device`.
            device: the training device.

        Returns:
            The loss (0-dim, the mean over the batch's items), a tuple or list whose first item is the loss, a dict
            with the key "loss", or a dataclass with that field.

        It may be a generator, for several updates in one global step: each `yield loss, optimizer` makes one backward
        pass and one update, and the code after it sees the new weights. `optimizer` is one of those that
        `get_optimizers_schedulers` returned, its position, or several of either; left out, it is all. In the place of a
        loss there may be a function without parameters that computes it: then the optimizer is stepped with a closure.
        What the generator returns at its end are the outputs of the step. See docs/recipes/gan.md.
        """

    def val_step(self, global_step: int, batch: Any, device: torch.device) -> Any:
        """Evaluate one batch of validation data; gradients are off. Returns what `on_end_val_epoch` is to get."""
        raise self._lacks("val_step", "get_val_dataloaders")

    def test_step(self, global_step: int, batch: Any, device: torch.device) -> Any:
        """Evaluate one batch of test data; gradients are off."""
        raise self._lacks("test_step", "get_test_dataloaders")

    def predict_step(self, global_step: int, batch: Any, device: torch.device) -> Any:
        """Predict for one batch; gradients are off. Returns what `Trainer.predict` is to collect."""
        raise ModuleContractError(
            f"{type(self).__name__} has no predict_step, which Trainer.predict calls. Define "
            "predict_step(self, global_step, batch, device)."
        )

    def metric_inputs(self, outputs: Any, batch: Any) -> Any:
        """What metrics are fed with after `val_step` or `test_step`; override it where the default does not fit.

        Args:
            outputs: what the step returned.
            batch: as the loader gave it.

        Returns:
            A tuple, given to each metric's `update` by position; a dict, whose items are matched with the names of its
            parameters; or None to leave the batch out. By default predictions and targets as
            `default_metric_inputs` finds them.
        """
        from trainstack.trainer.arg_matching import default_metric_inputs  # which imports classes derived from this

        return default_metric_inputs(outputs, batch)

    def _unused_items(self, batch: Any, takers: Sequence[Callable[..., Any]]) -> str | None:
        """A warning for items of `batch` that neither the step nor `takers` take; None where nothing is known."""
        return None

    def _lacks(self, step: str, loaders: str) -> ModuleContractError:
        return ModuleContractError(
            f"{type(self).__name__} has no {step}, but {loaders} returned data. Define "
            f"{step}(self, global_step, batch, device), or return None from {loaders}."
        )

    def _given_step(self, stage: Stage) -> Callable[..., Any] | None:
        """The function that a trainer calls instead of the method for `stage`, bound to this module; None without."""
        module, steps = _given_steps.get()
        return MethodType(steps[stage], self) if module is self and stage in steps else None

    @_method
    def forward(self, stage: Any = None, global_step: int = 0, batch: Any = None, device: Any = None, **_: Any) -> Any:
        """Run the step that belongs to `stage`. The backend calls it.

        Args:
            stage: a `Stage`.
            global_step: as for `train_step`.
            batch: as for `train_step`.
            device: as for `train_step`.

        Raises:
            ModuleContractError: other code calls the module like a network.
        """
        if isinstance(batch, NextPart):
            return batch.run()
        if (step := self._given_step(stage)) is not None:
            return step(batch=batch, device=device, global_step=global_step)
        if stage is Stage.TRAIN:
            return self.train_step(batch=batch, device=device, global_step=global_step)
        if stage is Stage.VAL:
            return self.val_step(batch=batch, device=device, global_step=global_step)
        if stage is Stage.TEST:
            return self.test_step(batch=batch, device=device, global_step=global_step)
        if stage is Stage.PREDICT:
            return self.predict_step(batch=batch, device=device, global_step=global_step)
        raise self._called_like_network()

    def _called_like_network(self) -> ModuleContractError:
        name = next((name for name, part in self.named_children() if any(True for _ in part.parameters())), "net")
        kind = type(self).__name__
        return ModuleContractError(
            f"{kind} was called like a network. Its forward belongs to the trainer. Call the attribute that holds the "
            f"network, such as self.{name}(...)."
        )

    def sharding_units(self) -> Sequence[str | type[nn.Module] | nn.Module] | None:
        """The blocks that `fsdp`, `compile="units"` and `activation_checkpointing` work on one by one.

        Return modules, their names, their classes or the names of these. Each forward pass has to call each of them.
        None takes the blocks that an `nn.ModuleList` or `nn.Sequential` repeats.
        """
        return None

    def batch_weight(self, batch: Any) -> float:
        """How many items the loss of `batch` is a mean over: its samples, unless overridden.

        Override it where the loss is a mean over something else, such as the tokens that are no padding. The
        micro-batches of a global step then count by their items, so that any split gives the same gradient.
        `batch` is as the loader gave it, before it is moved to the device.
        """
        return samples_in(batch, lists_are_fields=True)

    batch_weight.counts_samples = True  # type: ignore[attr-defined]

    def build_dataloader(self, dataset: Any, sampler: Any, batch_size: int, **options: Any) -> DataLoader[Any]:
        """A `DataLoader` over `dataset`, for use in the methods above, which are given `sampler` and `batch_size`.

        Args:
            dataset: an object with `__len__` and `__getitem__`, or an `IterableDataset`.
            sampler: as given, a sampler object with a custom order, or None for the order of the data set;
                `shuffle=True` or `shuffle=False` among the options chooses another.
            batch_size: as given.
            **options: of `DataLoader`. Without `collate_fn` among them, batches are made by this module's `collate_fn`
                if it has one, else by the data set's `data_collator`, else as torch does.

        Raises:
            ModuleContractError: `dataset` is none.
            ConfigurationError: `DataLoader` refuses the options.
        """
        lacks = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
        if lacks and not isinstance(dataset, IterableDataset):
            raise ModuleContractError(
                f"a {type(dataset).__name__} is no data set: it has no {' and no '.join(lacks)}. Give an object with "
                "__len__ and __getitem__, or an IterableDataset."
            )
        chosen = {"batch_size": batch_size, **options}
        if chosen.get("collate_fn") is None:
            chosen["collate_fn"] = getattr(self, "collate_fn", None) or getattr(dataset, "data_collator", None)
        shuffle = chosen.pop("shuffle", None)
        if "batch_sampler" in chosen:
            del chosen["batch_size"]
        elif not isinstance(dataset, IterableDataset) and chosen.get("sampler") is None:
            if shuffle is not None:
                sampler = RandomSampler if shuffle else SequentialSampler
            if sampler is not None:  # without one, DataLoader keeps the order of the data set
                chosen["sampler"] = sampler if isinstance(sampler, Sampler) else sampler(dataset)
        try:
            return DataLoader(dataset, **chosen)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"DataLoader does not take the options {chosen}: {error}") from error

    def log(self, name: str, value: Any) -> None:
        """Record a number under `name` at the step under way; a tensor is read at the next log point, not now.

        Values of `val_step` and `test_step` are recorded once, at the end of the evaluation: their mean over the
        samples of all loaders and processes. As in the loss, a batch counts by `batch_weight`; a batch in which nothing
        was logged under `name` does not count. What `train_step` and hooks log is recorded each time.

        A module that no trainer has run yet keeps the value in `logged`, and says so once.

        Raises:
            ConfigurationError: the name or the value cannot be recorded, or the trainer records a metric of that name.
        """
        if self._log_sink is None:
            alone = RunHistory()
            alone.update_metric(name, _plain_value(value))
            self._keep_alone(name, alone.get_latest_metric(name))
        else:
            self._log_sink.record(name, _plain_value(value))

    def _log_media(self, kind: str, name: str, make: Callable[[], Any], provenance: Provenance | None) -> None:
        if self._log_sink is None:
            self._keep_alone(check_name(name), make())
        else:
            self._log_sink.record_media(kind, name, make, provenance)

    def _keep_alone(self, name: str, value: Any) -> None:
        kept = vars(self).setdefault("_logged_alone", {})
        if not kept:
            RunLogger().warning(
                f"{type(self).__name__} logs {name!r} and no Trainer runs it: what it logs is kept in module.logged."
            )
        kept[name] = value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; refuse a value that would hide a name of the library.

        Raises:
            ModuleContractError: `plan` is given another value than a plan, or a method another value than a function.
        """
        if name in library_names() and (problem := name_conflict(type(self).__name__, name, value)) is not None:
            raise ModuleContractError(problem)
        super().__setattr__(name, value)

    def get_state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the module; its `state_dict` unless overridden, under the names of what
        `torch.compile` may have wrapped."""
        return {without_wrappers(name): value for name, value in self.state_dict().items()}

    def update_state(self, state: Mapping[str, Any] | None) -> None:
        """Take back what `get_state` returned; does nothing for None."""
        if state:
            wrapped = {without_wrappers(name): name for name in self.state_dict()}
            self.load_state_dict({wrapped.get(name, name): value for name, value in state.items()})

    def redistribute_state(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """Make the state of this rank out of those of a run with another number of ranks.

        Define it where `get_state` returns other values on each rank and a run is to be resumed on more or fewer ranks;
        without it such a resume is refused.

        Args:
            states: what `get_state` returned on each rank that wrote the checkpoint.
            rank: of this process, counted from 0.
            world_size: how many ranks there are now.

        Returns:
            What `update_state` is to be given on this rank.
        """
        raise NotImplementedError


_OTHER_METHODS = {
    "train_step": ("training_step", "training_loss", "compute_loss", "step"),
    "get_optimizers_schedulers": ("configure_optimizers", "get_optimizers", "create_optimizer"),
    "get_train_dataloader": ("train_dataloader", "train_dataloaders", "get_train_dataloaders", "get_train_loader"),
}
"""Names that Lightning, transformers and others have for the methods that training needs."""


def _lacks_methods(cls: type, missing: Sequence[str]) -> ModuleContractError:
    sentences = []
    for name in missing:
        signature = str(inspect.signature(getattr(cls, name))).partition(" ->")[0]
        plain = ", ".join(part.partition(":")[0].strip() for part in signature.strip("()").split(","))
        theirs = next((one for one in _OTHER_METHODS.get(name, ()) if hasattr(cls, one)), None)
        has = f"{cls.__name__} has {theirs}; trainstack calls" if theirs else "Define"
        sentences.append(f"{has} {name}({plain}).")
    return ModuleContractError(
        f"{cls.__name__} lacks {', '.join(missing)}, so it cannot be trained. {' '.join(sentences)} For a model with a "
        "loss and a data set, SupervisedModule has these methods."
    )


@cache
def library_names() -> frozenset[str]:
    """The names on a module that the trainer sets or calls: `plan` and the methods."""
    defined = {**vars(CallbackInterface), **vars(MediaLog), **vars(ModuleInterface)}
    return frozenset(name for name, value in defined.items() if name[0] != "_" and (callable(value) or name == "plan"))


def name_conflict(owner: str, name: str, value: Any) -> str | None:
    """Why `value` cannot be the attribute `name` of a module of the class `owner`; None if it can.

    A function may replace a method, as `torch.compile(self.train_step)` does. An `nn.Module` cannot: PyTorch registers
    it under the name, and the method of the class still comes first.
    """
    if name == "plan":
        if value is None or isinstance(value, TrainingPlan):
            return None
        return f"{owner}.plan was given a {type(value).__name__}. The trainer keeps its TrainingPlan there. {_RENAME}"
    is_function = callable(value) and not isinstance(value, nn.Module)
    if name not in library_names() or is_function or (value is None and name.startswith("on_")):
        return None
    return (
        f"{owner}.{name} was given a {type(value).__name__}, and {name} is a method that the trainer calls. {_RENAME}"
    )


_RENAME = "Choose another name for the attribute."


def _plain_value(value: Any) -> Any:
    """The mean over records of a value that `torch.func.vmap` computes for each; other values as they are."""
    # torch 2.13.0: there is no public way to the value inside a wrapper. Without these names no value is unwrapped,
    # so that `log` works outside of vmap.
    functorch = getattr(torch._C, "_functorch", None)
    is_wrapped = getattr(functorch, "is_functorch_wrapped_tensor", None)
    unwrap = getattr(functorch, "get_unwrapped", None)
    plain = value
    while is_wrapped and unwrap and isinstance(plain, torch.Tensor) and is_wrapped(plain):
        plain = unwrap(plain)
    return value if plain is value else plain.detach().float().mean()
