"""`SupervisedModule`: a ready-made `ModuleInterface` for a model, a loss and datasets."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from trainstack._keywords import CUTOFF
from trainstack.errors import ConfigurationError, ModuleContractError, annotate
from trainstack.trainer.arg_matching import (
    TARGETS,
    NameMapping,
    apply_mapping,
    as_named,
    call_with_matching_args,
    default_metric_inputs,
    parameters_of,
    select_mappings,
    unused_items_message,
)
from trainstack.trainer.arguments import TrainerArguments
from trainstack.trainer.core.record_losses import own_means, without_reduction
from trainstack.trainer.core.samples import IGNORED_LABEL, checked_weight, labels_in
from trainstack.trainer.data.columns import column_names, select_columns
from trainstack.trainer.evaluation.metric_of import with_computed
from trainstack.trainer.module_interface import ModuleInterface
from trainstack.trainer.named_parameters import split_parameters
from trainstack.trainer.optimizers import OptimizerSource, check_optimizer, make_optimizers, named_scheduler
from trainstack.trainer.schedulers.placeholders import resolve


class SupervisedModule(ModuleInterface):
    """Trains `model` on batches of inputs and targets.

    A batch that is a tuple or list is `(*inputs, target)`: the loss is `loss(model(*inputs), target)`. A batch with
    names (a dict or a dataclass) is matched by name. The model gets the items that its method has parameters for. The
    loss gets the outputs and items of the batch that it has parameters for; outputs without names are its first
    argument.

    Args:
        model: the network. Its weights are in this module's state dict with the prefix "model.".
        loss: function or module that returns a mean over samples. None if the model's outputs contain the loss: as an
            item or field `loss`, which is optional outside training, or in training as a dict of 0-dim losses, which
            are added. Private training calls it with `reduction="none"` if it has this option, and takes the mean of
            each record over its elements, so that class weights count.
        optimizer: a name such as "adamw", a class, a function of the parameters that returns one or several, or an
            optimizer of `model`'s parameters. Or a dict of these by groups of parameters, see `split_parameters`:
            `{"matrices": "muon", "rest": "adamw"}`. None if nothing is trained.
        train_dataset: an object with `__len__` and `__getitem__`; its `data_collator`, if it has one, collates it. None
            if nothing is trained.
        val_dataset: a dataset like `train_dataset`, or a dict of them by name; None for no validation.
        test_dataset: a dataset like `train_dataset`, or a dict of them by name, for `Trainer.test`.
        optimizer_kwargs: options for a name, a class or a function; may contain placeholders. With a dict of
            optimizers, a dict of such dicts.
        scheduler: a name such as "warmup_cosine", a function of the optimizer, a `SchedulerConfig`, or, with an
            existing optimizer, its scheduler.
        scheduler_kwargs: options for a name; may contain placeholders.
        metrics: metrics by name, updated with the model's outputs and the targets; see docs/validation.md.
        forward_fn: name of the model's method to call.
        val_forward_fn: name of the method to call outside training; None for `forward_fn`.
        input_mapping: changes the names in a batch before the model: old to new names, or a function; see
            `apply_mapping`.
        output_mapping: changes the names in the outputs of the model.
        train_input_mapping: instead of `input_mapping`, in training.
        val_input_mapping: instead of `input_mapping`, outside training.
        train_output_mapping: instead of `output_mapping`, in training.
        val_output_mapping: instead of `output_mapping`, outside training.
        target_keys: for batches with names, names of the items that are targets; None for those that the model does not
            take.
        collate_fn: function that makes batches, for all loaders.
        train_collate_fn: instead of `collate_fn` for the training data, such as a function that mixes samples.
        remove_unused_columns: whether to remove, before batches are made, the columns of a dataset of `datasets` that
            are parameters of neither the model nor the loss. They are logged. Targets, `target_keys` and names in
            `input_mapping` are kept.
        compute_metrics: function of all predictions and labels of an evaluation, as for `transformers.Trainer`: it gets
            an object with `predictions` and `label_ids`, numpy arrays, and returns numbers by name.
        train_dataloader_kwargs: further options of the training `DataLoader`, such as `num_workers`. `shuffle=False`
            keeps the order of the dataset; a `sampler`, such as a `WeightedRandomSampler`, has its own order, the same
            on all processes.
        val_dataloader_kwargs: further options of the `DataLoader` of validation and test data.
        loss_weight: items that the loss of a batch is a mean over, see `batch_weight`: `"samples"`, `"labels"` (labels
            that are not -100), or a function that counts the items of a batch. None: labels if the model computes its
            own loss from an item `labels` of integers, otherwise samples.
        unknown: refused, with the place of the argument.

    Raises:
        ConfigurationError: an argument is invalid, or two contradict each other.

    Attributes:
        loss_per_record: set by private training while it calls `train_step`, which then returns losses `(records,)`.
        weight_choice: description of the items that the loss of the last counted batch is a mean over; empty before the
            first.

    Examples:
        >>> model = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> module = ts.SupervisedModule(
        ...     model,
        ...     nn.MSELoss(),
        ...     "adamw",
        ...     data,
        ...     data,
        ...     optimizer_kwargs={"lr": 0.01},
        ...     scheduler="warmup_cosine",
        ... )
        >>> ts.Trainer(module, args).train()
    """

    model: nn.Module
    loss: Any
    collate_fn: Callable[[Any], Any] | None
    metrics: Any
    optimizer: OptimizerSource | None
    optimizer_kwargs: dict[str, Any]
    scheduler: Any
    train_dataset: Any
    val_dataset: Any
    test_dataset: Any
    forward_fns: tuple[str, str]
    input_mappings: tuple[NameMapping | None, NameMapping | None]
    output_mappings: tuple[NameMapping | None, NameMapping | None]
    target_keys: Sequence[str] | None
    loss_weight: Any
    train_dataloader_kwargs: dict[str, Any]
    val_dataloader_kwargs: dict[str, Any]
    weight_choice: str = ""
    loss_per_record = False

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any] | None,
        optimizer: OptimizerSource | None = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        *,
        test_dataset: Any = None,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        scheduler: Any = None,
        scheduler_kwargs: Mapping[str, Any] | None = None,
        metrics: Any = None,
        forward_fn: str = "forward",
        val_forward_fn: str | None = None,
        input_mapping: NameMapping | None = None,
        output_mapping: NameMapping | None = None,
        train_input_mapping: NameMapping | None = None,
        val_input_mapping: NameMapping | None = None,
        train_output_mapping: NameMapping | None = None,
        val_output_mapping: NameMapping | None = None,
        target_keys: Sequence[str] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        train_collate_fn: Callable[[Any], Any] | None = None,
        remove_unused_columns: bool = False,
        compute_metrics: Callable[[Any], Mapping[str, Any]] | None = None,
        train_dataloader_kwargs: Mapping[str, Any] | None = None,
        val_dataloader_kwargs: Mapping[str, Any] | None = None,
        loss_weight: Literal["samples", "labels"] | Callable[[Any], float] | None = None,
        **unknown: NoReturn,
    ) -> None:
        super().__init__()
        self.model, self.loss, self._may_lack_loss = model, _check_loss(model, loss, unknown), loss is None
        self._set_optimizer(optimizer, dict(optimizer_kwargs or {}), named_scheduler(scheduler, scheduler_kwargs))
        self.metrics, self.loss_weight = with_computed(metrics, compute_metrics), _check_loss_weight(loss_weight)
        self.target_keys, self.forward_fns = target_keys, _check_methods(model, forward_fn, val_forward_fn)
        self.input_mappings = select_mappings("input", input_mapping, train_input_mapping, val_input_mapping)
        self.output_mappings = select_mappings("output", output_mapping, train_output_mapping, val_output_mapping)
        self._set_loader_options(collate_fn, train_collate_fn, train_dataloader_kwargs, val_dataloader_kwargs)
        self._set_datasets(train_dataset, val_dataset, test_dataset, remove_unused_columns)

    def _set_optimizer(self, optimizer: OptimizerSource | None, options: dict[str, Any], scheduler: Any) -> None:
        check_optimizer(optimizer, options, scheduler)
        self.optimizer, self.optimizer_kwargs, self.scheduler = optimizer, options, scheduler

    def _set_loader_options(
        self, collate_fn: Any, train_collate_fn: Any, train: Mapping[str, Any] | None, val: Mapping[str, Any] | None
    ) -> None:
        self.collate_fn = collate_fn
        own = {} if train_collate_fn is None else {"collate_fn": train_collate_fn}
        self.train_dataloader_kwargs, self.val_dataloader_kwargs = own | _without_batch_size(train), dict(val or {})

    def _set_datasets(self, train: Any, val: Any, test: Any, remove: bool) -> None:
        select = partial(self._with_used_columns, remove=remove)
        self.train_dataset, self.val_dataset, self.test_dataset = select(train), select(val), select(test)

    def _with_used_columns(self, dataset: Any, *, remove: bool) -> Any:
        """Return `dataset`, or a dict of these, without unused columns if `remove` is True."""
        if isinstance(dataset, dict):
            return {key: self._with_used_columns(one, remove=remove) for key, one in dataset.items()}
        takers = [parameters_of(self._method(training)) for training in (True, False)] if column_names(dataset) else []
        takers += [parameters_of(self.loss)] if takers and self.loss is not None else []
        taken = {name for one in takers for name in one.names} | set(self.target_keys or ())
        return select_columns(dataset, taken, self.input_mappings, remove=remove)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> tuple[Any, Any]:
        """Create the optimizers of all parameters, including those of the loss, and the schedulers."""
        options = resolve(self.optimizer_kwargs, self.plan) if self.plan is not None else self.optimizer_kwargs
        if self.optimizer is None:
            raise ModuleContractError(
                "SupervisedModule has no optimizer, so it can evaluate and predict, but not train. Write "
                "SupervisedModule(model, loss, optimizer='adamw', train_dataset=...)."
            )
        if isinstance(self.optimizer, Mapping):
            parts = split_parameters(self, self.optimizer)
            made = [one for k, p in parts.items() for one in make_optimizers(self.optimizer[k], p, options.get(k, {}))]
        else:
            made = make_optimizers(self.optimizer, self.parameters(), options)
        if self.scheduler is None:
            return made, []
        return made, [self.scheduler] * (1 if isinstance(self.optimizer, Optimizer) else len(made))

    def get_train_dataloader(self, sampler: type, batch_size: int) -> Any:
        """Return a loader over the training data."""
        if self.train_dataset is None:
            raise ModuleContractError(
                "SupervisedModule has no train_dataset, so it can evaluate and predict, but not train. Write "
                "SupervisedModule(model, loss, optimizer, train_dataset=...)."
            )
        options = {"sampler": sampler, "batch_size": batch_size, **self.train_dataloader_kwargs}
        return self.build_dataloader(self.train_dataset, **options)

    def get_val_dataloaders(self, sampler: type, batch_size: int) -> Any:
        """Return a loader over the validation data, or a dict of loaders, or None."""
        return self._evaluation_loaders(self.val_dataset, sampler, batch_size)

    def _count_val_samples(self) -> int | None:
        if type(self).get_val_dataloaders is not SupervisedModule.get_val_dataloaders:
            return None
        given = self.val_dataset
        datasets = [] if given is None else list(given.values()) if isinstance(given, dict) else [given]
        return sum(map(len, datasets)) if all(hasattr(one, "__len__") for one in datasets) else None

    def get_test_dataloaders(self, sampler: type, batch_size: int) -> Any:
        """Return a loader over the test data, or a dict of loaders, or None."""
        return self._evaluation_loaders(self.test_dataset, sampler, batch_size)

    def _evaluation_loaders(self, datasets: Any, sampler: type, batch_size: int) -> Any:
        if datasets is None:
            return None
        options = {"sampler": sampler, "batch_size": batch_size, **self.val_dataloader_kwargs}
        if isinstance(datasets, dict):
            return {key: self.build_dataloader(data, **options) for key, data in datasets.items()}
        return self.build_dataloader(datasets, **options)

    def batch_weight(self, batch: Any) -> float:
        """Return the number of items that the loss of `batch` is a mean over, see `loss_weight`.

        Raises:
            ModuleContractError: `loss_weight="labels"`, and the batch has no labels.
        """
        if callable(self.loss_weight):
            return checked_weight(self.loss_weight(batch))
        labels, shifted = self._labels(batch)
        count = None if self.loss_weight == "samples" else labels_in(labels, shifted=shifted)
        if count is not None:
            self.weight_choice = f"labels that are not {IGNORED_LABEL}{', except the first of each row' * shifted}"
            return count
        if self.loss_weight == "labels":
            raise ModuleContractError(
                "loss_weight='labels', and a batch has no labels of integers: no item 'labels', no single target_keys, "
                "and no target at the end of a tuple. Write a function of the batch that counts them."
            )
        self.weight_choice = "samples"
        return super().batch_weight(batch)

    def _counts_samples(self) -> bool:
        return self.loss_weight == "samples" or (self.loss_weight is None and self.loss is not None)

    batch_weight.counts_samples = _counts_samples  # type: ignore[attr-defined]

    def _labels(self, batch: Any) -> tuple[Any, bool]:
        """Return the labels of a batch from the loader, and whether the model shifts them before its loss."""
        mapping = self.input_mappings[0]
        if isinstance(mapping, Mapping):  # a function is only called for the step: it may draw random numbers
            batch = apply_mapping(mapping, batch)
        named = as_named(batch)
        if named is None:
            given = self.loss is not None and isinstance(batch, tuple | list) and len(batch) > 1
            return (batch[-1] if given else None), False
        if self.loss is not None:
            keys = self.target_keys or ()
            return named.get("labels", named.get(keys[0]) if len(keys) == 1 else None), False
        if named.get("shift_labels") is not None:
            return named["shift_labels"], False
        return named.get("labels"), _shifts_labels(self.model)

    def train_step(self, global_step: int, batch: Any, device: torch.device) -> Any:
        return self.step(batch, training=True)

    def val_step(self, global_step: int, batch: Any, device: torch.device) -> Any:
        return self.step(batch, training=False)

    def test_step(self, global_step: int, batch: Any, device: torch.device) -> Any:
        return self.step(batch, training=False)

    def predict_step(self, global_step: int, batch: Any, device: torch.device) -> Any:
        """Return only the outputs. A batch without names is one input, or `(*inputs, target)`; the target is unused."""
        return self._call_model(_mapped(self.input_mappings[True], batch), training=False)

    def _val_step_returns_dict(self) -> bool:
        kind = type(self)
        return kind.val_step is SupervisedModule.val_step and kind.step is SupervisedModule.step

    def step(self, batch: Any, *, training: bool) -> dict[str, Any]:
        """Run the model on one batch and compute the loss.

        Args:
            batch: batch on the device of the model.
            training: whether this is a training step.

        Returns:
            `loss` (0-dim; missing if the model computes the loss and returns none outside training), `outputs` (of the
            model, after the mapping; a dict if they have names) and `targets` (the last item of a tuple; for a batch
            with names, a dict).
        """
        batch = _mapped(self.input_mappings[not training], batch)
        if not isinstance(batch, dict) and (not isinstance(batch, tuple | list) or len(batch) < 2):
            what = (
                f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, tuple | list) else type(batch).__name__
            )
            raise ModuleContractError(
                f"a batch is a {what}, which has no target. Return (inputs, target) or a dict from the dataset, "
                "or write an input_mapping."
            )
        outputs = self._call_model(batch, training, whole=self._takes_targets(batch, training))
        targets = self._targets(batch, training) if isinstance(batch, dict) else batch[-1]
        found = {"outputs": outputs, "targets": targets}
        if self.loss is None and not training and not _has_loss(outputs):
            return found
        return {"loss": self._training_loss(outputs, batch) if training else self._loss(outputs, batch), **found}

    def metric_inputs(self, outputs: Any, batch: Any) -> tuple[Any, ...] | dict[str, Any]:
        """Return `outputs` and `targets` of a step, and their items by name if they have names.

        Outputs of a derived class's `val_step` without these two keys are used as in any module.
        """
        if not isinstance(outputs, dict) or not {"outputs", "targets"} <= outputs.keys():
            return default_metric_inputs(outputs, batch)
        inputs: dict[str, Any] = {}
        for role, items in (("outputs", outputs["outputs"]), ("targets", self._metric_targets(outputs, batch))):
            if isinstance(items, dict):
                items = {name: item for name, item in items.items() if name != "loss"}
                inputs |= {name: item for name, item in items.items() if name not in inputs}
                items = next(iter(items.values())) if len(items) == 1 else None
            if items is not None:
                inputs = {role: items} | inputs
        return inputs

    def _metric_targets(self, outputs: dict[str, Any], batch: Any) -> Any:
        """Return the targets of a step; if there are none, items with the name of a target that the model takes."""
        targets, mapping = outputs["targets"], self.input_mappings[True]
        named = as_named(batch)
        if self.target_keys is not None or not isinstance(targets, dict) or named is None:
            return targets
        if targets and (self.loss is not None or any(key in TARGETS for key in targets)):
            return targets
        named = _mapped(mapping, named) if isinstance(mapping, Mapping) else named
        return {**targets, **{key: named[key] for key in TARGETS if key in named}}

    def _unused_items(self, batch: Any, takers: Sequence[Callable[..., Any]]) -> str | None:
        """Return a warning for tensors that no parameter of the model, the loss or `takers` uses.

        It does not call a mapping that is a function again. A method of a derived class may use any item, so then
        there is no warning.
        """
        mapping, named = self.input_mappings[0], as_named(batch)
        derived = any(getattr(type(self), name) is not getattr(SupervisedModule, name) for name in _MAY_TAKE_ITEMS)
        if derived or named is None or (mapping is not None and not isinstance(mapping, Mapping)):
            return None
        items = {
            name: item
            for name, item in _mapped(mapping, named).items()
            if isinstance(item, torch.Tensor) and name not in (self.target_keys or ())
        }
        return unused_items_message(items, [self._method(True), *([self.loss] if self.loss else [])], takers)

    def _takes_targets(self, batch: Any, training: bool) -> bool:
        """Whether the model computes its loss from the target in a tuple, as torchvision's detection models do."""
        if self.loss is not None or not isinstance(batch, tuple | list):
            return False
        names = parameters_of(self._method(training)).names
        return len(names) >= len(batch) and names[len(batch) - 1] in TARGETS

    def _call_model(self, batch: Any, training: bool, *, whole: bool = False) -> Any:
        method = self._method(training)
        try:
            if isinstance(batch, dict):
                outputs = call_with_matching_args(method, batch)
            elif isinstance(batch, tuple | list):
                outputs = method(*(batch if whole or len(batch) == 1 else batch[:-1]))
            else:
                outputs = method(batch)
        except Exception as error:
            own = [name for name in ("train_step", "evaluate_step") if callable(getattr(self.model, name, None))]
            if own and self.forward_fns[not training] == "forward":
                kinds = zip(("forward_fn", "val_forward_fn"), own, strict=False)
                given = ", ".join(f"{kind}={name!r}" for kind, name in kinds)
                annotate(
                    error, f"{type(self.model).__name__}.forward was called; SupervisedModule({given}) calls those"
                )
            raise
        return _mapped(self.output_mappings[not training], outputs)

    def _method(self, training: bool) -> Callable[..., Any]:
        name = self.forward_fns[not training]
        return self.model if name == "forward" else getattr(self.model, name)

    def _targets(self, batch: dict[str, Any], training: bool) -> dict[str, Any]:
        keys = self.target_keys
        if keys is None:
            takes = parameters_of(self._method(training))
            keys = [] if takes.takes_all else [key for key in batch if key not in takes.names]
        return {key: batch[key] for key in keys if key in batch}

    def _training_loss(self, outputs: Any, batch: Any) -> Any:
        """Return the loss, or in private training the loss of each record if the criterion can compute it."""
        each = without_reduction(self.loss) if self.loss_per_record and self.loss is not None else None
        if each is None:
            return self._loss(outputs, batch)
        names = parameters_of(self.loss).names
        target = batch.get(names[1]) if isinstance(batch, dict) and len(names) > 1 else batch
        target = target[-1] if isinstance(target, tuple | list) else target
        means = own_means(self._loss(outputs, batch, each), target, self.loss)
        return self._loss(outputs, batch) if means is None else means

    def _loss(self, outputs: Any, batch: Any, loss: Any = None) -> Any:
        loss = self.loss if loss is None else loss
        if self.loss is None:
            if _has_loss(outputs):
                return outputs["loss"]
            if isinstance(outputs, dict) and outputs and all(map(_is_loss, outputs.values())):
                return sum(outputs.values())
            has = f"the items {sorted(outputs)}" if isinstance(outputs, dict) else f"a {type(outputs).__name__}"
            raise ModuleContractError(
                f"SupervisedModule has no loss, and {type(self.model).__name__} returned {has}, which contains none. "
                "Write a loss, or an output_mapping that gives it the name 'loss'."
            )
        if not isinstance(batch, dict) and not isinstance(outputs, dict):
            return loss(outputs, batch[-1])
        named = batch if isinstance(batch, dict) else {"target": batch[-1]}
        if isinstance(outputs, dict):
            return call_with_matching_args(loss, outputs, named)
        first = parameters_of(loss).names[:1]
        return call_with_matching_args(loss, {**named, **dict.fromkeys(first, outputs)})


_MAY_TAKE_ITEMS = (
    "step",
    "train_step",
    "val_step",
    "metric_inputs",
    "batch_weight",
    "on_end_train_step",
    "on_end_train_epoch",
    "on_end_val_epoch",
)


def _mapped(mapping: NameMapping | None, value: Any) -> Any:
    mapped = apply_mapping(mapping, value)
    named = as_named(mapped)
    return mapped if named is None else named


def _has_loss(outputs: Any) -> bool:
    return isinstance(outputs, dict) and outputs.get("loss") is not None


def _is_loss(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()


_OF_OPTIMIZERS = ("lr", "learning_rate", "weight_decay", "momentum", "betas", "eps", "nesterov")
_OF_LOADERS = ("num_workers", "shuffle", "pin_memory", "drop_last", "sampler", "prefetch_factor", "persistent_workers")


def _check_places(model: Any, loss: Any, unknown: Mapping[str, Any]) -> None:
    """Refuse a loss in the place of the model, and arguments of other objects.

    Raises:
        ConfigurationError: saying where they belong.
    """
    if type(model).__module__ == "torch.nn.modules.loss":
        swapped = " The model was given second." if isinstance(loss, nn.Module) else ""
        raise ConfigurationError(
            f"SupervisedModule: the first argument is the model, the second the loss; a {type(model).__name__} was "
            f"given first.{swapped} Write SupervisedModule(model, loss, ...)."
        )
    for name, value in unknown.items():
        if name in _OF_OPTIMIZERS:
            key = "lr" if name == "learning_rate" else name
            how = f"Write optimizer_kwargs={{{key!r}: {value!r}}}."
        elif name in _OF_LOADERS:
            how = f"Write train_dataloader_kwargs={{{name!r}: {value!r}}}, or val_dataloader_kwargs."
        elif name in {field.name for field in fields(TrainerArguments)}:
            how = f"Write TrainerArguments({name}={value!r})."
        else:
            known = [key for key in inspect.signature(SupervisedModule).parameters if key != "unknown"]
            close = difflib.get_close_matches(name, known, 1, CUTOFF)
            alias = TrainerArguments.ALIASES.get(name)
            how = f"Write {close[0] if close else alias}." if close or alias else f"There are {', '.join(known)}."
        raise ConfigurationError(f"SupervisedModule has no argument {name!r}. {how}")


def _check_loss(model: Any, loss: Any, unknown: Mapping[str, Any]) -> Any:
    _check_places(model, loss, unknown)
    if isinstance(loss, type):
        raise ConfigurationError(f"loss is the class {loss.__name__}. Write an object of it: loss={loss.__name__}().")
    if loss is not None and not callable(loss):
        raise ConfigurationError(
            f"loss={loss!r}: write a function such as torch.nn.functional.cross_entropy, a module such as "
            "torch.nn.CrossEntropyLoss(), or None if the model's outputs have an item 'loss'."
        )
    return loss


def _check_loss_weight(loss_weight: Any) -> Any:
    if loss_weight not in (None, "samples", "labels") and not callable(loss_weight):
        raise ConfigurationError(
            f"loss_weight={loss_weight!r}: write 'samples', 'labels', a function that counts the items of a batch, or "
            "None."
        )
    return loss_weight


# Models of transformers with these names predict each label from the tokens before it, so the first label is not
# predicted. The exceptions have such a name but predict every label.
_CAUSAL, _NOT_CAUSAL = ("ForCausalLM", "LMHeadModel"), ("WithLMHeadModel", "XLNetLMHeadModel")


def _shifts_labels(model: nn.Module) -> bool:
    model = getattr(model, "_orig_mod", model)  # inside a compiled model
    name = type(model).__name__
    causal = name.endswith(_CAUSAL) and not name.endswith(_NOT_CAUSAL)
    return causal and "shift_labels" not in parameters_of(model).names


def _check_methods(model: Any, train: str, val: str | None) -> tuple[str, str]:
    """Return the names of the methods to call in training and outside of it."""
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"model={model!r}: write an object of a torch.nn.Module.")
    for name, method in (("forward_fn", train), ("val_forward_fn", val or train)):
        if not callable(getattr(model, method, None)):
            own = [key for key in dir(type(model)) if not key.startswith("_") and key not in dir(nn.Module)]
            methods = ["forward", *(key for key in own if callable(getattr(type(model), key)))]
            raise ConfigurationError(
                f"{name}={method!r}: {type(model).__name__} has no such method. It has {', '.join(methods)}."
            )
    return train, val or train


def _without_batch_size(options: Mapping[str, Any] | None) -> dict[str, Any]:
    if options and "batch_size" in options:
        raise ConfigurationError(
            f"train_dataloader_kwargs={{'batch_size': {options['batch_size']!r}}}: the batch of training is an "
            "argument of the run. Write TrainerArguments(train_batch_size=...) or per_device_train_batch_size=..."
        )
    return dict(options or {})
