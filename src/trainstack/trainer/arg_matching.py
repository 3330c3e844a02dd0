"""Matching of step outputs and batches to the parameters of functions and metrics."""

from __future__ import annotations

import difflib
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from trainstack.errors import ConfigurationError, ModuleContractError

NameMapping = Mapping[str, str] | Callable[[Any], Any]


def apply_mapping(mapping: NameMapping | None, value: Any) -> Any:
    """Return `value` with other names; `value` itself is not changed.

    Args:
        mapping: dict of old to new names, or a function of `value`, or None for no change. Names that `value` lacks are
            ignored; items without an entry keep their names.
        value: for a dict of names, a dict or other mapping, a dataclass, or a tuple or list, whose items have the names
            `_0`, `_1`, and so on. For a function, any value.

    Returns:
        A dict, or the result of the function.

    Raises:
        ModuleContractError: `value` has no names, or two items would get the same name.
    """
    if mapping is None:
        return value
    if not isinstance(mapping, Mapping):
        return mapping(value)
    by_position = isinstance(value, tuple | list)
    named = {f"_{position}": item for position, item in enumerate(value)} if by_position else as_named(value)
    if named is None:
        raise ModuleContractError(
            f"names cannot be mapped in a {type(value).__name__}. Use a function as the mapping, or return a dict, a "
            "dataclass, a tuple or a list."
        )
    names = Counter(mapping.get(name, name) for name in named)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ModuleContractError(
            f"the mapping {dict(mapping)} makes two items {twice[0]!r} of the items {list(named)}. Map the other one "
            "to a different name."
        )
    return {mapping.get(name, name): item for name, item in named.items()}


def as_named(value: Any) -> dict[str, Any] | None:
    """Return a mapping or a dataclass as a shallow dict; None for other values."""
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return None


def select_mappings(
    kind: str, general: NameMapping | None, train: NameMapping | None, val: NameMapping | None
) -> tuple[NameMapping | None, NameMapping | None]:
    """Return the mappings for training and for evaluation.

    Raises:
        ConfigurationError: a general mapping is given together with a specific one, or a value is not a mapping.
    """
    given = {f"{kind}_mapping": general, f"train_{kind}_mapping": train, f"val_{kind}_mapping": val}
    for name, mapping in given.items():
        if mapping is not None and not isinstance(mapping, Mapping) and not callable(mapping):
            raise ConfigurationError(f"{name}={mapping!r}: write a dict of old and new names, or a function.")
    if general is not None and (train is not None or val is not None):
        raise ConfigurationError(
            f"{kind}_mapping applies to training and validation; remove train_{kind}_mapping and "
            f"val_{kind}_mapping, or remove {kind}_mapping and write both."
        )
    return (train, val) if general is None else (general, general)


def call_with_matching_args(function: Callable[..., Any], *sources: Mapping[str, Any]) -> Any:
    """Call `function` with the values of `sources` whose names are its parameters.

    Other values are omitted, unless the function has `**kwargs`. Parameters without a value keep their defaults. The
    signature is read once, at the first call.

    Args:
        function: function or module; a module is called with the parameters of its `forward`.
        *sources: values by name.

    Returns:
        The result of `function`.

    Raises:
        ModuleContractError: no source has a value for a parameter without a default, two sources have different
            values for one, or the function has `*args` or positional-only parameters, which cannot be matched by name.
    """
    return function(**parameters_of(function).pick(*sources))


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a function that can be passed by name.

    Attributes:
        function: name of the function, for messages.
        names: names of all parameters, in order.
        required: names of parameters without a default.
        takes_all: whether the function has `**kwargs`.
    """

    function: str
    names: tuple[str, ...]
    required: tuple[str, ...]
    takes_all: bool

    def pick(self, *sources: Mapping[str, Any]) -> dict[str, Any]:
        """Select the values for the function's parameters; see `call_with_matching_args`."""
        picked: dict[str, Any] = {}
        for source in sources:
            for name in source if self.takes_all else [name for name in self.names if name in source]:
                if name in picked and picked[name] is not source[name]:
                    raise ModuleContractError(
                        f"{self.function} takes {name!r}, and two sources have it: {_provided(sources)}. Rename one "
                        "with a mapping."
                    )
                picked[name] = source[name]
        missing = [name for name in self.required if name not in picked]
        if missing:
            raise ModuleContractError(
                f"{self.function} requires {', '.join(map(repr, missing))}. The available names are "
                f"{_provided(sources)}. Rename with a mapping, or give the parameter a default."
            )
        return picked


def parameters_of(function: Callable[..., Any]) -> Parameters:
    """Return the parameters of `function`; of a module those of its `forward`, also if torch.compile has wrapped it.

    Raises:
        ModuleContractError: it has no signature, or parameters that cannot be matched by name.
    """
    if isinstance(function, nn.Module):
        module = getattr(function, "_orig_mod", function)
        if callable(getattr(module, "get_base_model", None)):
            return _of_adapted(module)
        function = module.forward
    bound, plain = hasattr(function, "__self__"), getattr(function, "__func__", function)
    try:
        known = _KNOWN.setdefault(plain, {})
    except TypeError:  # not hashable, or without weak references
        return _read(function)
    if bound not in known:
        known[bound] = _read(function)
    return known[bound]


def _of_adapted(module: nn.Module) -> Parameters:
    """Return the parameters of a `PeftModel`, which passes arguments that it does not have to its base model."""
    own, base = _read(module.forward), parameters_of(module.get_base_model())  # type: ignore[operator]
    return Parameters(
        function=own.function,
        names=tuple(dict.fromkeys((*base.names, *own.names))) if own.takes_all else own.names,
        required=tuple(dict.fromkeys((*own.required, *(base.required if own.takes_all else ())))),
        takes_all=own.takes_all and base.takes_all,
    )


_KNOWN: WeakKeyDictionary[Any, dict[bool, Parameters]] = WeakKeyDictionary()
"""Parameters by function and by whether it is bound, so that all models of a class share one entry."""


def _read(function: Callable[..., Any]) -> Parameters:
    name = getattr(function, "__qualname__", None) or type(function).__name__
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ModuleContractError(f"{name} has no signature for matching names. Wrap it in a function.") from error
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    if takes_all:  # a function with *args and **kwargs passes on all of its arguments, so names reach it as keywords
        parameters = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
            raise ModuleContractError(
                f"{name} takes {star}{parameter.name} by position only, so names cannot be matched with it. Use named "
                "parameters, or let the loader return tuples."
            )
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    return Parameters(
        function=name,
        names=tuple(p.name for p in named),
        required=tuple(p.name for p in named if p.default is p.empty),
        takes_all=takes_all,
    )


def _provided(sources: tuple[Mapping[str, Any], ...]) -> str:
    return " and ".join(str(sorted(map(str, source))) for source in sources)


PREDICTIONS = ("preds", "pred", "predictions", "prediction", "outputs", "logits")
TARGETS = ("target", "targets", "labels", "label")


def default_metric_inputs(outputs: Any, batch: Any) -> tuple[Any, ...] | dict[str, Any]:
    """Return the arguments for `update` of a metric.

    Args:
        outputs: outputs of a step. The loss, the first item of a tuple or the item `loss`, is omitted.
        batch: batch from the loader. Its target is the last item of a tuple or list, or an item with a name in
            `TARGETS`, or an attribute with such a name or `y` of another object, such as a batch of graphs.

    Returns:
        For outputs with names, a dict of these and of the batch's items, to be matched by name. For other outputs
        `(prediction, target)` if there is one output and the batch has a target, otherwise all outputs.

    Raises:
        ModuleContractError: the only output is a loss.
    """
    names, target = as_named(batch), {}
    if names is None and isinstance(batch, tuple | list) and len(batch) > 1:
        target = {"target": batch[-1]}
    elif names is None and not isinstance(batch, tuple | list):
        held = (getattr(batch, name, None) for name in (*TARGETS, "y"))
        target = dict([("target", value) for value in held if isinstance(value, Tensor)][:1])
    named = as_named(outputs)
    if named is not None:
        rest = {**target, **(names or {})}
        found = {name: value for name, value in named.items() if name != "loss"}
        if any(name in found for name in TARGETS):
            rest.pop("target", None)
        return found | {name: value for name, value in rest.items() if name not in found}
    items = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    if items and isinstance(items[0], Tensor) and items[0].dim() == 0:
        items = items[1:]  # the loss
    if not items:
        raise ModuleContractError(
            "there are metrics, and the step returned only a loss, so the metrics have no inputs. Return "
            "predictions too, such as (loss, predictions), or define metric_inputs(self, outputs, batch)."
        )
    wanted = next((name for name in TARGETS if name in (names or {})), None)
    if wanted is not None and names is not None:
        target = {"target": names[wanted]}
    return (*items, *target.values()) if len(items) == 1 else tuple(items)


_OPTIONS_OF_LOSSES = frozenset({"ignore_index", "label_smoothing", "reduce", "reduction", "size_average"})
"""Parameters of torch's loss functions that are options, not inputs."""


def unused_items_message(
    items: Mapping[str, Tensor], functions: Sequence[Callable[..., Any]], others: Sequence[Callable[..., Any]]
) -> str | None:
    """Return a warning about items of a batch that no function has a parameter for; None if there are none.

    One integer for each sample is probably its id: it is reported only if a parameter has a similar name.

    Args:
        items: tensors of a batch by name.
        functions: the model and the loss, whose parameters are suggested.
        others: other functions, such as the `update` of metrics, which get the item with the name of a target.
    """
    named = [parameters_of(function) for function in functions]
    if any(one.takes_all for one in named):
        return None
    known = {name for one in named for name in one.names}
    for function in others:
        with suppress(ModuleContractError):
            taker = parameters_of(function)
            known.update(items if taker.takes_all else (*TARGETS, *taker.names))
    free = {
        name: one.function
        for one in named
        for name in one.names
        if name not in items and name not in one.required and name not in _OPTIONS_OF_LOSSES
    }
    unused = []
    for name in (name for name in items if name not in known):
        # 0.4 instead of 0.6: there are few candidates, so a weak similarity is a useful hint.
        near = difflib.get_close_matches(name, free, n=1, cutoff=0.4)
        if near:
            unused.append(f"{name!r} (did you mean {near[0]!r} of {free[near[0]]}?)")
        elif items[name].is_floating_point() or items[name].dim() > 1:
            unused.append(repr(name))
    if not unused:
        return None
    takers = " or ".join(one.function for one in named)
    return (
        f"the batches have {', '.join(unused)}, which no parameter of {takers} takes, so they are not used. Rename "
        "them with input_mapping={'old': 'new'}, or remove them from the dataset."
    )


def check_not_correctness(outputs: Any, inputs: Any, step: str, metric: str) -> None:
    """Raise an error if the only output is boolean and the target has numbers: it says which predictions are right.

    Args:
        outputs: outputs of the step.
        inputs: result of `default_metric_inputs`.
        step: name of the step for the message.
        metric: name of the metric for the message.

    Raises:
        ModuleContractError: the output is boolean; the message names the right output.
    """
    if not isinstance(inputs, tuple) or len(inputs) != 2:
        return
    if isinstance(outputs, tuple | list) and any(item is inputs[1] for item in outputs):
        return  # the step has selected the prediction and the target
    prediction, target = (str(getattr(item, "dtype", None)).removeprefix("torch.") for item in inputs)
    if prediction == "bool" and target != "bool":
        raise ModuleContractError(
            f"{step} returned a boolean tensor, and the metric {metric!r} would compare it with the labels. Return "
            "the predictions, or define metric_inputs(self, outputs, batch)."
        )


def feeder(update: Callable[..., Any]) -> Callable[[tuple[Any, ...] | Mapping[str, Any]], None]:
    """Return a function that calls `update` of a metric with the items of a tuple or the matching items of a dict.

    A dict is matched by name. If a parameter then has no value, the item with the name of a prediction and the item
    with the name of a target are passed by position. The signature is read once, at the first dict.

    Raises:
        ModuleContractError: raised by that function if the dict has neither; the message has the available names.
    """
    takes: list[Parameters | None] = []

    def feed(inputs: tuple[Any, ...] | Mapping[str, Any]) -> None:
        if isinstance(inputs, tuple):
            update(*inputs)
            return
        if not takes:
            kinds = [parameter.kind for parameter in inspect.signature(update).parameters.values()]
            hands_on = inspect.Parameter.VAR_POSITIONAL in kinds  # collections of metrics pass on their arguments
            takes.append(None if hands_on else parameters_of(update))
        pair = [next((inputs[name] for name in inputs if name in known), None) for known in (PREDICTIONS, TARGETS)]
        has_pair = all(item is not None and not isinstance(item, Mapping) for item in pair)
        named = takes[0]
        if has_pair and (named is None or any(name not in inputs for name in named.required)):
            update(*pair)
        else:
            update(**(inputs if named is None else named.pick(inputs)))

    return feed
