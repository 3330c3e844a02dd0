"""`ModuleInterface`: the base class of users' modules."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from trainstack.errors import ConfigurationError, ModuleContractError, annotate
from trainstack.stage import Stage
from trainstack.trainer.argument_names import NOT_ON_MODULE
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
    """Declare a hook whose override may have fewer parameters, or names for its outputs.

    Type checkers compare an override with the declared type, and `...` accepts any parameters.
    """
    return function


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Declare a method whose overriding method may have fewer parameters."""
    return function


class CallbackInterface:
    """Hooks around the training loop.

    A hook gets outputs only if its signature has `*outputs` or names for them; without these, no memory is used.
    Outputs are detached. Those of a step are on the training device, those of an epoch on the CPU.
    """

    @_hook
    def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
        """Called before the first batch of an epoch.

        A run that resumes within an epoch calls it again, with the state before the epoch. Then the state is restored,
        see docs/resume.md.

        Args:
            global_step: number of finished global steps.
            epoch: epoch, counted from 0.
        """

    @_hook
    def on_end_backward(self, global_step: int, loss_tensor: Tensor) -> None:
        """Called after the backward pass of each micro-batch.

        Args:
            global_step: current global step, counted from 1.
            loss_tensor: loss of the micro-batch, 0-dim, neither scaled nor detached; its graph is freed.
        """

    @_hook
    def on_end_train_step(self, global_step: int, *train_step_collated_outputs: Any) -> None:
        """Called after each global step, including skipped ones.

        Args:
            global_step: number of finished global steps, including this one.
            *train_step_collated_outputs: outputs of `train_step` for the micro-batches of this step on this process,
                concatenated along dimension 0, item by item; dict outputs become one dict.
        """

    @_hook
    def on_end_train_epoch(self, global_step: int, *train_step_collated_outputs: Any) -> None:
        """Called after the last step of an epoch and before validation, with the outputs of the whole epoch."""

    @_hook
    def on_end_val_epoch(self, global_step: int, *val_step_collated_outputs: Any, key: str = "default") -> None:
        """Called after each validation loader.

        Args:
            global_step: number of finished global steps.
            *val_step_collated_outputs: outputs of `val_step`, item by item, in dataset order.
            key: key of the loader in the dict from `get_val_dataloaders`; "default" for a single loader.
        """

    @_hook
    def on_end_train(self, global_step: int) -> None:
        """Called once, after the last epoch and its checkpoint."""


_given_steps: ContextVar[tuple[nn.Module | None, Mapping[Stage, Callable[..., Any]]]] = ContextVar(
    "given_steps", default=(None, {})
)


@contextmanager
def calls_given_steps(module: nn.Module, steps: Mapping[Stage, Callable[..., Any]]) -> Iterator[None]:
    """Context manager in which `forward` of `module` calls these functions in place of its methods.

    It uses a context variable, because the module belongs to the user and layers wrap its call: an attribute would
    change the module, and an argument would not reach it.
    """
    before = _given_steps.set((module, steps))
    try:
        yield
    finally:
        _given_steps.reset(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchInfo:
    """Position of a micro-batch in its global step, for `train_step`.

    Attributes:
        number: position among the micro-batches of the step on this process, counted from 0.
        count: number of micro-batches; for a loader with a custom order, the largest possible number.
        samples: indices of its samples in the dataset; None for a loader with a custom order, with `overfit_batches`,
            and outside of a step. Empty for a borrowed micro-batch: this rank has fewer than others in this step, and
            runs it with weight 0.
    """

    number: int = 0
    count: int = 1
    samples: tuple[int, ...] | None = None


class StepView:
    """Gives a module its current micro-batch. A copy, such as one in a pickled module, has the default."""

    def __init__(self, micro_batch: Callable[[], MicroBatchInfo] = MicroBatchInfo) -> None:
        self.micro_batch = micro_batch

    def __reduce__(self) -> tuple[type[StepView], tuple[()]]:
        return StepView, ()


class _CurrentMicroBatch:
    """The attribute `micro_batch` of a module, unless the module assigns its own."""

    def __get__(self, module: Any, kind: Any = None) -> MicroBatchInfo:
        view: StepView | None = getattr(module, "_step_view", None)
        return MicroBatchInfo() if view is None else view.micro_batch()


class _LoggedWithoutTrainer:
    """The attribute `logged` of a module, unless the module assigns its own."""

    def __get__(self, module: Any, kind: Any = None) -> dict[str, Any]:
        return {} if module is None else vars(module).setdefault("_logged_alone", {})


class _NotOnClass:
    """A name of `NOT_ON_MODULE` that other libraries use on the class, where no `__getattr__` of a module is called."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(f"{owner.__name__} has no {self._name}. {NOT_ON_MODULE[self._name]}.")


class ModuleInterface(nn.Module, CallbackInterface, MediaLog, ABC):
    """Base class of a training task: model, steps, optimizers and data.

    A trainer sets `plan` and two private attributes: `_log_sink`, which gets the values of `log`, and `_step_view`.

    Attributes:
        plan: all step arithmetic of the run; set by the trainer before it calls `get_optimizers_schedulers`.
        keep_modes: whether each part trains in its mode (training or eval) at the call of `train()`. By default parts
            with trainable parameters are put into training mode, except single layers.
        micro_batch: in `train_step`, position of the micro-batch in the global step; elsewhere number 0 of 1.
        loss_reduction: `"mean"` if `train_step` returns a mean over the items of its batch. `"sum"` if it returns a
            sum: then the losses and gradients of micro-batches and processes are added. None: a mean, with a warning
            about a probable sum if a step is split.
        evaluate_on_main: True lets rank 0 evaluate whole loaders, for a `val_step` that carries state from batch to
            batch. The other ranks wait, and get the same losses, metrics and outputs.
        splits_batches: False forbids several micro-batches a step, such as for a module that carries state from batch
            to batch.
        hyperparameters: values by name that trackers show with those of the run, such as the width of the model. Set
            them in `__init__`.
        logged: the last logged value of each name while no trainer runs the module, such as in a unit test of a step.
        metrics: not defined here. A module may define this attribute or method: metrics by name, objects with `update`,
            `compute` and `reset`; see docs/validation.md.

    Examples:
        >>> class Line(ts.ModuleInterface):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.model = nn.Linear(1, 1)
        ...
        ...     def get_optimizers_schedulers(
        ...         self, estimated_global_steps_per_epoch, epochs
        ...     ):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1), None
        ...
        ...     def get_train_dataloader(self, sampler, batch_size):
        ...         return DataLoader(
        ...             data, batch_size=batch_size, sampler=sampler(data)
        ...         )
        ...
        ...     def train_step(self, global_step, batch, device):
        ...         x, y = batch
        ...         return nn.functional.mse_loss(self.model(x), y)
        >>> ts.Trainer(Line(), args).train()
    """

    plan: TrainingPlan = None  # type: ignore[assignment]  # set before any method of the user is called
    keep_modes: bool = False
    evaluate_on_main: bool = False
    micro_batch: _CurrentMicroBatch = _CurrentMicroBatch()
    loss_reduction: Literal["mean", "sum"] | None = None
    splits_batches: bool = True
    hyperparameters: Mapping[str, Any] = MappingProxyType({})
    logged: _LoggedWithoutTrainer = _LoggedWithoutTrainer()
    _log_sink: LogSink | None = None
    _step_view: StepView | None = None
    _may_lack_loss: bool = False  # whether `val_step` may return outputs without a loss

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse a class without the methods that training needs.

        Raises:
            ModuleContractError: with the missing methods, and methods of other libraries that the class has.
        """
        if missing := sorted(getattr(cls, "__abstractmethods__", ())):
            raise _lacks_methods(cls, missing)
        return super().__new__(cls)

    if not TYPE_CHECKING:  # type checkers use the annotations of the user
        load_from_checkpoint = _NotOnClass()

        def __getattr__(self, name: str) -> Any:
            """Look up parts and parameters; the error for an attribute of another library's modules has a note.

            Raises:
                AttributeError: there is no such attribute.
            """
            try:
                return super().__getattr__(name)
            except AttributeError as error:
                if name in NOT_ON_MODULE:
                    annotate(error, f"{type(self).__name__} has no {name}. {NOT_ON_MODULE[name]}.")
                raise

    @abstractmethod
    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> tuple[Any, Any]:
        """Create the optimizers and their schedulers.

        Args:
            estimated_global_steps_per_epoch: an upper bound; `self.plan` has the exact numbers.
            epochs: epochs of the whole run.

        Returns:
            A list of optimizers and a list of schedulers (may be empty or None). A scheduler steps once after each
            global step that changed the weights, unless it is in a `SchedulerConfig`. Instead of a scheduler, the list
            may have a function of the optimizer that makes it.
        """

    @abstractmethod
    def get_train_dataloader(self, sampler: type, batch_size: int) -> Any:
        """Describe the training data. Called for the plan, and at the start of each epoch.

        A run that resumes within an epoch calls it again, with the state before the first call for this epoch.

        Args:
            sampler: class of the sampler: `DataLoader(ds, sampler=sampler(ds), batch_size=batch_size)`.
            batch_size: samples a micro-batch.

        Returns:
            A `DataLoader`. The trainer uses its dataset, `collate_fn`, workers and `drop_last`, and the library's order
            (a permutation from seed and epoch). With a custom sampler, an iterable dataset or another class than
            `DataLoader`, the batches are used in the loader's order. With a `LengthGroupedSampler`, batches hold
            samples of similar lengths. A dict of loaders gives each step a dict with a batch of each, see
            `TrainerArguments.combine_loaders`.
        """

    def get_val_dataloaders(self, sampler: type, batch_size: int) -> Any:
        """Describe the validation data.

        Args:
            sampler: class of the sampler, as for `get_train_dataloader`.
            batch_size: samples a batch on each process (`val_batch_size`).

        Returns:
            One loader, a dict of loaders by key, or None for no validation.
        """
        return None

    def _count_val_samples(self) -> int | None:
        """The number of validation samples for the printed plan, 0 for no validation; None if it is unknown."""
        return None

    def get_test_dataloaders(self, sampler: type, batch_size: int) -> Any:
        """Describe the test data for `Trainer.test`; arguments and result as for `get_val_dataloaders`."""
        return None

    def get_callbacks(self) -> Any:
        """Return callbacks, or classes of callbacks, in a list, also for runs of `trainstack train FILE.py:MODULE`.

        The trainer calls this method once, when it is created. The callbacks come after those of `Trainer(callbacks=)`.
        """
        return ()

    @abstractmethod
    def train_step(self, global_step: int, batch: Any, device: torch.device) -> Any:
        """Compute the loss of one micro-batch.

        It may be a generator, for several updates in one global step: each `yield loss, optimizer` makes one backward
        pass and one update, and the code after it uses the new weights. `optimizer` is one from
        `get_optimizers_schedulers`, its position, or a sequence of these; without it, all are stepped. In place of a
        loss, a function without parameters may be yielded that computes it: then the optimizer is stepped with a
        closure. The return value of the generator is the output of the step. See docs/recipes/gan.md.

        Args:
            global_step: current global step, counted from 1.
            batch: batch from the loader, with its tensors on `device`.
            device: the training device.

        Returns:
            The loss (0-dim, the mean over the batch's items), a tuple or list whose first item is the loss, a dict
            with the key "loss", or a dataclass with this field.
        """

    def val_step(self, global_step: int, batch: Any, device: torch.device) -> Any:
        """Evaluate one batch of validation data, without gradients.

        Args:
            global_step: number of finished global steps.
            batch: batch from the loader, with its tensors on `device`.
            device: device of the run.

        Returns:
            The outputs for `on_end_val_epoch`. A loss among them, in a form of `train_step`, is recorded.
        """
        raise self._lacks("val_step", "get_val_dataloaders")

    def test_step(self, global_step: int, batch: Any, device: torch.device) -> Any:
        """Evaluate one batch of test data, without gradients; arguments and result as for `val_step`."""
        raise self._lacks("test_step", "get_test_dataloaders")

    def predict_step(self, global_step: int, batch: Any, device: torch.device) -> Any:
        """Return predictions for one batch, without gradients; arguments as for `val_step`."""
        raise ModuleContractError(
            f"{type(self).__name__} has no predict_step, which Trainer.predict calls. Define "
            "predict_step(self, global_step, batch, device)."
        )

    def metric_inputs(self, outputs: Any, batch: Any) -> Any:
        """Return the inputs of metrics after `val_step` or `test_step`; override it if the default does not fit.

        Args:
            outputs: outputs of the step.
            batch: batch from the loader, before it is moved to the device.

        Returns:
            A tuple, passed to each metric's `update` by position; a dict, whose items are matched with the names of its
            parameters; or None to skip the batch. The default is the result of `default_metric_inputs`, which finds
            predictions and targets.
        """
        from trainstack.trainer.arg_matching import default_metric_inputs  # not at the top: it imports this module

        return default_metric_inputs(outputs, batch)

    def _unused_items(self, batch: Any, takers: Sequence[Callable[..., Any]]) -> str | None:
        """Return a warning about items of `batch` that neither the step nor `takers` use; None if unknown."""
        return None

    def _lacks(self, step: str, loaders: str) -> ModuleContractError:
        return ModuleContractError(
            f"{type(self).__name__} has no {step}, but {loaders} returned data. Define "
            f"{step}(self, global_step, batch, device), or return None from {loaders}."
        )

    def _given_step(self, stage: Stage) -> Callable[..., Any] | None:
        """Return the function that replaces the method for `stage`, bound to this module; None without one."""
        module, steps = _given_steps.get()
        return MethodType(steps[stage], self) if module is self and stage in steps else None

    def _val_step_returns_dict(self) -> bool:
        """Whether `val_step` is known to return a dict, which `on_end_val_epoch` gets as one argument."""
        return False

    @_method
    def forward(self, stage: Any = None, global_step: int = 0, batch: Any = None, device: Any = None, **_: Any) -> Any:
        """Run the step for `stage`. The backend calls this method.

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
        """Return the blocks that `fsdp`, `compile="units"` and `activation_checkpointing` process separately.

        Returns:
            Modules, their names, their classes or the names of classes. Each forward pass must call each of these
            modules. None for the blocks that an `nn.ModuleList` or `nn.Sequential` repeats.
        """
        return None

    def batch_weight(self, batch: Any) -> float:
        """Return the number of items that the loss of `batch` is a mean over: its samples, unless overridden.

        Override it if the loss is a mean over other items, such as tokens that are not padding. The micro-batches of a
        global step are then weighted by their items, so that any split gives the same gradient.

        Args:
            batch: batch from the loader, before it is moved to the device.
        """
        return samples_in(batch, lists_are_fields=True)

    batch_weight.counts_samples = True  # type: ignore[attr-defined]

    def build_dataloader(self, dataset: Any, sampler: Any, batch_size: int, **options: Any) -> DataLoader[Any]:
        """Make a `DataLoader` over `dataset`, for the methods above, which get `sampler` and `batch_size`.

        Args:
            dataset: an object with `__len__` and `__getitem__`, or an `IterableDataset`.
            sampler: the argument of the method, a sampler object with a custom order, or None for the order of the
                dataset; `shuffle=True` or `shuffle=False` in the options overrides it.
            batch_size: the argument of the method.
            **options: options of `DataLoader`. Without `collate_fn`, the loader uses this module's `collate_fn`, or
                else the dataset's `data_collator`, or else torch's default.

        Raises:
            ModuleContractError: `dataset` is not a dataset.
            ConfigurationError: `DataLoader` does not accept the options.
        """
        lacks = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
        if lacks and not isinstance(dataset, IterableDataset):
            raise ModuleContractError(
                f"a {type(dataset).__name__} is not a dataset: it has no {' and no '.join(lacks)}. Write an object "
                "with __len__ and __getitem__, or an IterableDataset."
            )
        chosen = {"batch_size": batch_size, **options}
        if chosen.get("collate_fn") is None:
            chosen["collate_fn"] = getattr(self, "collate_fn", None) or getattr(dataset, "data_collator", None)
        shuffle = chosen.pop("shuffle", None)
        if "batch_sampler" in chosen:
            del chosen["batch_size"]
        elif not isinstance(dataset, IterableDataset) and chosen.get("sampler") is None:
            if shuffle is not None or sampler is None:
                sampler = RandomSampler if shuffle else SequentialSampler
            chosen["sampler"] = sampler if isinstance(sampler, Sampler) else sampler(dataset)
        try:
            return DataLoader(dataset, **chosen)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"DataLoader does not accept the options {chosen}: {error}") from error

    def log(self, name: str, value: Any, **unknown: NoReturn) -> None:
        """Record a number under `name` at the current step; a tensor is read at the next log point, not now.

        Values of `val_step` and `test_step` are recorded once, at the end of the evaluation, as their mean over the
        samples of all loaders and processes. As in the loss, a batch is weighted by `batch_weight`; a batch without a
        value under `name` does not count. Values of `train_step` and hooks are recorded each time.

        While no trainer runs the module, the value is kept in `logged`, with one warning.

        Args:
            name: name of the metric, such as "train/accuracy".
            value: a number, or a tensor with one element on any device.
            unknown: always an error.

        Raises:
            ConfigurationError: the name or the value is invalid, the trainer itself records a metric of this name, or
                there is another argument.
        """
        if unknown:
            raise ConfigurationError(
                f"self.log has no argument {', '.join(map(repr, unknown))}. Write self.log({name!r}, value). Steps, "
                "means over evaluations and processes, progress and writers are automatic."
            )
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
                f"{type(self).__name__} logs {name!r} and no Trainer runs it: the values are kept in module.logged."
            )
        kept[name] = value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, unless its value would hide a name of the library.

        Raises:
            ModuleContractError: the value of `plan` is not a plan, or the value of a method is not a function.
        """
        if name in library_names() and (problem := name_conflict(type(self).__name__, name, value)) is not None:
            raise ModuleContractError(problem)
        super().__setattr__(name, value)

    def get_state(self) -> dict[str, Any]:
        """Return the module's state for a checkpoint: its `state_dict` unless overridden, with names as without
        `torch.compile`."""
        return {without_wrappers(name): value for name, value in self.state_dict().items()}

    def update_state(self, state: Mapping[str, Any] | None) -> None:
        """Load the state from `get_state`; None has no effect."""
        if state:
            wrapped = {without_wrappers(name): name for name in self.state_dict()}
            self.load_state_dict({wrapped.get(name, name): value for name, value in state.items()})

    def redistribute_state(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """Compute the state of this rank from those of a run with another number of ranks.

        Define it if `get_state` returns different values on the ranks and a run should resume on more or fewer ranks.
        Without it such a resume is an error.

        Args:
            states: results of `get_state` on each rank that wrote the checkpoint.
            rank: rank of this process, counted from 0.
            world_size: current number of ranks.

        Returns:
            The argument of `update_state` on this rank.
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
        parameters = inspect.signature(getattr(cls, name)).parameters.values()
        plain = inspect.Signature([one.replace(annotation=one.empty, default=one.empty) for one in parameters])
        theirs = next((one for one in _OTHER_METHODS.get(name, ()) if hasattr(cls, one)), None)
        has = f"{cls.__name__} has {theirs}; trainstack calls" if theirs else "Define"
        sentences.append(f"{has} {name}{plain}.")
    return ModuleContractError(
        f"{cls.__name__} lacks {', '.join(missing)}, so it cannot be trained. {' '.join(sentences)} For a model with a "
        "loss and a data set, SupervisedModule has these methods."
    )


@cache
def library_names() -> frozenset[str]:
    """Return the names on a module that the trainer sets or calls: `plan` and the methods."""
    defined = {**vars(CallbackInterface), **vars(MediaLog), **vars(ModuleInterface)}
    return frozenset(name for name, value in defined.items() if name[0] != "_" and (callable(value) or name == "plan"))


def name_conflict(owner: str, name: str, value: Any) -> str | None:
    """Return the reason why `value` cannot be the attribute `name` of a module of class `owner`; None if it can.

    A function may replace a method, as in `self.train_step = torch.compile(self.train_step)`. An `nn.Module` cannot:
    PyTorch registers it under the name, but an access still returns the method of the class.
    """
    if name == "plan":
        if value is None or isinstance(value, TrainingPlan):
            return None
        return f"{owner}.plan was given a {type(value).__name__}. The trainer sets its TrainingPlan there. {_RENAME}"
    is_function = callable(value) and not isinstance(value, nn.Module)
    if name not in library_names() or is_function or (value is None and name.startswith("on_")):
        return None
    return (
        f"{owner}.{name} was given a {type(value).__name__}, and {name} is a method that the trainer calls. {_RENAME}"
    )


_RENAME = "Choose another name for the attribute."


def _plain_value(value: Any) -> Any:
    """Return the mean over records of a value that `torch.func.vmap` computes for each; other values unchanged."""
    # torch 2.13.0 has no public access to the value inside a wrapper. If a later version lacks these private names, no
    # value is unwrapped, so `log` works only outside of vmap.
    functorch = getattr(torch._C, "_functorch", None)
    is_wrapped = getattr(functorch, "is_functorch_wrapped_tensor", None)
    unwrap = getattr(functorch, "get_unwrapped", None)
    plain = value
    while is_wrapped and unwrap and isinstance(plain, torch.Tensor) and is_wrapped(plain):
        plain = unwrap(plain)
    return value if plain is value else plain.detach().float().mean()
