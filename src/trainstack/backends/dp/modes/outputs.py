"""The structure of what `train_step` returns: its leaves, without their graphs, and the same structure with others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from trainstack.backends.dp.torch_names import pytree
from trainstack.backends.losses import with_loss

# torch.utils._pytree takes an unregistered dataclass for one leaf, checked in torch 2.13.0.


def flattened(outputs: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    """The leaves of `outputs`, and the structure from which `pytree.tree_unflatten` makes the same with other leaves.

    In addition to the types that pytree knows, dataclasses and containers of any class are taken apart. Such a
    container comes back as a plain dict, list or tuple, and a dataclass as it was.
    """
    leaves, structure = pytree.tree_flatten(_opened(outputs), is_leaf)
    return leaves, structure


def finished(outputs: Any, loss: Tensor) -> Any:
    """`outputs` without their graphs, with `loss` as the loss: a 0-dim leaf that requires a gradient."""
    return with_loss(detached(outputs), loss.detach().clone().requires_grad_())


def detached(outputs: Any) -> Any:
    """`outputs` with every tensor cut off its graph."""
    leaves, structure = flattened(outputs)
    return pytree.tree_unflatten([v.detach() if isinstance(v, Tensor) else v for v in leaves], structure)


class _Fields:
    """A node of a tree in the place of a dataclass; `tree_unflatten` makes the dataclass again."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _opened(outputs: Any) -> Any:
    return pytree.tree_map(_open, outputs)


def _open(leaf: Any) -> Any:
    if isinstance(leaf, dict):  # of a class that pytree does not know, as below
        return {key: _opened(value) for key, value in leaf.items()}
    if is_dataclass(leaf) and not isinstance(leaf, type):
        return _Fields(leaf)
    if isinstance(leaf, list | tuple):
        return [_opened(value) for value in leaf] if isinstance(leaf, list) else tuple(map(_opened, leaf))
    return leaf


def _flatten_fields(node: _Fields) -> tuple[list[Any], tuple[Any, tuple[str, ...]]]:
    """The values of a dataclass: its fields, and other attributes, which `__post_init__` may have set."""
    value = node.value
    names = dict.fromkeys([*(field.name for field in fields(value)), *getattr(value, "__dict__", ())])
    held = tuple(name for name in names if hasattr(value, name))
    return [_opened(getattr(value, name)) for name in held], (type(value), held)


def _rebuild_fields(values: Iterable[Any], context: tuple[Any, tuple[str, ...]]) -> Any:
    kind, names = context
    rebuilt = kind.__new__(kind)  # its constructor may take other arguments, or compute
    for name, value in zip(names, values, strict=True):
        object.__setattr__(rebuilt, name, value)  # a frozen dataclass refuses the assignment
    return rebuilt


pytree.register_pytree_node(_Fields, _flatten_fields, _rebuild_fields)
