"""`loop`: one record after the other, with ordinary autograd. Always right, and what other modes are held against."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from trainstack.backends.dp.modes.base import NO_GRADIENT, GradientMode, Run, Unsupported
from trainstack.backends.dp.modes.outputs import finished, loss_in
from trainstack.backends.dp.modes.records import rows_of
from trainstack.backends.dp.torch_names import pytree


class LoopMode(GradientMode):
    """A forward and a backward pass for each record. Needs the memory of one."""

    name: ClassVar[str] = "loop"
    one_by_one: ClassVar[bool] = True

    def add(self, run: Run, batch: Any, records: int) -> Any:
        outputs = []
        for i in range(records):
            output = run(self.module, rows_of(batch, records, slice(i, i + 1)))
            loss = one_loss(output)
            self._add_rows([g if g is None else g[None] for g in self.gradients_of(loss)], 1)
            outputs.append(finished(output, loss))
        return joined(outputs)

    def gradients_of(self, loss: Tensor) -> tuple[Tensor | None, ...]:
        """Of one record's loss, for each trained parameter; None where the loss does not depend on it."""
        if not loss.requires_grad:
            raise Unsupported(NO_GRADIENT)
        return torch.autograd.grad(loss, self.trained, allow_unused=True)


def one_loss(outputs: Any) -> Tensor:
    """The loss of a batch of one record, 0-dim."""
    loss = loss_in(outputs)
    if loss.numel() != 1:
        raise Unsupported(
            f"train_step returned a loss of shape {tuple(loss.shape)} for one record. Return its mean over the "
            "records, or one loss a record."
        )
    return loss.reshape(())


def joined(outputs: list[Any]) -> Any:
    """Outputs of batches of one as those of one batch.

    The loss is the mean; tensors of shape `(1, ...)` become `(records, ...)`, other tensors are stacked; lists with one
    item become lists with `records`; what is no tensor is that of the first record.
    """
    loss = torch.stack([loss_in(output).detach().reshape(()) for output in outputs]).mean()
    flat, structure = zip(*(pytree.tree_flatten(output) for output in outputs), strict=True)
    if any(other != structure[0] for other in structure):
        raise Unsupported("train_step returns outputs of another structure for other records. Return the same keys.")
    leaves = [stacked(values) if isinstance(values[0], Tensor) else values[0] for values in zip(*flat, strict=True)]
    return finished(pytree.tree_unflatten(leaves, structure[0]), loss)


def stacked(values: tuple[Tensor, ...]) -> Any:
    """Tensors of one record each as one tensor; a list where their shapes differ."""
    if all(value.dim() and value.shape[0] == 1 for value in values):
        values = tuple(value[0] for value in values)
    if any(value.shape != values[0].shape for value in values):
        return list(values)
    return torch.stack(values)
