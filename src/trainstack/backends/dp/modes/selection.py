"""Choice of the fastest gradient mode that agrees with `loop` on a batch of the data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from trainstack.backends.dp.clipping import Clipper
from trainstack.backends.dp.modes.base import GradientMode, Run, Unsupported, rows_of, shorten
from trainstack.backends.dp.modes.bookkeeping import BookkeepingMode
from trainstack.backends.dp.modes.loop import LoopMode
from trainstack.backends.dp.modes.opacus_modes import GhostMode, HooksMode
from trainstack.backends.dp.modes.probing import (
    NoAutocast,
    RandomStates,
    changed_tensors,
    copy_tensors,
    deterministic_forward,
    plain_attributes,
)
from trainstack.backends.dp.modes.vmap import VmapMode
from trainstack.backends.dp.sealed.plain_state import installed_attributes, owners_of
from trainstack.backends.dp.torch_names import BATCH_NORMS
from trainstack.backends.losses import loss_item
from trainstack.errors import ConfigurationError, ModuleContractError, PrivacyError

_logger = logging.getLogger("trainstack")

MODES: dict[str, type[GradientMode]] = {
    mode.name: mode for mode in (BookkeepingMode, VmapMode, HooksMode, GhostMode, LoopMode)
}
AUTOMATIC = (BookkeepingMode, VmapMode)

Scaling = Callable[[Tensor, Tensor], Tensor]
"""Factors from squared norms, `(parameters, records)`, and joint norms, `(records,)`; of the shape of the former."""

_EXACT, _ROUNDED = 1e-4, 0.2
"""Allowed differences from the loop, relative to the sum of the records' norms: in float32, which shows mistakes, and
under autocast, which shows whether it works there at all."""

_ROUNDING = 100 * torch.finfo(torch.float32).eps
"""A gradient below this share of the largest is taken for rounding, which must not be compared with rounding. It is all
that remains of a gradient that is zero, such as that of a bias before a normalisation."""


def choose_mode(
    asked: str, module: nn.Module, trained: Sequence[nn.Parameter], clipper: Clipper, run: Run, probe: Any, records: int
) -> GradientMode:
    """The gradient mode to train with, compared with the loop on `probe`.

    Args:
        asked: `"auto"`, or a key of `MODES`. `"auto"` takes the first exact one of bookkeeping, vmap and loop.
        module: in the mode that it will be trained in.
        trained: see `GradientMode`.
        clipper: see `GradientMode`.
        run: see `Run`.
        probe: a batch of the training data, as `run` takes it, of at least 2 records. The more its records differ, in
            length, class and weight, the more it shows.
        records: the number of records.

    Raises:
        Unsupported: `asked` cannot give the module's per-record gradients, or nothing can.
        torch.OutOfMemoryError: `asked` needs more memory than there is for `records`.
        ConfigurationError: `asked` is not a mode, or there are less than 2 records.
    """
    if asked != "auto" and asked not in MODES:
        raise ConfigurationError(f"grad_mode={asked!r}: write one of 'auto', {', '.join(map(repr, MODES))}.")
    if records < 2:
        raise ConfigurationError(f"a probe of {records} records cannot show whether records influence each other: 2.")
    _check_no_script(module)
    with deterministic_forward(module):
        scaling = _unit_joint_norm if asked == "ghost" else _unit_norm_per_parameter
        with installed_attributes(owners_of(module)):  # writes of a trial must not be in the module when it trains
            verifier = ModeVerifier(module, trained, run, probe, records, scaling)
        if asked != "auto":
            return verifier.verify(MODES[asked], clipper)
        reasons = []
        for kind in AUTOMATIC:
            try:
                mode = verifier.verify(kind, clipper)
            except (Unsupported, torch.OutOfMemoryError) as error:
                short = error if isinstance(error, Unsupported) else shorten(error)
                reasons.append(f"not {kind.name!r}: {short}")
                continue
            _log(logging.INFO, f"gradient mode {mode.name!r}, compared with one record at a time", reasons)
            return mode
    _log(logging.WARNING, "gradient mode 'loop', one record at a time, is slow", reasons)
    return LoopMode(module, trained, clipper)


def _log(level: int, choice: str, reasons: Sequence[str]) -> None:
    for line in (choice, *reasons):
        _logger.log(level, "%s", line)


def _check_no_script(module: nn.Module) -> None:
    scripted = next((name for name, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise Unsupported(
            f"{scripted or 'the module'} is compiled by torch.jit, so that its use of a record cannot be seen. "
            "Give the nn.Module from which it was compiled."
        )


class ModeVerifier:
    """Compares modes with the loop, mostly one case after the other, so that few sums of the loop are in memory.

    Raises:
        Unsupported: `train_step` cannot be run on single records, or buffers learn from them, or it remembers them.
        ModuleContractError: `train_step` returned no loss to train on.
    """

    def __init__(
        self, module: nn.Module, trained: Sequence[nn.Parameter], run: Run, probe: Any, records: int, leveller: Scaling
    ) -> None:
        self._module, self._trained = module, tuple(trained)
        self._autocast = False
        self._run, self._plain_run = run, lambda model, batch: run(NoAutocast(model, self._note), batch)
        before, states = copy_tensors(module), RandomStates(module)
        self._half, self._leveller = (rows_of(probe, records, slice(0, records // 2)), records // 2), leveller
        try:
            self._first = self._reference(probe, records, _unscaled, self._plain_run)
            self._is_random = self._has_changed(self._first)
            learning = changed_tensors(module, before)
            if learning:
                raise Unsupported(
                    f"{learning[0]} changes in a forward pass: it would learn from records without clipping and noise"
                    f"{_batch_normalizing_layers(module)}. {_instead_of(module, learning[0])}"
                )
            self._check_stateless([rows_of(probe, records, slice(i, i + 1)) for i in range(records)], states)
            self._rounded = self._reference(probe, records, _unscaled, run) if self._autocast else None
            self._tell_of_normalisation()
        except (Unsupported, ModuleContractError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise Unsupported(
                f"train_step raised {shorten(error)} It was called with a batch of one record"
                f"{_batch_normalizing_layers(module)}. If larger batches work, let it take a batch of one, and "
                "put the records along dimension 0 of everything that collate_fn returns."
            ) from error

    def _references(self) -> Iterator[_Reference]:
        """The batch and half of it, with gradients as they are and scaled."""
        for batch, records in ((self._first.batch, self._first.records), self._half):
            is_first = batch is self._first.batch
            plain = self._first if is_first else self._reference(batch, records, _unscaled, self._plain_run)
            yield plain
            is_rounding = plain.scales <= _ROUNDING * plain.scales.max()
            del plain
            levelled = self._reference(batch, records, self._leveller, self._plain_run)
            yield replace(levelled, is_rounding=is_rounding)

    def _tell_of_normalisation(self) -> None:
        """Warn that a normalisation over the batch has no effect on batches of one."""
        case = self._first
        if self._is_random:
            return
        try:
            run: Run = self._plain_run
            with torch.no_grad():
                whole = float(loss_item(run(self._module, case.batch)).detach().mean())
        except Exception:  # not a fault: private training runs it on single records
            return
        if abs(whole - case.loss) > 1e-3 * abs(case.loss) + 1e-6:
            _logger.warning(
                "the loss of a batch is not the mean of the losses of its records: private training takes each record "
                "as a batch of one, so class weights, token counts and statistics over the batch have no effect across "
                "records. To keep weights, return one loss for each record: F.cross_entropy(logits, labels, "
                "weight=weights, reduction='none')."
            )

    def _has_changed(self, first: _Reference) -> bool:
        """Whether the records have other gradients than they had at first."""
        again = self._reference(first.batch, first.records, _unscaled, self._plain_run)
        return first.differs(again.sums, again.scales, _EXACT) is not None

    def _check_stateless(self, singles: Sequence[Any], states: RandomStates) -> None:
        """Refuse a module whose gradients depend on earlier records.

        With the same states of all generators, a difference can only come from earlier records. The check repeats one
        record after each of the others, because after some of them a memory may have its first value again.
        """
        states.restore()
        one = self._reference(singles[0], 1, _unscaled, self._plain_run)
        if not (
            self._remembers(self._first, states) or any(self._remembers(one, states, other) for other in singles[1:])
        ):
            return
        kept = []
        for single in singles:
            self._reference(single, 1, _unscaled, self._plain_run)
            kept.append(plain_attributes(self._module))
        changing = [name for name, value in kept[0].items() if any(later.get(name) != value for later in kept)]
        raise Unsupported(
            f"{' or '.join(changing) or 'state that train_step keeps'} changes in a forward pass, and the same records "
            "then have other gradients: it would carry one record into the steps of others, without clipping "
            "and noise. Keep nothing but parameters from one forward pass to the next, write into no batch, and draw "
            "random numbers from the generators of torch, numpy and random, or from those that the module holds from "
            "the start."
        )

    def _remembers(self, case: _Reference, states: RandomStates, after: Any | None = None) -> bool:
        """Whether records have other gradients than at first after this one, with the random numbers as they were."""
        if after is not None:
            self._reference(after, 1, _unscaled, self._plain_run)
        states.restore()
        return self._has_changed(case)

    def verify(self, kind: type[GradientMode], clipper: Clipper) -> GradientMode:
        """A mode of this kind, if it agrees with the loop.

        Raises:
            Unsupported: it does not.
        """
        references: Iterable[_Reference] = self._references()
        if not kind.one_by_one:  # hooks on the module are not for the loop
            references = list(references)
        mode = kind(self._module, self._trained, clipper)
        try:
            with installed_attributes(owners_of(self._module)):  # a trial under `vmap` leaves tensors that are gone
                self._try(mode, references)
        except Exception as error:
            mode.close()
            if isinstance(error, PrivacyError):  # which ends a run once it has begun
                raise Unsupported(str(error)) from error
            if isinstance(error, ConfigurationError | torch.OutOfMemoryError):
                raise
            raise Unsupported(mode.explain_error(error)) from error
        mode.clipper = clipper
        return mode

    def _try(self, mode: GradientMode, references: Iterable[_Reference]) -> None:
        if self._rounded is not None and isinstance(mode, GhostMode | HooksMode):
            raise Unsupported(
                f"grad_mode={mode.name!r} under autocast: opacus rounds the gradients of single records to half "
                "precision, so that a record moves the sum by more than its limit. Write grad_mode='auto'."
            )
        if isinstance(mode, LoopMode):
            return
        if self._is_random and not mode.one_by_one:
            raise Unsupported(
                f"train_step draws random numbers, so grad_mode={mode.name!r} cannot be compared with the loop. Write "
                "grad_mode='vmap', in which no record can influence another."
            )
        for case in references:
            self._compare(mode, case, self._plain_run, _EXACT)
        if self._rounded is not None:
            self._compare(mode, self._rounded, self._run, _ROUNDED)

    def _compare(self, mode: GradientMode, case: _Reference, run: Run, tolerance: float) -> None:
        sums, scales, _ = self._sums(mode, case.batch, case.records, case.scaling, run)
        wrong = case.differs(sums, scales, tolerance)
        if wrong is None or self._is_random:
            return
        raise Unsupported(
            f"grad_mode={mode.name!r} gives a wrong gradient for {mode.names[wrong]}: that of {case.records} records "
            "together is not the sum of those of each alone. "
            + (
                "Something in train_step behaves otherwise under torch.func.vmap, such as a hook or a branch on "
                "requires_grad. Write grad_mode='loop', or remove it."
                if mode.one_by_one
                else "Either the loss is not a plain mean over records (it is normalised over the batch, or compares "
                "records), or a layer mixes them, or the parameter is used outside of its layer. Write "
                "grad_mode='auto'."
            )
        )

    def _reference(self, batch: Any, records: int, scaling: Scaling, run: Run) -> _Reference:
        loop = LoopMode(self._module, self._trained, _ScalingClipper(scaling))
        sums, scales, loss = self._sums(loop, batch, records, scaling, run)
        return _Reference(batch=batch, records=records, scaling=scaling, sums=sums, scales=scales, loss=loss)

    def _sums(
        self, mode: GradientMode, batch: Any, records: int, scaling: Scaling, run: Run
    ) -> tuple[list[Tensor], Tensor, float]:
        """The sums of a mode, for each parameter the sum of the norms of its summands, and the mean loss."""
        mode.clipper = clipper = _ScalingClipper(scaling)
        outputs = mode.add(run, batch, records)
        return mode.pop_sums(), clipper.scales, float(loss_item(outputs).detach())

    def _note(self, autocast: bool) -> None:
        self._autocast |= autocast


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reference:
    """A batch, the scaling of its gradients, and the result of the loop for it."""

    batch: Any
    records: int
    scaling: Scaling
    sums: list[Tensor]
    scales: Tensor
    loss: float = 0.0
    is_rounding: Tensor | None = None
    """Bool for each parameter: its gradients are nothing but rounding, and are not compared when they are scaled up."""

    def differs(self, sums: Sequence[Tensor], scales: Tensor, tolerance: float) -> int | None:
        """The number of a parameter whose sum, or whose norms, are not as the loop has them; None if there is none."""
        # A hundredth of the largest norm is added to each: a parameter with almost no gradient has only rounding.
        allowed = tolerance * (self.scales + 1e-2 * self.scales.max())
        wrong = [i for i, fits in enumerate((scales - self.scales).abs() <= allowed) if not fits]
        errors = zip(sums, self.sums, allowed, strict=True)
        wrong += [i for i, (mine, its, limit) in enumerate(errors) if not (mine - its).norm() <= limit]
        if self.is_rounding is not None:
            wrong = [i for i in wrong if not self.is_rounding[i]]
        return wrong[0] if wrong else None


def _unscaled(squares: Tensor, joint: Tensor) -> Tensor:
    """Gradients as they are: shows a wrong scale."""
    return torch.ones_like(squares)


def _unit_norm_per_parameter(squares: Tensor, joint: Tensor) -> Tensor:
    """Each record's gradient of each parameter at about norm 1: shows a wrong norm, and mistakes in small gradients."""
    return 1.0 / (squares.sqrt() + 1e-2 * joint + 1e-30)


def _unit_joint_norm(squares: Tensor, joint: Tensor) -> Tensor:
    """Each record's gradient at norm 1, with one factor for all parameters, which is all that ghost clipping has."""
    return (1.0 / (joint + 1e-30)).expand_as(squares)


class _ScalingClipper(Clipper):
    """A scaling instead of a clipper, which also sums the norms of the added gradients."""

    def __init__(self, scaling: Scaling) -> None:
        self._scaling = scaling
        self.scales = torch.zeros(())

    @property
    def sensitivity(self) -> float:
        return float("inf")

    def _rows(self, squares: Tensor, joint: Tensor, finite: Tensor) -> tuple[Tensor, ...]:
        rows = self._scaling(squares, joint)
        added = torch.where(finite, rows * squares.sqrt(), 0.0).sum(1)
        self.scales = self.scales.to(added) + added
        return tuple(rows)


def _instead_of(module: nn.Module, tensor: str) -> str:
    """Advice for the layer that changes `tensor`."""
    path, _, key = tensor.rpartition(".")
    layer = module.get_submodule(path)
    if type(layer).__name__ == "_SpectralNorm" or hasattr(layer, f"{key[:-2]}_orig"):  # torch 2.13.0, and the old one
        path = path.partition(".parametrizations.")[0]
        return (
            f"{path or 'The module'} has spectral_norm, which updates its vectors in training mode. Use weight_norm in "
            "place of it, or freeze the layer in eval mode."
        )
    if isinstance(layer, BATCH_NORMS):
        return "Use GroupNorm in place of BatchNorm, or freeze the layer in eval mode."
    return "Remove the write, or freeze the layer in eval mode."


def _batch_normalizing_layers(module: nn.Module) -> str:
    """The layers that normalise over the batch, as text."""
    names = [
        f"{name} ({type(layer).__name__})"
        for name, layer in module.named_modules()
        if isinstance(layer, BATCH_NORMS) and (layer.training or not layer.track_running_stats)
    ]
    return f", and {', '.join(names)} normalises records by each other" if names else ""
