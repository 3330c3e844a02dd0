"""`hooks` and `ghost`: per-record gradients from opacus' hooks."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainstack.backends.dp.clipping import AdaptiveClipper, Clipper, PerLayerClipper
from trainstack.backends.dp.epsilon import import_opacus
from trainstack.backends.dp.modes.base import GradientMode, Run, Unsupported, detach_outputs, rows_of, suppress_warning
from trainstack.backends.dp.modes.draw_refusal import DrawRefusal
from trainstack.backends.dp.modes.loop import concatenate_outputs
from trainstack.backends.dp.modes.loss_check import LossCheck, allowed_error
from trainstack.backends.losses import find_loss
from trainstack.errors import PrivacyError


class HooksMode(GradientMode):
    """`opacus.grad_sample.GradSampleHooks`, attached to the module without wrapping it.

    Exact if the loss is a plain mean over records of which no one influences another: compared with the loop before it
    is used, and in each step with the losses of single records.
    """

    name: ClassVar[str] = "hooks"

    def __init__(self, module: nn.Module, trained: Sequence[nn.Parameter], clipper: Clipper) -> None:
        super().__init__(module, trained, clipper)
        self._hooks = attach_hooks("GradSampleHooks", "grad_mode='hooks'", module)
        self._check = LossCheck(module, self.names, self.trained, lambda: self.begin_pass())
        self._draws = DrawRefusal(self.name, module)

    def add(self, run: Run, batch: Any, records: int) -> Any:
        run = self._draws.guarded(run)
        losses = check_without_hooks(self._check, self._hooks, run, batch, records)
        if losses is None and records > 1:
            return add_one_by_one(self, run, batch, records)
        self.begin_pass()
        try:
            outputs = run(self.module, batch)
            loss = find_loss(outputs, records).mean()
            with translate_opacus_errors(self.name, self.module):
                loss.backward()  # type: ignore[no-untyped-call]
            rows = [self._rows(i, records) for i in range(len(self.trained))]
            norms = self._add_rows(rows, records)
            wrong = None if losses is None else self._check.wrong_row(rows, norms, self.clipper.sensitivity)
            if wrong is not None:
                own = torch.stack([norms.new_zeros(()) if row is None else row[wrong].norm() for row in rows])
                expected = norms_alone(self._check, self._hooks, run, rows_of(batch, records, slice(wrong, wrong + 1)))
                raise _wrong_gradient(self.names[int((own - expected).abs().argmax())])
        finally:
            clear_opacus_state(self.module)
        outputs = detach_outputs(outputs, loss)
        self._observe(loss[None] if losses is None else losses, norms, outputs)
        return outputs

    def _rows(self, i: int, records: int) -> Tensor | None:
        parameter = self.trained[i]
        rows = getattr(parameter, "grad_sample", None)
        if rows is None and parameter.grad is None:
            return None
        if not isinstance(rows, Tensor) or rows.shape[0] != records:
            raise Unsupported(
                f"{self.names[i]} is used outside of its module's forward, or on an input that has no dimension of "
                f"{records} records in front: opacus' hooks do not see it. Write grad_mode='vmap'."
            )
        return rows

    def close(self) -> None:
        self._hooks.cleanup()


def add_one_by_one(mode: GradientMode, run: Run, batch: Any, records: int) -> Any:
    """`mode.add` for each record, in a batch that holds one whose loss is not finite, which is rare."""
    return concatenate_outputs([mode.add(run, rows_of(batch, records, slice(i, i + 1)), 1) for i in range(records)])


def check_without_hooks(check: LossCheck, hooks: Any, run: Run, batch: Any, records: int) -> Tensor | None:
    """See `LossCheck.check`; opacus sees nothing of it."""
    hooks.disable_hooks()
    try:
        return check.check(run, batch, records)
    finally:
        hooks.enable_hooks()


def norms_alone(check: LossCheck, hooks: Any, run: Run, batch: Any) -> Tensor:
    """See `LossCheck.norms_alone`; opacus sees nothing of it."""
    hooks.disable_hooks()
    try:
        return check.norms_alone(run, batch)
    finally:
        hooks.enable_hooks()


def _wrong_gradient(name: str) -> PrivacyError:
    return PrivacyError(
        f"opacus' hooks give a wrong gradient for {name}: autograd gives another one for a record, so "
        "clipping does not bound the influence of a record. Write grad_mode='auto'."
    )


def attach_hooks(kind: str, feature: str, module: nn.Module, **options: Any) -> Any:
    """Opacus' hooks of this kind on `module`.

    Raises:
        MissingExtraError: opacus is not installed.
        Unsupported: opacus refuses the module.
    """
    make = getattr(import_opacus("opacus.grad_sample", feature), kind)
    try:
        return make(module, loss_reduction="mean", **options)
    except (NotImplementedError, ValueError) as error:
        raise Unsupported(f"opacus refuses the module: {error}. Write grad_mode='auto'.") from error


@contextmanager
def translate_opacus_errors(mode: str, module: nn.Module) -> Iterator[None]:
    """Says in one sentence on which layers opacus' hooks fail, and silences a warning that comes with every step."""
    try:
        with suppress_warning("Full backward hook is firing"):
            yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        where = [
            f"{name or 'the module itself'} ({type(layer).__name__}), which holds parameters directly "
            f"({', '.join(parameter for parameter, _ in layer.named_parameters(recurse=False))})"
            for name, layer in module.named_modules()
            if any(not inputs for inputs in layer.__dict__.get("activations", ()))
        ]
        if not where:
            raise
        raise Unsupported(
            f"grad_mode={mode!r} needs layers that are called with positional tensors; {' and '.join(where)} is called "
            "without any. Write grad_mode='vmap'."
        ) from error


def clear_opacus_state(module: nn.Module) -> None:
    """Drop the values that a backward pass under opacus' hooks left, also one that failed."""
    for parameter in module.parameters():
        parameter.grad = None
        for name in ("_current_grad_sample", "_norm_sample"):
            if hasattr(parameter, name):
                delattr(parameter, name)
        if hasattr(parameter, "grad_sample"):
            parameter.grad_sample = None
            parameter._forward_counter = 0  # type: ignore[attr-defined]
    for layer in module.modules():
        for name in ("activations", "max_batch_len"):
            if name in layer.__dict__:
                delattr(layer, name)


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
        self._hooks = attach_hooks("GradSampleHooksFastGradientClipping", "grad_mode='ghost'", module)
        self._check = LossCheck(module, self.names, self.trained, lambda: self.begin_pass())
        self._draws = DrawRefusal(self.name, module)

    def add(self, run: Run, batch: Any, records: int) -> Any:
        run = self._draws.guarded(run)
        alone = check_without_hooks(self._check, self._hooks, run, batch, records)
        if alone is None and records > 1:
            return add_one_by_one(self, run, batch, records)
        row = secrets.randbelow(records)
        expected = norms_alone(self._check, self._hooks, run, rows_of(batch, records, slice(row, row + 1)))
        outputs, losses, norms = self._add(run, batch, records, (row, expected))
        outputs = detach_outputs(outputs, losses.mean())
        self._observe(losses if alone is None else alone, norms, outputs)
        return outputs

    def _add(
        self, run: Run, batch: Any, records: int, alone: tuple[int, Tensor] | None = None
    ) -> tuple[Any, Tensor, Tensor]:
        """Returns the outputs of `train_step`, the losses and the joint norms."""
        self.begin_pass()
        try:
            outputs = run(self.module, batch)
            losses = find_loss(outputs, records)
            if losses.dim() == 0:
                raise Unsupported(
                    "grad_mode='ghost' needs one loss per example: return F.cross_entropy(..., reduction='none')."
                )
            norms, dropped = self._add_losses(losses, records, alone)
        finally:
            clear_opacus_state(self.module)
        if dropped is not None:
            for i in range(records):
                if not dropped[i]:  # rare, so the simple way: each of the others for itself
                    self._add(run, rows_of(batch, records, slice(i, i + 1)), 1)
        return outputs, losses, norms

    def _add_losses(
        self, losses: Tensor, records: int, alone: tuple[int, Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """Add the clipped sum, unless there are records to be left out; returns all joint norms, and which to.

        Args:
            losses: `(records,)`.
            records: of the batch.
            alone: the number of a record, and the norms of its gradients by autograd.
        """
        with translate_opacus_errors(self.name, self.module):
            losses.mean().backward(retain_graph=True)  # type: ignore[no-untyped-call]
        squares = torch.stack([self._squares(i, records) for i in range(len(self.trained))])
        if alone is not None:
            row, expected = alone
            allowed = allowed_error(squares.sum(0).sqrt(), self.clipper.sensitivity)
            apart = (squares[:, row].sqrt() - expected).abs()
            if bool(expected.isfinite().all()) and not bool((apart <= allowed[row]).all()):
                raise _wrong_gradient(self.names[int(apart.argmax())])
        factors, norms = self.clipper.factors(squares), squares.sum(0).sqrt()
        if factors.dropped is not None and bool(factors.dropped.any()):
            return norms, factors.dropped
        self._hooks.disable_hooks()
        try:
            with translate_opacus_errors(self.name, self.module):
                sums = torch.autograd.grad(losses, self.trained, factors.rows[0].to(losses), allow_unused=True)
        finally:
            self._hooks.enable_hooks()
        for total, found in zip(self.sums, sums, strict=True):
            if found is not None:
                total += found
        return norms, None

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
