"""`loop`: one record at a time with ordinary autograd, the reference for all other modes."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from trainstack.backends.dp.modes.base import GradientMode, Run, Unsupported, detach_outputs, flatten_outputs, rows_of
from trainstack.backends.dp.torch_names import pytree
from trainstack.backends.losses import find_loss, loss_item


class LoopMode(GradientMode):
    """A forward and a backward pass for each record. Needs the memory of one."""

    name: ClassVar[str] = "loop"
    one_by_one: ClassVar[bool] = True

    def add(self, run: Run, batch: Any, records: int) -> Any:
        outputs = []
        for i in range(records):
            self.begin_pass()
            output = run(self.module, rows_of(batch, records, slice(i, i + 1)))
            loss = one_loss(output)
            gradients = torch.autograd.grad(loss, self.trained, allow_unused=True)
            norms = self._add_rows([g if g is None else g[None] for g in gradients], 1)
            outputs.append(detach_outputs(output, loss))
            self._observe(loss[None], norms, outputs[-1])
        return concatenate_outputs(outputs)


def one_loss(outputs: Any) -> Tensor:
    """The loss of a batch of one record, 0-dim."""
    return find_loss(outputs, 1).reshape(())


def one_loss_value(outputs: Any) -> Tensor:
    """The same for forward-mode derivatives, under which a loss needs no graph."""
    loss = loss_item(outputs)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return one_loss(outputs)  # raises an error that names the fault
    return loss.reshape(())


def concatenate_outputs(outputs: list[Any]) -> Any:
    """Outputs of batches of one as those of one batch.

    The loss is the mean; tensors of shape `(1, ...)` become `(records, ...)`, other tensors are stacked; lists with one
    item become lists with `records`; other values are those of the first record.
    """
    loss = torch.stack([one_loss(output).detach() for output in outputs]).mean()

    def is_column(value: Any) -> bool:  # a list of plain objects, such as strings, one for each record of the batch
        return isinstance(value, list) and bool(value) and all(pytree.tree_is_leaf(item) for item in value)

    flat, structure = zip(*(flatten_outputs(output, is_column) for output in outputs), strict=True)
    if any(other != structure[0] for other in structure):
        raise Unsupported("train_step returns outputs of another structure for other records. Return the same keys.")
    leaves = []
    for values in zip(*flat, strict=True):
        if isinstance(values[0], Tensor):
            leaves.append(stack_records(values))
        else:
            columns = all(isinstance(value, list) and len(value) == 1 for value in values)
            leaves.append([value[0] for value in values] if columns else values[0])
    return detach_outputs(pytree.tree_unflatten(leaves, structure[0]), loss)


def stack_records(values: tuple[Tensor, ...]) -> Any:
    """Tensors of one record each as one tensor; a list where their shapes differ."""
    if all(value.dim() and value.shape[0] == 1 for value in values):
        values = tuple(value[0] for value in values)
    if any(value.shape != values[0].shape for value in values):
        return list(values)
    return torch.stack(values)
