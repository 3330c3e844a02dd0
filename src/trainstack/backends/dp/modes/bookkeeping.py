"""`bookkeeping`: one forward and one backward pass for all records.

The backward pass computes gradients of layers' outputs only. From them and the layers' inputs follow the norm of each
record's gradient, and then, with the factors known, one weighted parameter gradient for each layer (Bu et al. 2022,
arXiv 2210.00038).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from trainstack.backends.dp.modes.base import GradientMode, Run, Unsupported, detach_outputs, full_float32
from trainstack.backends.dp.modes.op_interceptor import OpInterceptor
from trainstack.backends.dp.modes.param_uses import ParamUse, squared_norms
from trainstack.backends.losses import find_loss


class BookkeepingMode(GradientMode):
    """Exact if each record's gradient is `records` times its share of the gradient of the mean loss.

    That holds if the loss is a plain mean over records and no record influences another, which cannot be seen here:
    `choose_mode` compares with the loop.
    """

    name: ClassVar[str] = "bookkeeping"

    def add(self, run: Run, batch: Any, records: int) -> Any:
        with OpInterceptor(self.trained, self.names, records) as ops:
            outputs = run(self.module, batch)
        mean = find_loss(outputs, records).mean()
        uses = self._receive(ops.uses, mean, records)
        outputs = detach_outputs(outputs, mean)
        with torch.no_grad(), full_float32():
            self._add_uses(uses, records)
        return outputs

    def _receive(self, uses: list[ParamUse], mean: Tensor, records: int) -> list[ParamUse]:
        """Give each use the gradient of its output; returns those on which the loss depends."""
        found = torch.autograd.grad(
            mean,
            [*(use.edge for use in uses), *self.trained],  # type: ignore[arg-type]
            grad_outputs=torch.full_like(mean, records),
            allow_unused=True,
        )
        for name, gradient in zip(self.names, found[len(uses) :], strict=True):
            if gradient is not None:
                raise Unsupported(
                    f"{name} is used outside of the layers that bookkeeping knows (Linear, Conv, LayerNorm, RMSNorm, "
                    "GroupNorm, Embedding, self-attention, and parameters added to or multiplied with a batch). Write "
                    "grad_mode='vmap'."
                )
        used = []
        with torch.no_grad(), full_float32():
            for use, gradient in zip(uses, found, strict=False):
                if gradient is not None:
                    if use.was_changed:
                        name = self.names[use.parameters[0]]
                        raise Unsupported(
                            f"the input of {name} is changed in place later on. Write `x = x + y` instead of `x += y`."
                        )
                    use.receive(gradient.float(), records)
                    used.append(use)
        return used

    def _add_uses(self, uses: Sequence[ParamUse], records: int) -> None:
        users: dict[int, list[ParamUse]] = {}
        for use in uses:
            for i in use.parameters:
                users.setdefault(i, []).append(use)
        shared = {i: found for i, found in users.items() if len(found) > 1}
        squares: dict[int, Tensor] = {}
        for use in uses:
            if not shared.keys() >= set(use.parameters):
                squares.update((i, square) for i, square in use.squares().items() if i not in shared)
        joint = {i: torch.stack([use.per_record()[i] for use in users]).sum(0) for i, users in shared.items()}
        squares.update({i: squared_norms(rows) for i, rows in joint.items()})
        nothing = self.sums[0].new_zeros(records)
        factors = self.clipper.factors(torch.stack([squares.get(i, nothing) for i in range(len(self.trained))]))
        if factors.dropped is not None:
            for use in uses:
                use.drop(factors.dropped)
            joint = {i: rows.masked_fill(factors.dropped[:, None], 0.0) for i, rows in joint.items()}
        for use in uses:
            for i, total in use.weighted(factors.rows).items():
                if i not in joint:
                    self.sums[i] += total.reshape(self.sums[i].shape)
        for i, rows in joint.items():
            self.sums[i] += (factors.rows[i] @ rows).reshape(self.sums[i].shape)
