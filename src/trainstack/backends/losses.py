"""`find_loss` finds the loss in the output of a step."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from numbers import Real
from typing import Any

from torch import Tensor

from trainstack.errors import ModuleContractError

RETURN_THE_TENSOR = "Return the tensor itself, without .item() or float()."


def find_loss(outputs: Any, records: int | None = None) -> Tensor:
    """The loss in the outputs of `train_step`.

    Args:
        outputs: the loss itself, a tuple or list whose first item is the loss, a dict with the key "loss", or a
            dataclass with that field. A `ModelOutput` of transformers is a dict.
        records: the size of the batch, if one loss for each record is accepted too.

    Returns:
        A tensor with a graph: 0-dim, or of shape `(records,)`.

    Raises:
        ModuleContractError: there is no such tensor. The message gives the reason and a correction.
    """
    if type(outputs) is Tensor and outputs.requires_grad and outputs.dim() == 0 and outputs.is_floating_point():
        return outputs  # the usual case, without the searches below
    loss = loss_item(outputs)
    if not isinstance(loss, Tensor):
        if is_number(loss):
            raise ModuleContractError(
                f"train_step returned the number {loss!r} as the loss, through which no gradient flows. "
                f"{RETURN_THE_TENSOR}"
            )
        if isinstance(outputs, Generator):
            raise ModuleContractError(
                "train_step returned a generator without being a generator function, so its updates cannot be made. "
                "Write `return (yield from ...)` in it, with the call that makes the generator."
            )
        has = f"a dict with the keys {list(outputs)}" if isinstance(outputs, dict) else f"a {type(outputs).__name__}"
        raise ModuleContractError(
            f"train_step returned {'nothing' if outputs is None else has}, in which there is no loss. Return the loss "
            "tensor, a tuple whose first item is the loss, a dict with the key 'loss', or a dataclass with that field."
        )
    if loss.dim() and (records is None or not loss.shape[0] == loss.numel() == records):
        raise _shape_error(outputs, loss, records)
    if loss.is_complex():
        raise ModuleContractError(
            f"train_step returned a loss of dtype {loss.dtype}; a loss is a real number. Return its real part or its "
            "absolute value: loss.real."
        )
    if not loss.requires_grad:
        raise ModuleContractError(
            "train_step returned a loss without a gradient graph. Do not call .item() or .detach() on it or compute it "
            "under torch.no_grad(), and keep requires_grad=True for some parameters."
        )
    return loss.reshape(-1) if loss.dim() else loss


def _shape_error(outputs: Any, loss: Tensor, records: int | None) -> ModuleContractError:
    """The error for a loss that is more than one number."""
    if isinstance(outputs, tuple | list) and any(isinstance(item, Tensor) and item.dim() == 0 for item in outputs[1:]):
        return ModuleContractError(
            f"train_step returned a {type(outputs).__name__} whose first item has shape {tuple(loss.shape)}. The "
            "first item is the loss, which is one number: return (loss, outputs), or a dict with the key 'loss'."
        )
    or_each = "" if records is None else f", or one loss for each record, of shape ({records},)"
    return ModuleContractError(
        f"train_step returned a loss of shape {tuple(loss.shape)}; a loss is one number. "
        f"Return its mean over the batch: loss.mean(){or_each}."
    )


def loss_item(outputs: Any) -> Any:
    """The object at the position of the loss in the outputs of a step, of any type; None if there is none."""
    if isinstance(outputs, dict):  # first: a ModelOutput of transformers is a dict and a dataclass
        return outputs.get("loss")
    if is_dataclass(outputs):
        return getattr(outputs, "loss", None)
    if isinstance(outputs, tuple | list):
        return outputs[0] if outputs else None
    return outputs


def with_loss(outputs: Any, loss: Tensor) -> Any:
    """A copy of `outputs` in which `loss_item` finds `loss`; a dict of any class becomes a plain dict."""
    if isinstance(outputs, dict):
        return {**outputs, "loss": loss}
    if is_dataclass(outputs):
        copied = copy.copy(outputs)
        object.__setattr__(copied, "loss", loss)  # a frozen dataclass refuses the assignment
        return copied
    if isinstance(outputs, tuple | list):
        kind, items = type(outputs), (loss, *outputs[1:])
        return kind(*items) if hasattr(outputs, "_fields") else kind(items)
    return loss


@contextmanager
def losses_per_record(module: Any) -> Iterator[None]:
    """A block in which a module with the attribute `loss_per_record` returns one loss for each record in training."""
    if not hasattr(module, "loss_per_record"):
        yield
        return
    before, of_class = module.loss_per_record, "loss_per_record" not in vars(module)
    module.loss_per_record = True
    try:
        yield
    finally:
        module.loss_per_record = before
        if of_class:  # restore the lookup in the class
            vars(module).pop("loss_per_record", None)


def is_number(value: Any) -> bool:
    """Whether `value` is a plain number, which a step returns by mistake instead of a tensor."""
    return isinstance(value, Real) and not isinstance(value, bool)


# torch 2.13.0: names of autograd nodes that do not change the scale of a loss, and the value of `_saved_reduction` for
# reduction="sum".
_PASSES_ON = {"Add", "Sub", "Neg", "ToCopy", "Clone", "Alias", "View", "Squeeze", "Unsqueeze", "Reshape", "Select"}
_SUM = 2


def looks_summed(loss: Tensor, samples: int | None) -> bool:
    """Whether the graph of `loss` ends in a sum over its `samples` samples, or in a loss with `reduction="sum"`.

    A sum that is divided or multiplied afterwards does not count, because it may be a mean. The function computes
    nothing. It cannot look inside a node, such as a compiled model.
    """
    nodes = [loss.grad_fn]
    for _ in range(100):  # bounds the time; the reduction is near the end of a graph
        node: Any = nodes.pop() if nodes else None
        if node is None:
            if not nodes:
                return False
            continue
        name = node.name().rstrip("0123456789").removesuffix("Backward")
        if name in _PASSES_ON:
            nodes += [following for following, _ in node.next_functions]
        elif getattr(node, "_saved_reduction", None) == _SUM:
            return True
        elif name == "Sum" and samples is not None:
            sizes = getattr(node, "_saved_self_sym_sizes", None)
            summed = node.next_functions[0][0] if node.next_functions else None
            weighted = summed is not None and summed.name().startswith(("Div", "Mul"))  # perhaps a weighted mean
            if sizes and sizes[0] == samples and not weighted:
                return True
    return False
