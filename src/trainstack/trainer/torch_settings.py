"""Torch settings of a run: compile, channels last, determinism, precision, memory counters."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Literal

import torch
from torch import nn
from torch.jit import is_tracing  # type: ignore[attr-defined]
from torch.nn.modules import module as modules

from trainstack.backends.model_units import Unit, find_units
from trainstack.errors import ConfigurationError
from trainstack.trainer.recomputation import Recomputes, recompute_units

Compile = bool | Literal["units"] | Mapping[str, Any]
"""Whether to compile models, as a whole or unit by unit; a dict has options, and `"units": True` for the latter."""


def prepare_model(
    module: nn.Module,
    *,
    compiled: Compile,
    channels_last: bool,
    private: bool,
    recomputes: bool = False,
    units: Sequence[Unit] | None = None,
) -> CompiledModels | None:
    """Compile the models in `module` in place, let its units recompute activations, and set the memory format.

    The models are the parts of `module` that hold parameters. Steps are not compiled, so hooks, logs and other code in
    them work as before.

    Args:
        module: the user's module.
        compiled: value of the argument `compile`.
        channels_last: whether to store the weights of 2-D convolutions in channels-last format.
        private: whether the run is private.
        recomputes: whether units recompute activations in the backward pass.
        units: units that the user has named; see `find_units`.

    Returns:
        The compiled models; None if compilation is off.

    Raises:
        ConfigurationError: `compiled` or `recomputes` with `private` or without a suitable part, or torch's default
            device is `meta`.
    """
    if torch.get_default_device().type == "meta":
        raise ConfigurationError(
            "torch's default device is 'meta', on which tensors have no values: neither losses nor weights can be "
            "computed. Call torch.set_default_device('cpu') before training, or end the block `with "
            "torch.device('meta')`."
        )
    if channels_last:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if private and (compiled is not False or recomputes):
        name = "activation_checkpointing=True" if compiled is False else f"compile={compiled!r}"
        raise ConfigurationError(
            f"{name} in a private run: the gradient of each record is computed by transforms that do not support it. "
            "Remove it."
        )
    recompute_units(module, [])  # resets the units of an earlier run
    options, by_unit = split_compile(compiled)
    found = _blocks(module, units, compiled, recomputes) if by_unit or recomputes else []
    models = [] if options is None else found if by_unit else list(_models(module))
    if options is not None and not models:
        raise ConfigurationError(
            f"compile=True: {type(module).__name__} has no part with parameters to compile. Put them into "
            "an nn.Module that the steps call, or remove compile."
        )
    chosen = [model for model in models if not _is_compiled(model)]
    for model in chosen:
        _compile(model, options or {})
    if recomputes:
        recompute_units(module, found)
    return None if options is None else CompiledModels(len(chosen))


def _blocks(module: nn.Module, units: Sequence[Unit] | None, compiled: Compile, recomputes: bool) -> list[nn.Module]:
    """Return the units of `module`, which are compiled or recompute separately."""
    found = find_units(module, units)
    if recomputes and (compiled is not False or any(map(_is_compiled, found))):
        raise ConfigurationError(
            "activation_checkpointing=True with compiled blocks: torch does not run compiled code within a checkpoint. "
            "Remove activation_checkpointing or the compilation."
        )
    if not found:
        name = "activation_checkpointing=True" if recomputes else f"compile={compiled!r}"
        raise ConfigurationError(
            f"{name}: {type(module).__name__} has no nn.ModuleList or nn.Sequential that repeats a block. Return the "
            "blocks from a method sharding_units(), or remove the argument."
        )
    return found


def split_compile(compiled: Compile) -> tuple[dict[str, Any] | None, bool]:
    """Return the options of `torch.compile`, None to compile nothing; and whether to compile units separately."""
    if isinstance(compiled, bool):
        return ({} if compiled else None), False
    if isinstance(compiled, str):
        return {}, True
    options = dict(compiled)
    by_unit = bool(options.pop("units", False))
    return options, by_unit


def reuses_memory(module: nn.Module, compiled: Compile) -> bool:
    """Whether a replay of a CUDA graph may overwrite outputs of an earlier step without a new version of the tensor.

    Args:
        module: module; a part that the user or an earlier run has compiled counts, because its mode is unknown.
        compiled: value of the argument `compile`; some of its options enable CUDA graphs.
    """
    options = split_compile(compiled)[0] or {}
    return (
        options.get("mode") in ("reduce-overhead", "max-autotune")
        or options.get("backend") == "cudagraphs"
        or bool((options.get("options") or {}).get("triton.cudagraphs"))
        or any(map(_is_compiled, module.modules()))
        or (compiled is False and any(map(_compiled_call, module.modules())))
    )


def _models(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of `module` that hold parameters and are called directly."""
    for part in module.children():
        if isinstance(part, nn.ModuleList | nn.ModuleDict):
            yield from _models(part)
        elif next(part.parameters(), None) is not None:
            yield part


def _is_compiled(model: nn.Module) -> bool:
    """Whether the user has compiled `model`, with `Module.compile` or `torch.compile`. Names of torch 2.13.0."""
    call = _compiled_call(model)
    by_earlier_run = getattr(call, "__module__", None) == __name__  # its options may differ
    return (call is not None and not by_earlier_run) or type(model).__name__ == "OptimizedModule"


def _compiled_call(model: nn.Module) -> Any:
    call = getattr(model, "_compiled_call_impl", None)
    return None if isinstance(call, Recomputes) else call


def _compile(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Compile the calls of `model`, as `Module.compile` does; names, the state dict, copies and pickles stay the same.

    torch does not compile frames of torch.nn, so `Module.compile` captures no graph of an `nn.Sequential`. Here a frame
    of the library calls `forward`. A model with hooks is left to torch, because a frame that was compiled without hooks
    ignores hooks that are registered later. Checked on torch 2.13.0.
    """

    def call_forward(*args: Any, **kwargs: Any) -> Any:
        return type(model).forward(model, *args, **kwargs)

    # Each model has a separate code object, because torch keeps at most 8 compilations of one.
    code = call_forward.__code__.replace(co_name=f"call_{type(model).__name__}")
    plainly = torch.compile(FunctionType(code, globals(), closure=call_forward.__closure__), **options)
    by_torch = torch.compile(model._call_impl, **options)
    instance = vars(model)

    def call(*args: Any, **kwargs: Any) -> Any:
        plain = not (_has_hooks(model) or "forward" in instance or is_tracing())  # type: ignore[no-untyped-call]
        return plainly(*args, **kwargs) if plain else by_torch(*args, **kwargs)

    model._compiled_call_impl = call


def _has_hooks(model: nn.Module) -> bool:
    """Whether a call of `model` runs hooks, of the model or of all modules. Names of torch 2.13.0."""
    return bool(
        model._forward_hooks
        or model._forward_pre_hooks
        or model._backward_hooks
        or model._backward_pre_hooks
        or modules._global_forward_hooks
        or modules._global_forward_pre_hooks
        or modules._global_backward_hooks
        or modules._global_backward_pre_hooks
    )


class CompiledModels:
    """The models that a run compiles, and counters of torch's compilations in this process since."""

    def __init__(self, models: int) -> None:
        self._models, self._before = models, _compilations()

    @property
    def is_in_vain(self) -> bool:
        """Whether models should be compiled, and none was."""
        return bool(self._models) and self.counts is not None and not self.counts[0]

    @property
    def counts(self) -> tuple[int, int] | None:
        """Numbers of graphs and recompilations; None if this version of torch does not count them."""
        now = _compilations()
        if now is None or self._before is None:
            return None
        graphs, again = (max(0, after - before) for after, before in zip(now, self._before, strict=True))
        return graphs, again  # torch._dynamo.reset() resets the counters, so differences may be negative

    def describe(self) -> str:
        """Return the counts as text."""
        models, counts = _plural(self._models, "model"), self.counts
        if counts is None:
            return f"{models}; this version of torch does not count graphs"
        return f"{models}, {_plural(counts[0], 'graph')}, {_plural(counts[1], 'recompilation')}"


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _compilations() -> tuple[int, int] | None:
    """Return the number of graphs that were compiled, and of repeated compilations of a frame.

    None if torch lacks these private names; checked on torch 2.13.0.
    """
    try:
        from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER
        from torch._dynamo.utils import counters

        return counters["stats"]["unique_graphs"], sum(count - 1 for count in FRAME_COMPILE_COUNTER.values())
    except (ImportError, AttributeError, TypeError):
        return None


@contextmanager
def deterministic(wanted: bool | Literal["warn"]) -> Iterator[None]:
    """Context manager in which operations without a deterministic algorithm raise an error, or with "warn" a warning.

    cuDNN does not benchmark algorithms inside the block. cuBLAS is deterministic only if CUBLAS_WORKSPACE_CONFIG was
    set before its first use in the process. It is set here if it is missing, and remains set after the block, because
    cuBLAS has read it already.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # a value that torch's documentation recommends
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=wanted == "warn")
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark


MatmulPrecision = Literal["highest", "high", "medium"]


@contextmanager
def matmul_precision(wanted: MatmulPrecision | None) -> Iterator[None]:
    """Context manager that sets the precision of float32 matrix products; None changes nothing.

    See `torch.set_float32_matmul_precision`.

    Raises:
        ConfigurationError: the process has set precisions with an API that torch does not mix with this function.
    """
    if wanted is None:
        yield
        return
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError as error:
        raise ConfigurationError(
            f"float32_matmul_precision={wanted!r}, and this process has set {_fp32_precisions()}, which torch does not "
            "combine. Remove the argument, or do not set torch.backends...fp32_precision."
        ) from error
    # torch 2.13.0: the function also sets these, and cannot restore their initial value "none".
    own = [place.fp32_precision for place in _PLACES.values()]
    torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for place, precision in zip(_PLACES.values(), own, strict=True):
            place.fp32_precision = precision


_PLACES: dict[str, Any] = {
    "cuda": torch.backends.cuda.matmul,
    "mkldnn": torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
}


def _fp32_precisions() -> str:
    return ", ".join(f"torch.backends.{name}.matmul.fp32_precision={p.fp32_precision!r}" for name, p in _PLACES.items())


def precision_in_force(wanted: MatmulPrecision | None) -> str:
    """Return the precision inside `matmul_precision(wanted)`."""
    try:
        return wanted or torch.get_float32_matmul_precision()
    except RuntimeError:
        return _fp32_precisions()


def cpu_settings() -> dict[str, Any]:
    """Return settings that determine the order of additions on this process's CPU, and so the bits of results."""
    return {
        "threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


GIB = 2**30


def host_peak_gib() -> float | None:
    """Return the peak resident memory of this process in GiB; None on Windows."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak) * (1 if sys.platform == "darwin" else 1024) / GIB  # in bytes on macOS, in KiB elsewhere


def device_peak_gib(device: torch.device) -> float | None:
    """Return the peak memory of tensors on `device` in GiB; None if it is not CUDA."""
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None
