"""`amp-apex`: mixed precision by `apex.amp`, which newer versions of NVIDIA apex no longer contain.

apex keeps its state for the whole process. `amp.initialize` may be called once in a process, and opt level O1 replaces
functions of torch for all code in it. This module imports apex only when a stack with this layer is opened.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainstack.backends.base import Slot, TrainerBackend
from trainstack.backends.decorator import AbstractTrainerBackendDecorator
from trainstack.backends.optimizer_state import parameter_names
from trainstack.backends.processes.world import DeviceChoice, World
from trainstack.backends.spec import register_layer
from trainstack.backends.step_parameters import StepParameters
from trainstack.backends.workload import Workload
from trainstack.errors import ApexUnavailableError, CheckpointMismatchError, ConfigurationError

_MARKS_OF_NVIDIA = ("multi_tensor_apply", "normalization")
"""Folders that every version of NVIDIA's apex has, and that the web framework of the same name lacks."""

_ADVICE = (
    "apex.amp was removed from NVIDIA's apex on 2025-05-08; the last commit with it is e13873d of 2025-04-11 (tag "
    "25.05). Install that one, or write 'amp' in place of 'amp-apex' (backend='sp-amp', or 'ddp-amp' over processes): "
    "torch's own float16, which needs no other package."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApexInfo:
    """The result of `probe`.

    Attributes:
        kind: `"absent"`; `"not-nvidia"`, another package with this name; `"broken"`, NVIDIA's apex with amp, whose
            import fails here; `"no-amp"`, NVIDIA's apex without amp; `"amp"`, a working one.
        location: the folder or file; None if absent.
        distribution: the distribution that installed it, with its version, e.g. `"apex 0.1"`; None if unknown.
        has_cuda_ext: whether apex's compiled kernels (`amp_C`) are installed.
        detail: the error of the import, or a remark about the location; empty if there is none.
    """

    kind: Literal["absent", "not-nvidia", "broken", "no-amp", "amp"]
    location: str | None = None
    distribution: str | None = None
    has_cuda_ext: bool = False
    detail: str = ""


def probe() -> ApexInfo:
    """Look for apex. Run its code only if its files show that it is NVIDIA's and has amp."""
    place = _place()
    if place is None:
        return ApexInfo(kind="absent")
    names = sorted(set(metadata.packages_distributions().get("apex", ())))
    installed = ", ".join(f"{name} {metadata.version(name)}" for name in names) or None
    found = partial(ApexInfo, location=str(place), distribution=installed, has_cuda_ext=find_spec("amp_C") is not None)
    if not all((place / part).is_dir() for part in _MARKS_OF_NVIDIA):
        holds_source = (place / "apex" / "multi_tensor_apply").is_dir()
        detail = ", but a folder that holds its source. Install it from there, or start in another folder"
        return found(kind="not-nvidia", detail=detail if holds_source else "")
    if not (place / "amp" / "frontend.py").is_file():
        return found(kind="no-amp")
    try:
        importlib.import_module("apex.amp")
    except Exception as error:
        old = " (this apex is older than 2023-02-15, when it stopped to use torch._six)" if "_six" in str(error) else ""
        return found(kind="broken", detail=f"{type(error).__name__}: {str(error).rstrip('.')}{old}")
    return found(kind="amp")


def require_amp() -> Any:
    """The module `apex.amp`.

    Raises:
        ApexUnavailableError: no working one is installed. The message gives the package that was found, its location
            and the backend to write instead.
    """
    if {"apex", "apex.amp"} <= set(sys.modules):  # imported once, by the probe or by the user
        return sys.modules["apex.amp"]
    info = probe()
    if info.kind != "amp":
        raise ApexUnavailableError(f"backend 'amp-apex' needs apex.amp. {_describe(info)} {_ADVICE}")
    return importlib.import_module("apex.amp")


def _describe(info: ApexInfo) -> str:
    where = f"{info.location} (installed by {info.distribution or 'no distribution that pip knows'})"
    if info.kind == "absent":
        return "No package 'apex' is installed here; 'pip install apex' installs another package, not NVIDIA's."
    if info.kind == "not-nvidia":
        return f"The package 'apex' at {where} is not NVIDIA's apex{info.detail}."
    if info.kind == "no-amp":
        return f"NVIDIA's apex at {where} no longer has amp."
    return f"NVIDIA's apex at {where} has amp, but its import fails here: {info.detail}."


def _place() -> Path | None:
    """The folder of the package, or the file of a module."""
    try:
        spec = find_spec("apex")
    except ValueError:  # `apex` in sys.modules has no `__spec__`: code of the user put it there
        origin = getattr(sys.modules["apex"], "__file__", None)
        return Path(origin or "sys.modules['apex']")
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    return Path(folders[0] if folders else spec.origin or "apex")


LEVELS = ("O0", "O1", "O2", "O3")
OPTIONS = (
    "cast_model_type",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
    "cast_model_outputs",
    "verbosity",
    "min_loss_scale",
    "max_loss_scale",
)
"""The arguments of `amp.initialize` that a user may choose, except the opt level."""

_NOT_OPTIONS = {
    "models": "the module is the trainer's.",
    "optimizers": "get_optimizers_schedulers returns them.",
    "enabled": "write a backend without 'amp-apex' to train without it.",
    "num_losses": "a step has one loss.",
}


@register_layer("amp-apex", slot=Slot.PRECISION)
class AmpApex(AbstractTrainerBackendDecorator):
    """Mixed precision by NVIDIA's `apex.amp`; needs a CUDA device and an apex that still has amp.

    Args:
        inner: the layer inside this one.
        opt_level: `"O0"` float32; `"O1"` torch's functions cast; `"O2"` a float16 model with float32 master weights;
            `"O3"` a float16 model.
        **options: keyword arguments for `amp.initialize`: `loss_scale`, `keep_batchnorm_fp32`, `max_loss_scale`, ...

    Raises:
        ConfigurationError: `amp.initialize` has no such option, or the trainer sets it.
    """

    summary: ClassVar[str] = (
        "has apex.amp cast the model, scale the loss, keep master weights and skip a step that overflowed"
    )
    may_skip_steps: ClassVar[bool] = True
    refuses_updates = refuses_closures = "apex scales one loss a step"
    refuses_replay = "apex counts each backward pass in its loss scaler"
    excludes: ClassVar[Mapping[str, str]] = {
        "dp": "privacy needs the gradient of each sample in true units, apex scales and sums them first.",
        "fsdp": "apex replaces parameters by master weights, which fsdp does not shard.",
    }

    def __init__(self, inner: TrainerBackend, *, opt_level: str = "O1", **options: Any) -> None:
        super().__init__(inner)
        _check_options(opt_level, options)
        self.opt_level = opt_level
        self._options = {"verbosity": 0, **options}
        self._amp: Any = None
        self._optimizers: tuple[Optimizer, ...] = ()
        self._own: frozenset[int] = frozenset()
        self._module: nn.Module | None = None

    def open(self, device: DeviceChoice = "auto") -> World:
        self._amp = require_amp()
        world = self.inner.open(device)
        _check_device(world.device)
        return world

    def prepare(self, work: Workload) -> Workload:
        amp = self._amp = require_amp()
        work = self.inner.prepare(work)
        _check_device(work.world.device)
        _check_not_initialized(amp)
        _check_model(work)
        # Private names of apex (`_amp_lazy_init`, `_amp_stash`, `_amp_state`, ...) were checked on its commit e13873d.
        counted = [hasattr(optimizer.step, "_wrapped_by_lr_sched") for optimizer in work.optimizers]
        model, optimizers = amp.initialize(work.model, list(work.optimizers), opt_level=self.opt_level, **self._options)
        for optimizer, by_scheduler in zip(optimizers, counted, strict=True):
            # Make the master weights now, not in the first step: optimizer states are then restored in float32.
            optimizer._amp_lazy_init()
            if by_scheduler:  # apex's `step` calls the one that the scheduler wrapped; without the mark torch warns
                getattr(optimizer.step, "__func__", optimizer.step)._wrapped_by_lr_sched = True
        handle = getattr(amp._amp_state, "handle", None)
        if handle is not None:
            # O1's cache of casts reads `grad_fn` in a way that fails since torch 1.10: a weight that is used twice in a
            # step raises IndexError. A cast of a validation would also remain after later updates.
            handle._enable_caching = False
        self._optimizers = tuple(optimizers)
        self._own = frozenset(map(id, work.parameters))
        params = StepParameters(work.module, self._optimizers)
        params.find_originals, self._module = self._find_originals, work.module
        return replace(work, model=model, optimizers=self._optimizers, params=params)

    def backward(self, work: Workload, loss: Tensor, weight: float) -> None:
        # Unscale in `clip` only: one overflow decision and one change of the scale for each global step, after all
        # micro-batches, and after the gradients of other processes were added.
        with self._amp.scale_loss(loss, list(work.optimizers), delay_unscale=True) as scaled:
            self.inner.backward(work, scaled, weight)

    def clip(self, work: Workload) -> Tensor | None:
        optimizers: list[Any] = list(work.optimizers)
        if any(optimizer._amp_stash.params_have_scaled_gradients for optimizer in optimizers):
            # Leaving the context writes unscaled gradients to the master weights and checks them for overflow.
            with self._amp.scale_loss(torch.zeros((), device=work.world.device), optimizers):
                pass
        if _skips(work):  # apex stops at the first overflow, so the remaining master gradients are not written
            return torch.full((), float("inf"), device=work.world.device)
        masters = {id(p): p for optimizer in optimizers for p in self._amp.master_params(optimizer)}
        return self.inner.clip(replace(work, params=work.params.clipping(masters.values())))

    def step(self, work: Workload) -> bool:
        if _skips(work):
            self.inner.step(work)  # apex replaced `step` by one that moves nothing and restores the original
            return False
        return self.inner.step(work)

    def skip(self, work: Workload) -> None:
        if _skips(work):
            self.inner.step(work)  # see `step`
        for masters in self._masters():  # their gradients would count in the next step
            for master in masters:
                master.grad = None
        self.inner.skip(work)

    def get_layer_state(self) -> dict[str, Any]:
        if not self._optimizers:
            return {"opt_level": self.opt_level}
        return {
            "opt_level": self.opt_level,
            "scalers": {name: dict(scaler) for name, scaler in self._amp.state_dict().items()},
            "masters": {name: master.detach() for name, master in self._masters_by_name().items()},
        }

    def update_layer_state(self, state: dict[str, Any]) -> None:
        if not self._optimizers:
            raise ConfigurationError("layer 'amp-apex' can load its state only after `prepare`, not before.")
        mine, saved = self._masters_by_name(), state["masters"]
        if not isinstance(saved, Mapping) or state["opt_level"] != self.opt_level or _shapes(saved) != _shapes(mine):
            raise CheckpointMismatchError(
                f"the checkpoint was written under apex opt_level={state['opt_level']!r} with {len(saved)} master "
                f"weights; this run has opt_level={self.opt_level!r} and {len(mine)} of them. Names and shapes "
                "have to be equal: resume with the same options and the same module."
            )
        self._amp.load_state_dict(state["scalers"])
        with torch.no_grad():
            for name, master in mine.items():
                master.copy_(saved[name])

    def _masters_by_name(self) -> dict[str, Tensor]:
        """The master weights by the names of their parameters."""
        assert self._module is not None
        names, originals = parameter_names(self._module), self._find_originals()
        masters = [master for of_one in self._masters() for master in of_one]
        return {names[id(originals[id(master)])][0]: master for master in masters}

    def _find_originals(self) -> dict[int, nn.Parameter]:
        """The float16 parameter of each master weight, by the id of the master. `add_param_group` adds to them."""
        stashes: list[Any] = [optimizer._amp_stash for optimizer in self._optimizers]  # type: ignore[attr-defined]
        return {
            id(master): parameter
            for stash in stashes
            for parameter, master in zip(
                getattr(stash, "all_fp16_params", ()), getattr(stash, "all_fp32_from_fp16_params", ()), strict=False
            )
        }

    def _masters(self) -> list[list[Tensor]]:
        """The float32 master weights that apex made, by optimizer."""
        return [[p for p in self._amp.master_params(o) if id(p) not in self._own] for o in self._optimizers]


def _skips(work: Workload) -> bool:
    """Whether apex replaced `step` by one that moves nothing: in all optimizers, because they share one scale."""
    optimizers: tuple[Any, ...] = work.optimizers
    return any(optimizer._amp_stash.already_patched for optimizer in optimizers)


def _shapes(masters: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: master.shape for name, master in masters.items()}


def _check_options(opt_level: str, options: Mapping[str, Any]) -> None:
    if opt_level not in LEVELS:
        raise ConfigurationError(f"amp-apex: opt_level={opt_level!r}: write one of {', '.join(map(repr, LEVELS))}.")
    for name, value in options.items():
        if name in _NOT_OPTIONS:
            raise ConfigurationError(f"amp-apex: {name} is set by the trainer: {_NOT_OPTIONS[name]} Remove it.")
        if name not in OPTIONS:
            close = difflib.get_close_matches(name, OPTIONS, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"There are opt_level, {', '.join(OPTIONS)}."
            raise ConfigurationError(f"amp-apex: amp.initialize has no option {name!r}. {hint}")
        if value is torch.bfloat16:
            raise ConfigurationError(
                f"amp-apex: {name}=torch.bfloat16: apex.amp knows float16 only. Write 'bf16' in place of 'amp-apex': "
                "backend='sp-bf16'."
            )


def _check_device(device: torch.device) -> None:
    """Check `is_cuda` of a tensor on the device, as apex does."""
    if not torch.empty(0, device=device).is_cuda:
        raise ConfigurationError(
            f"backend 'amp-apex' on device {str(device)!r}: apex.amp trains on CUDA devices only. Write "
            "device='cuda', or 'amp' in place of 'amp-apex', which runs on any device: backend='sp-amp'."
        )


def _check_not_initialized(amp: Any) -> None:
    if hasattr(amp._amp_state, "opt_properties"):
        raise ConfigurationError(
            "backend 'amp-apex': amp.initialize was called in this process before, and apex keeps one state for the "
            "process: a second call would reset the first one's loss scale. Start a new process for each training, or "
            "write 'amp' in place of 'amp-apex': backend='sp-amp'."
        )


def _check_model(work: Workload) -> None:
    for name, part in work.module.named_modules():
        if type(part).__name__ == "OptimizedModule" or getattr(part, "_compiled_call_impl", None) is not None:
            raise ConfigurationError(
                f"backend 'amp-apex': {name or 'the module'!r} is compiled, and apex cannot change a compiled module. "
                "Remove torch.compile, or write 'amp' in place of 'amp-apex': backend='sp-amp'."
            )
    for name, parameter in work.module.named_parameters():
        if parameter.is_floating_point() and parameter.dtype is not torch.float32:
            raise ConfigurationError(
                f"backend 'amp-apex': parameter {name!r} is {parameter.dtype}. Pass a float32 module; apex casts it "
                "as the opt level requires."
            )
