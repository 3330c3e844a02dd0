"""Faster equivalents of public torch calls, each with the public call as fallback.

Each docstring begins with the public call that the function replaces. Results have the same bits, and hooks and user
code get the same calls: the fast path is taken only if the objects involved are torch's own and unmodified. Otherwise,
and with `enabled=False`, the function makes the public call. `Workload.fast_paths` holds the setting of a run.

This file fetches all private torch names that buy speed, by `getattr`. If a torch release lacks one, the public call
is made: a rename in torch costs microseconds, but breaks no import and changes no result. The names were checked on
torch 2.13.0. `tests/backends/test_fast_paths.py` fails when the pinned torch no longer takes a fast path.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop
from torch.optim import optimizer as optimizers
from torch.overrides import has_torch_function_unary
from torch.utils.data import DataLoader, default_convert

from trainstack.errors import ConfigurationError

VARIABLE = "TRAINSTACK_FAST_PATHS"
"""The environment variable that sets all fast paths of the process: 0 is off, 1 is on."""


def fast_paths_enabled(wanted: bool) -> bool:
    """Whether fast paths may be taken: the value of `TRAINSTACK_FAST_PATHS`, or `wanted` if that is not set.

    Raises:
        ConfigurationError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ConfigurationError(f"{VARIABLE}={value!r}: write 0 to make public torch calls only, or 1, or unset it.")
    return wanted if value == "" else value == "1"


def _private(path: str) -> Any:
    """The object at a dotted path below `torch`; None if this torch does not have it."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


# --- nn.Module.__call__ --------------------------------------------------------------------------------------------

# torch 2.13.0: the hooks of one module and of all modules. `_call_impl` calls `forward` if these eight dicts are empty.
# There is no public way to ask.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)
# torch 2.13.0: not None while `torch.jit.trace` records; `_call_impl` then calls `_slow_forward` instead of `forward`.
_tracing_state = _private("_C._get_tracing_state")
_USUAL_CALL = nn.Module.__call__


def _hooks_in(function: Any) -> set[str]:
    """The names of the hook dicts that the code of `function` uses; empty if it has no Python code."""
    code = getattr(function, "__code__", None)
    return {name for name in getattr(code, "co_names", ()) if name.endswith("_hooks")}


def _knows_module_calls() -> bool:
    """Whether `nn.Module.__call__` uses the private names that `fast_call` checks, and no other hooks.

    A later torch may add a kind of hook, which `fast_call` would skip. Then it must not be used.
    """
    names = getattr(getattr(_USUAL_CALL, "__code__", None), "co_names", ())
    return (
        _tracing_state is not None
        and names == ("_compiled_call_impl", "_call_impl")  # torch 2.13.0: compiled by `Module.compile`, or not
        and _hooks_in(_private("nn.Module._call_impl")) == {*_HOOKS, *_GLOBAL_HOOKS}
        and all(isinstance(getattr(modules, name, None), dict) for name in _GLOBAL_HOOKS)
    )


_MODULE_CALLS_KNOWN = _knows_module_calls()


def fast_call(module: nn.Module, *, enabled: bool = True) -> Callable[..., Any]:
    """`module.forward` if `module(...)` would do nothing else, otherwise `module`.

    This is so if no hook is registered on the module or on all modules, it is neither traced nor compiled, and its
    class has the `__call__` of `nn.Module`. Submodules are called by the user's code, through `__call__`.
    """
    if (
        not enabled
        or not _MODULE_CALLS_KNOWN
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or modules._global_forward_hooks
        or modules._global_forward_pre_hooks
        or modules._global_backward_hooks
        or modules._global_backward_pre_hooks
        or module._compiled_call_impl is not None
        or type(module).__call__ is not _USUAL_CALL
        or _tracing_state() is not None
    ):
        return module
    return module.forward


# --- Tensor.backward -----------------------------------------------------------------------------------------------

# torch 2.13.0: the end of `torch.autograd.backward`, after the checks of its arguments.
_run_engine = _private("autograd.graph._engine_run_backward")
# torch 2.13.0: whether a transform of `torch.func` is active, under which `torch.autograd.backward` raises.
_transforming = _private("_C._are_functorch_transforms_active")
_USUAL_BACKWARD = Tensor.backward
_USUAL_AUTOGRAD_BACKWARD = torch.autograd.backward


def fast_backward(loss: Tensor, gradient: Tensor, *, enabled: bool = True) -> None:
    """`loss.backward(gradient)`; `gradient` is 0-dim like `loss`, with its dtype and on its device.

    torch compares shapes symbolically, looks for nested tensors and makes tuples, which costs a third of the backward
    pass of a small model. If `loss` or a mode overrides the call, or a `torch.func` transform is active, torch does it.
    """
    if (
        not enabled
        or _run_engine is None
        or _transforming is None
        or getattr(loss.backward, "__func__", None) is not _USUAL_BACKWARD
        or torch.autograd.backward is not _USUAL_AUTOGRAD_BACKWARD
        or has_torch_function_unary(loss)
        or _transforming()
    ):
        loss.backward(gradient)  # type: ignore[no-untyped-call]
        return
    _run_engine((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def gradient_seed(weight: float, loss: Tensor) -> Tensor:
    """The initial gradient of the backward pass of `weight * loss`: a new tensor, 0-dim like `loss`.

    It cannot be cached: autograd may use it as the gradient of a parameter with one element, and hooks may write to it.
    """
    if weight == 1.0:
        return torch.ones_like(loss)  # as `torch.autograd.backward` makes it
    return loss.new_full((), weight)


READS_ON_HOST = True
"""Whether losses on the CPU are read at once: nothing waits for a device, and it costs a third of a copy."""


def fast_copy(loss: Tensor, *, enabled: bool = True) -> Tensor | float:
    """`loss.detach().clone()`; a float if `loss` is on the CPU."""
    if enabled and READS_ON_HOST and loss.is_cpu and type(loss) is Tensor:
        return loss.item()
    return loss.detach().clone()


# --- Optimizer.step ------------------------------------------------------------------------------------------------

Step = Callable[..., Any]

# torch's optimizers whose `step` has exactly the two wrappers below (torch 2.13.0). For the others, such as `LBFGS` and
# `SparseAdam`, the public call is made.
_KNOWN = frozenset({SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop})
# torch 2.13.0: the names of the functions that `Optimizer.profile_hook_step` and
# `optimizer._use_grad_for_differentiable` return. If a later torch adds a wrapper, the public call is made.
_WRAPPERS = ["wrapper", "_use_grad"]
# torch 2.13.0: the hooks that the first wrapper calls, of one optimizer and of all.
_STEP_HOOKS = {"_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"}
_GLOBAL_STEP_HOOKS = {"_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"}
# torch 2.13.0: whether a profiler records; the first wrapper opens a range for it.
_profiling = _private("_C._autograd._profiler_enabled")


def _knows_steps() -> bool:
    """Whether this torch has the names that `fast_update` reads; `_unwrapped` checks the wrappers themselves."""
    return _profiling is not None and all(
        isinstance(getattr(optimizers, name, None), dict) for name in _GLOBAL_STEP_HOOKS
    )


_STEPS_KNOWN = _knows_steps()


def fast_step(optimizer: Optimizer, *, enabled: bool = True) -> None:
    """`optimizer.step()`.

    torch wraps each `step` in a profiler range, hook calls and two graph breaks, which cost as much as the update of a
    small model. For an optimizer of torch's own classes they are omitted if they have no effect: no profiler records,
    no hook is registered, `step` was not replaced, and the optimizer is not differentiable.
    """
    update = fast_update(optimizer) if enabled else None
    if update is None:
        optimizer.step()
        return
    with torch.no_grad():
        update(optimizer)


def fast_update(optimizer: Optimizer) -> Step | None:
    """The update without its wrappers, a function of the optimizer; None if the wrappers have an effect."""
    kind = type(optimizer)
    if kind not in _KNOWN or not _STEPS_KNOWN:
        return None
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return None
    if optimizers._global_optimizer_pre_hooks or optimizers._global_optimizer_post_hooks:
        return None
    if _profiling() or optimizer.defaults["differentiable"]:
        return None
    usual: Step = kind.step
    mine: Any = optimizer.__dict__.get("step")
    if mine is not None:
        # torch 2.13.0: a scheduler replaces `step` by a function that sets `_opt_called`, and marks it so.
        if getattr(mine, "__wrapped__", None) is not usual or not getattr(mine, "_wrapped_by_lr_sched", False):
            return None
        optimizer._opt_called = True  # type: ignore[attr-defined]
    return _unwrapped(usual)


@functools.cache
def _unwrapped(step: Step) -> Step | None:
    """The function inside the wrappers of `step`; None if the wrappers or their hooks are not the known ones."""
    found, hooks = [], _hooks_in(step)
    while (inner := getattr(step, "__wrapped__", None)) is not None:
        found.append(step.__code__.co_name)
        step = inner
    return step if found == _WRAPPERS and hooks == _STEP_HOOKS | _GLOBAL_STEP_HOOKS else None


_USUAL_ZERO_GRAD = Optimizer.zero_grad


def has_usual_zero_grad(optimizer: Optimizer) -> bool:
    """Whether `optimizer.zero_grad()` is torch's method, which sets gradients to None."""
    return type(optimizer).zero_grad is _USUAL_ZERO_GRAD and "zero_grad" not in optimizer.__dict__


# --- many tensors at once ------------------------------------------------------------------------------------------

# torch 2.13.0: one call for a list of tensors, a few kernels on an accelerator. `torch.nn.utils` and `torch.optim` use
# them; they have no public names. `torch.nn.utils.get_total_norm` calls `_foreach_norm` on CUDA too.
_foreach_norm = _private("_foreach_norm")
_foreach_mul_ = _private("_foreach_mul_")
_foreach_clamp_min_ = _private("_foreach_clamp_min_")
_foreach_clamp_max_ = _private("_foreach_clamp_max_")
_foreach_lerp_ = _private("_foreach_lerp_")


def fast_clipping_fits(gradients: Sequence[Tensor]) -> bool:
    """Whether `fast_total_norm` and `fast_limit_norm` take `gradients`: strided, of one dtype and on one device."""
    if _foreach_norm is None or _foreach_mul_ is None:
        return False
    first = gradients[0]
    device, dtype = first.device, first.dtype
    return all(g.dtype is dtype and g.layout is torch.strided and g.device == device for g in gradients)


def fast_total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """`torch.nn.utils.get_total_norm(gradients)`, without sorting them by device and dtype."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(_foreach_norm(gradients)))
    return norm


def fast_largest(tensors: Sequence[Tensor], *, enabled: bool = True) -> Sequence[Tensor]:
    """`torch.linalg.vector_norm(tensor, inf)` of each tensor."""
    if not enabled or not tensors or _foreach_norm is None:
        return [torch.linalg.vector_norm(tensor, float("inf")) for tensor in tensors]
    norms: Sequence[Tensor] = _foreach_norm(tensors, float("inf"))
    return norms


def fast_limit_norm(gradients: Sequence[Tensor], norm: Tensor, limit: float) -> None:
    """`torch.nn.utils.clip_grads_with_norm_` with the joint norm `norm`, without sorting gradients by device and dtype.

    On the CPU the factor is computed in Python, and gradients within the limit are not multiplied.
    """
    if norm.dtype is torch.float32 and norm.device.type == "cpu" and limit < MOST_ON_HOST:
        factor = _factor_on_host(norm.item(), limit)
        if factor != 1.0:
            _foreach_mul_(gradients, factor)
        return
    _foreach_mul_(gradients, torch.clamp(limit / (norm + 1e-6), max=1.0))


_ONE, _TINY = np.float32(1.0), np.float32(1e-6)  # 1e-6 is the constant of `clip_grads_with_norm_`
MOST_ON_HOST = 1e30
"""For larger limits numpy would warn of an overflow: float32 ends at 3.4e38, and the factor is at most limit / 1e-6."""


def _factor_on_host(norm: float, limit: float) -> float:
    """`torch.clamp(limit / (norm + 1e-6), max=1.0)` in float32, which costs less than four operations on tensors.

    torch divides a number by a tensor as the tensor's reciprocal times the number; this function does the same.
    """
    factor = _ONE / (np.float32(norm) + _TINY) * np.float32(limit)
    return float(factor) if not factor >= 1.0 else 1.0  # `not >=`, because nan has to remain nan


def fast_clamp(tensors: Sequence[Tensor], limit: float, *, enabled: bool = True) -> None:
    """`tensor.clamp_(-limit, limit)` of each tensor."""
    if enabled and tensors and _foreach_clamp_min_ is not None and _foreach_clamp_max_ is not None:
        _foreach_clamp_min_(tensors, -limit)
        _foreach_clamp_max_(tensors, limit)
        return
    for tensor in tensors:
        tensor.clamp_(-limit, limit)


def fast_lerp(tensors: Sequence[Tensor], ends: Sequence[Tensor], weight: float, *, enabled: bool = True) -> None:
    """`tensor.lerp_(end, weight)` of each tensor and its end."""
    if enabled and tensors and _foreach_lerp_ is not None:
        _foreach_lerp_(tensors, ends, weight)
        return
    for tensor, end in zip(tensors, ends, strict=True):
        tensor.lerp_(end, weight)


# --- iter(DataLoader) ----------------------------------------------------------------------------------------------

# torch 2.13.0: the class that fetches from a map-style dataset, in this process or in a worker.
_MapFetcher = _private("utils.data._utils.fetch._MapDatasetFetcher")
# torch 2.13.0: the class that iterates in this process, and the method that a subclass or a patch would replace.
_SingleProcessIterator = _private("utils.data.dataloader._SingleProcessDataLoaderIter")
_USUAL_NEXT = getattr(_SingleProcessIterator, "__next__", None)


def fast_batches(loader: Any, *, enabled: bool = True) -> Iterator[Any]:
    """`iter(loader)`.

    A `DataLoader` over a map-style dataset without workers enters a profiler range, converts and counts at each batch.
    For a batch that is ready this takes 15 times as long as the fetch alone, and doubles the time of a forward pass of
    a linear layer with its loss. Here torch makes the iterator, with all its checks and random draws, and its sampler
    and fetcher are then used directly. Other loaders are iterated unchanged.
    """
    iterator: Iterator[Any] = iter(loader)
    if not enabled or type(loader) is not DataLoader or loader.num_workers or loader.pin_memory:
        return iterator
    if _MapFetcher is None or _profiling is None or _profiling():
        return iterator
    if type(iterator) is not _SingleProcessIterator or iterator.__next__.__func__ is not _USUAL_NEXT:  # type: ignore[attr-defined]
        return iterator
    # torch 2.13.0: the two parts of the iterator, both private.
    indices: Any = getattr(iterator, "_sampler_iter", None)
    fetcher: Any = getattr(iterator, "_dataset_fetcher", None)
    if indices is None or type(fetcher) is not _MapFetcher:
        return iterator
    ready = loader.batch_sampler is None and loader.collate_fn is default_convert
    return map(_fetching_ready(loader.dataset) if ready else fetcher.fetch, indices)


def _fetching_ready(dataset: Any) -> Callable[[Any], Any]:
    """`default_convert(dataset[index])`; a tuple of tensors, the usual case, becomes a list directly."""

    def fetch(index: Any) -> Any:
        batch = dataset[index]
        if type(batch) is tuple and all(type(item) is Tensor for item in batch):
            return list(batch)
        return default_convert(batch)  # type: ignore[no-untyped-call]

    return fetch
