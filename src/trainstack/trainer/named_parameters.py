"""Parameter groups by name: layer decay, no weight decay, and parameters for several optimizers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from trainstack.errors import ConfigurationError

Named = list[tuple[str, nn.Parameter]]


def parameter_groups(
    module: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    no_decay: Sequence[str] | None = None,
    layer_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Return the parameters of `module` that require gradients, as groups for an optimizer.

    With `layer_decay`, the last layer has the rate `lr`, and each earlier layer `layer_decay` times the rate of the
    next one (layer-wise learning rate decay, as in Clark et al.: ELECTRA, 2020). The first number in the name of a
    parameter is its layer, as in `"blocks.3.attn.weight"`. Parameters without a number form a layer before the first
    one if they precede the numbered ones in the module, otherwise after the last one.

    Args:
        module: the model, or a part of it.
        lr: the learning rate.
        weight_decay: weight decay of the parameters that have it.
        no_decay: patterns of names without weight decay, such as `["*.bias", "*norm*"]`; by default parameters with
            fewer than two dimensions, which are biases and the weights of norms.
        layer_decay: factor above 0 and at most 1; None for one rate.

    Returns:
        Groups with `"params"`, `"name"`, `"lr"` and `"weight_decay"`, in the order of the layers.

    Raises:
        ConfigurationError: `layer_decay` is out of range, no parameter has a number in its name, or a pattern matches
            nothing.

    Examples:
        >>> groups = ts.parameter_groups(module, lr=1e-3, weight_decay=0.1)
        >>> [(group["weight_decay"], len(group["params"])) for group in groups]
        [(0.0, 1), (0.1, 1)]
    """
    if layer_decay is not None and not 0 < layer_decay <= 1:
        raise ConfigurationError(f"layer_decay={layer_decay!r}: write a number above 0 and up to 1, such as 0.75.")
    named = _trained(module)
    _check_patterns(named, no_decay or ())
    layers = [0] * len(named) if layer_decay is None else _layers([name for name, _ in named])
    last = max(layers, default=0)
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for (name, parameter), layer in zip(named, layers, strict=True):
        decays = parameter.dim() > 1 if no_decay is None else not _matches(name, no_decay)
        groups.setdefault((layer, decays), []).append(parameter)
    return [
        {
            "params": parameters,
            "name": f"{f'layer {layer}, ' if layer_decay is not None else ''}{'decay' if decays else 'no decay'}",
            "lr": lr if layer_decay is None else lr * layer_decay ** (last - layer),
            "weight_decay": weight_decay if decays else 0.0,
        }
        for (layer, decays), parameters in sorted(groups.items())
    ]


def split_parameters(module: nn.Module, keys: Iterable[str]) -> dict[str, list[nn.Parameter]]:
    """Divide the parameters of `module` that require gradients among `keys`; the first matching key gets a parameter.

    Args:
        module: the model, or a part of it.
        keys: `"matrices"` for weights with two dimensions except those of embeddings, `"rest"` for all, or a pattern of
            names such as `"head.*"`.

    Returns:
        A list of parameters for each key.

    Raises:
        ConfigurationError: a parameter matches no key, or a key gets no parameter.

    Examples:
        >>> parts = ts.split_parameters(module, ["matrices", "rest"])
        >>> {
        ...     key: [tuple(parameter.shape) for parameter in part]
        ...     for key, part in parts.items()
        ... }
        {'matrices': [(1, 1)], 'rest': [(1,)]}
    """
    embeddings = {
        id(p) for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) for p in m.parameters()
    }
    found: dict[str, list[nn.Parameter]] = {key: [] for key in keys}

    def fits(key: str, name: str, parameter: nn.Parameter) -> bool:
        if key == "matrices":
            return parameter.dim() == 2 and id(parameter) not in embeddings
        return key == "rest" or _matches(name, [key])

    for name, parameter in _trained(module):
        key = next((key for key in found if fits(key, name, parameter)), None)
        if key is None:
            raise ConfigurationError(
                f"the parameter {name!r} matches none of {', '.join(map(repr, found))}. Add the key 'rest' for others."
            )
        found[key].append(parameter)
    empty = [key for key, own in found.items() if not own]
    if empty:
        names = ", ".join(name for name, _ in _trained(module)[:8])  # 8: a line or two of the message
        raise ConfigurationError(
            f"{empty[0]!r} matches no parameter, or earlier keys take them. There are {names}, ..."
        )
    return found


def _trained(module: nn.Module) -> Named:
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches `name`, with or without the names of the modules around it."""
    parts = name.split(".")
    tails = [".".join(parts[start:]) for start in range(len(parts))]
    return any(fnmatchcase(tail, pattern) for pattern in patterns for tail in tails)


def _check_patterns(named: Named, patterns: Iterable[str]) -> None:
    if isinstance(patterns, str):
        raise ConfigurationError(f"no_decay={patterns!r}: write a list: no_decay=[{patterns!r}].")
    for pattern in patterns:
        if not any(_matches(name, [pattern]) for name, _ in named):
            names = ", ".join(name for name, _ in named[:8])
            raise ConfigurationError(f"no_decay has {pattern!r}, which matches no parameter. There are {names}, ...")


def _layers(names: Sequence[str]) -> list[int]:
    """Return the number of the layer for each name."""
    found = [re.search(r"(?:^|\.)(\d+)\.", name) for name in names]
    numbers = [None if match is None else int(match[1]) for match in found]
    known = [number for number in numbers if number is not None]
    if not known:
        raise ConfigurationError(
            "layer_decay requires layers with numbers, and no name of a parameter has one, such as 'blocks.0.weight'. "
            "Create the groups in the module, with an lr for each."
        )
    first = next(place for place, number in enumerate(numbers) if number is not None)
    outer = [0 if place < first else max(known) + 2 for place in range(len(numbers))]
    return [outer[place] if number is None else number + 1 for place, number in enumerate(numbers)]
