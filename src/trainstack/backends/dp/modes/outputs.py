"""The loss in what `train_step` returns, and putting another in its place."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trainstack.backends.dp.modes.base import Unsupported
from trainstack.backends.dp.torch_names import pytree


def loss_in(outputs: Any) -> Tensor:
    """The loss: the outputs themselves, their first item, or their item `"loss"`.

    Raises:
        Unsupported: there is none.
    """
    loss = outputs
    if isinstance(outputs, dict):
        loss = outputs.get("loss")
    elif isinstance(outputs, tuple | list) and outputs:
        loss = outputs[0]
    if not isinstance(loss, Tensor):
        raise Unsupported(
            f"train_step returned a {type(outputs).__name__} without a loss. Return the loss tensor, a tuple whose "
            "first item is the loss, or a dict with the key 'loss'."
        )
    return loss


def finished(outputs: Any, loss: Tensor) -> Any:
    """`outputs` without their graphs, with `loss` as the loss: a 0-dim leaf that requires a gradient."""
    loss = loss.detach().clone().requires_grad_()
    if isinstance(outputs, Tensor):
        return loss
    outputs = detached(outputs)
    if isinstance(outputs, dict):
        return {**outputs, "loss": loss}
    if hasattr(outputs, "_fields"):
        return type(outputs)(loss, *outputs[1:])
    return type(outputs)([loss, *outputs[1:]])


def detached(outputs: Any) -> Any:
    """`outputs` with every tensor cut off its graph."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach(), outputs)


def mean_of(losses: Tensor, records: int) -> Tensor:
    """A loss as one number.

    Raises:
        Unsupported: it is neither 0-dim nor one a record.
    """
    if losses.dim() == 0:
        return losses
    if tuple(losses.shape) != (records,):
        raise Unsupported(
            f"train_step returned a loss of shape {tuple(losses.shape)} for {records} records. Return its mean over "
            f"the records, or one loss a record, of shape ({records},)."
        )
    return losses.mean()
