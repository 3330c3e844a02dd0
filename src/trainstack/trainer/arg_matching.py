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
    """`value` under other names; never changed in place.

    Args:
        mapping: old names and new ones, or a function that is given `value`, or None for no change. Names that
            `value` lacks are passed over, names that are not mapped stay.
        value: for names, a dict or other mapping, a dataclass, or a tuple or list, whose items are called `_0`, `_1`,
            and so on. A function gets anything.

    Returns:
        A dict, or what the function returned.

    Raises:
        ModuleContractError: `value` has no names, or two items would get the same one.
    """
    if mapping is None:
        return value
    if not isinstance(mapping, Mapping):
        return mapping(value)
    by_position = isinstance(value, tuple | list)
    named = {f"_{position}": item for position, item in enumerate(value)} if by_position else as_named(value)
    if named is None:
        raise ModuleContractError(
            f"names cannot be mapped in a {type(value).__name__}. Use a function as the mapping, or give a dict, a "
            "dataclass, a tuple or a list."
        )
    names = Counter(mapping.get(name, name) for name in named)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ModuleContractError(
            f"the mapping {dict(mapping)} makes two items {twice[0]!r} of the items {list(named)}. Map the other one "
            "to a name of its own."
        )
    return {mapping.get(name, name): item for name, item in named.items()}


def as_named(value: Any) -> dict[str, Any] | None:
    """A mapping or a dataclass as a dict, not copied deeply; None for anything else."""
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return None


def select_mappings(
    kind: str, general: NameMapping | None, train: NameMapping | None, val: NameMapping | None
) -> tuple[NameMapping | None, NameMapping | None]:
    """The mappings for training and for the rest.

    Raises:
        ConfigurationError: a general one is given beside one of the others, or something is no mapping.
    """
    given = {f"{kind}_mapping": general, f"train_{kind}_mapping": train, f"val_{kind}_mapping": val}
    for name, mapping in given.items():
        if mapping is not None and not isinstance(mapping, Mapping) and not callable(mapping):
            raise ConfigurationError(f"{name}={mapping!r}: write a dict of old and new names, or a function.")
    if general is not None and (train is not None or val is not None):
        raise ConfigurationError(
            f"{kind}_mapping holds for training and validation; leave out train_{kind}_mapping and "
            f"val_{kind}_mapping, or leave {kind}_mapping out and write both."
        )
    return (train, val) if general is None else (general, general)


def call_with_matching_args(function: Callable[..., Any], *sources: Mapping[str, Any]) -> Any:
    """Call `function` with the values of `sources` whose names are its parameters.

    Other values are left out, unless the function has `**kwargs`; defaults stay where nothing is given. Its signature
    is read once, at the first call.

    Raises:
        ModuleContractError: a parameter without a default is in none of the sources, a value is in two, or the function
            has `*args` or positional-only parameters, which have no names to go by.
    """
    return function(**parameters_of(function).pick(*sources))


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a function can be given by name.

    Attributes:
        function: its name, for messages.
        names: of all parameters, in order.
        required: those without a default.
        takes_all: whether it has `**kwargs`.
    """

    function: str
    names: tuple[str, ...]
    required: tuple[str, ...]
    takes_all: bool

    def pick(self, *sources: Mapping[str, Any]) -> dict[str, Any]:
        """The values that the function takes; see `call_with_matching_args`."""
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
                f"{self.function} needs {', '.join(map(repr, missing))}, not among what is provided: "
                f"{_provided(sources)}. Rename with a mapping, or give the parameter a default."
            )
        return picked


def parameters_of(function: Callable[..., Any]) -> Parameters:
    """The parameters of `function`; of a module, those of its `forward`, also where torch.compile has wrapped it.

    Raises:
        ModuleContractError: it has no signature, or one that cannot be matched by name.
    """
    if isinstance(function, nn.Module):
        module = getattr(function, "_orig_mod", function)
        if callable(getattr(module, "get_base_model", None)):
            return _of_adapted(module)
        function = module.forward
    bound, plain = hasattr(function, "__self__"), getattr(function, "__func__", function)
    try:
        known = _KNOWN.setdefault(plain, {})
    except TypeError:  # it cannot be hashed or weakly referred to
        return _read(function)
    if bound not in known:
        known[bound] = _read(function)
    return known[bound]


def _of_adapted(module: nn.Module) -> Parameters:
    """The parameters of a `PeftModel`, which hands on to its base model what it has no parameter for itself."""
    own, base = _read(module.forward), parameters_of(module.get_base_model())  # type: ignore[operator]
    return Parameters(
        function=own.function,
        names=tuple(dict.fromkeys((*base.names, *own.names))) if own.takes_all else own.names,
        required=tuple(dict.fromkeys((*own.required, *(base.required if own.takes_all else ())))),
        takes_all=own.takes_all and base.takes_all,
    )


_KNOWN: WeakKeyDictionary[Any, dict[bool, Parameters]] = WeakKeyDictionary()
"""By function, apart from the object it is bound to, so that every model of a class shares one entry."""


def _read(function: Callable[..., Any]) -> Parameters:
    name = getattr(function, "__qualname__", None) or type(function).__name__
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ModuleContractError(f"{name} has no signature to match names with. Wrap it in a function.") from error
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    if takes_all:  # by which names reach a function that hands on all of its arguments
        parameters = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
            raise ModuleContractError(
                f"{name} takes {star}{parameter.name} by position only, so names cannot be matched with it. Give it "
                "named parameters, or have the loader give tuples."
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
    """Arguments for `update` of a metric.

    Args:
        outputs: what a step returned. Its loss, the first item of a tuple or the item `loss`, is left out.
        batch: what the loader gave. Its target is the last item of a tuple or list, or an item named as in `TARGETS`,
            or such an attribute, also `y`, of another object, such as a batch of graphs.

    Returns:
        For outputs with names, these and those of the batch, to be matched by name. For others `(prediction, target)`
        if there is one output and the batch has a target, else all outputs.

    Raises:
        ModuleContractError: there are no outputs but a loss.
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
            "there are metrics, and the step returned nothing but a loss, so nothing to feed them with. Return "
            "predictions as well, such as (loss, predictions), or define metric_inputs(self, outputs, batch)."
        )
    wanted = next((name for name in TARGETS if name in (names or {})), None)
    if wanted is not None and names is not None:
        target = {"target": names[wanted]}
    return (*items, *target.values()) if len(items) == 1 else tuple(items)


_OPTIONS_OF_LOSSES = frozenset({"ignore_index", "label_smoothing", "reduce", "reduction", "size_average"})
"""Parameters of torch's loss functions that no item of a batch is for."""


def unused_items_message(
    items: Mapping[str, Tensor], functions: Sequence[Callable[..., Any]], others: Sequence[Callable[..., Any]]
) -> str | None:
    """The warning for `items` that neither `functions` nor `others` have a parameter for; None if there are none.

    One whole number a sample is probably its id, which is worth a word only if a parameter is called alike.

    Args:
        items: the tensors of a batch by name.
        functions: the model and the loss, whose parameters are proposed.
        others: such as the `update` of metrics, which gets the item that is named like a target.
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
        near = difflib.get_close_matches(name, free, n=1, cutoff=0.4)
        if near:
            unused.append(f"{name!r} (did you mean {near[0]!r} of {free[near[0]]}?)")
        elif items[name].is_floating_point() or items[name].dim() > 1:
            unused.append(repr(name))
    if not unused:
        return None
    takers = " or ".join(one.function for one in named)
    return (
        f"the batches have {', '.join(unused)}, which no parameter of {takers} takes, so nothing uses them. Rename "
        "them with input_mapping={'old': 'new'}, or leave them out of the data set."
    )


def check_not_correctness(outputs: Any, inputs: Any, step: str, metric: str) -> None:
    """Refuse booleans as the only output beside a target of numbers: they tell which predictions are right.

    Args:
        outputs: of the step.
        inputs: what `default_metric_inputs` made of them.
        step, metric: names for the message.

    Raises:
        ModuleContractError: saying what to return.
    """
    if not isinstance(inputs, tuple) or len(inputs) != 2:
        return
    if isinstance(outputs, tuple | list) and any(item is inputs[1] for item in outputs):
        return  # the step chose both
    prediction, target = (str(getattr(item, "dtype", None)).removeprefix("torch.") for item in inputs)
    if prediction == "bool" and target != "bool":
        raise ModuleContractError(
            f"{step} returned a boolean tensor, and the metric {metric!r} would compare it with the labels. Return "
            "the predictions, or define metric_inputs(self, outputs, batch)."
        )


def feeder(update: Callable[..., Any]) -> Callable[[tuple[Any, ...] | Mapping[str, Any]], None]:
    """A function that calls `update` of a metric with a tuple by position, or with what it takes of a dict.

    A dict is matched by name; where that leaves a parameter without a value, the item that is named like a prediction
    and the one that is named like a target are given by position. The signature is read once, at the first dict.

    Raises:
        ModuleContractError: by that function: the dict has neither; the message names what there is.
    """
    takes: list[Parameters | None] = []

    def feed(inputs: tuple[Any, ...] | Mapping[str, Any]) -> None:
        if isinstance(inputs, tuple):
            update(*inputs)
            return
        if not takes:
            kinds = [parameter.kind for parameter in inspect.signature(update).parameters.values()]
            hands_on = inspect.Parameter.VAR_POSITIONAL in kinds  # as collections of metrics do
            takes.append(None if hands_on else parameters_of(update))
        pair = [next((inputs[name] for name in inputs if name in known), None) for known in (PREDICTIONS, TARGETS)]
        has_pair = all(item is not None and not isinstance(item, Mapping) for item in pair)
        named = takes[0]
        if has_pair and (named is None or any(name not in inputs for name in named.required)):
            update(*pair)
        else:
            update(**(inputs if named is None else named.pick(inputs)))

    return feed
