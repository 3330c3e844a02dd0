"""`ghost`: opacus' ghost clipping: norms in a first backward pass, the weighted sum of losses in a second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainstack.backends.dp.clipping import AdaptiveClipper, Clipper, PerLayerClipper
from trainstack.backends.dp.modes.base import GradientMode, Run, Unsupported
from trainstack.backends.dp.modes.hooks import attached, described, forget
from trainstack.backends.dp.modes.outputs import finished
from trainstack.backends.dp.modes.records import rows_of
from trainstack.backends.losses import find_loss


class GhostMode(GradientMode):
    """`opacus.grad_sample.GradSampleHooksFastGradientClipping` for losses of shape `(records,)`, all in float32."""

    name: ClassVar[str] = "ghost"

    def __init__(self, module: nn.Module, trained: Sequence[nn.Parameter], clipper: Clipper) -> None:
        super().__init__(module, trained, clipper)
        if isinstance(clipper, PerLayerClipper | AdaptiveClipper):
            raise Unsupported(
                "grad_mode='ghost' clips all parameters together, with a limit that does not change. Write "
                "clipping='flat' or 'automatic', or another grad_mode."
            )
        self._hooks = attached("GradSampleHooksFastGradientClipping", "grad_mode='ghost'", module)

    def add(self, run: Run, batch: Any, records: int) -> Any:
        try:
            outputs = run(self.module, batch)
            losses = find_loss(outputs, records)
            if losses.dim() == 0:
                raise Unsupported(
                    "grad_mode='ghost' needs one loss per example: return F.cross_entropy(..., reduction='none')."
                )
            dropped = self._add_losses(losses, records)
        finally:
            forget(self.module)
        if dropped is not None:
            for i in range(records):
                if not dropped[i]:  # rare, so the simple way: each of the others for itself
                    self.add(run, rows_of(batch, records, slice(i, i + 1)), 1)
        return finished(outputs, losses.mean())

    def _add_losses(self, losses: Tensor, records: int) -> Tensor | None:
        """Add the clipped sum, unless there are records to be left out; returns which."""
        with described(self.name, self.module):
            losses.mean().backward(retain_graph=True)  # type: ignore[no-untyped-call]
        factors = self.clipper.factors(torch.stack([self._squares(i, records) for i in range(len(self.trained))]))
        if factors.dropped is not None and bool(factors.dropped.any()):
            return factors.dropped
        self._hooks.disable_hooks()
        try:
            with described(self.name, self.module):
                sums = torch.autograd.grad(losses, self.trained, factors.rows[0].to(losses), allow_unused=True)
        finally:
            self._hooks.enable_hooks()
        for total, found in zip(self.sums, sums, strict=True):
            if found is not None:
                total += found
        return None

    def _squares(self, i: int, records: int) -> Tensor:
        parameter = self.trained[i]
        norms: Tensor | None = getattr(parameter, "_norm_sample", None)
        if norms is None and parameter.grad is None:
            return self.sums[0].new_zeros(records)
        if norms is None or norms.shape != (records,):
            raise Unsupported(
                f"{self.names[i]} is used outside of its module's forward: ghost clipping does not see it. Write "
                "grad_mode='vmap'."
            )
        return norms.detach().float().square()

    def close(self) -> None:
        self._hooks.cleanup()
