"""Limiting gradients without reading anything back from the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from trainstack.backends.workload import Clipping


def clip_gradients(parameters: Iterable[nn.Parameter], clipping: Clipping) -> Tensor | None:
    """Limit the gradients of `parameters` in place.

    Returns:
        The joint L2 norm before clipping, a 0-dim tensor on the gradients' device that has not been read: inf or nan
        where a gradient is. It is computed whatever the kind of clipping, so that no such gradient goes unseen.
        None if nothing has a gradient.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return None
    uniform = _is_uniform(gradients)
    norm = _joint_norm(gradients, uniform)
    if clipping.kind == "norm":
        _scale(gradients, torch.clamp(clipping.limit / (norm + 1e-6), max=1.0), uniform)
    elif clipping.kind == "value":
        torch._foreach_clamp_min_(gradients, -clipping.limit)
        torch._foreach_clamp_max_(gradients, clipping.limit)
    return norm


def _is_uniform(gradients: list[Tensor]) -> bool:
    first = gradients[0]
    device, dtype = first.device, first.dtype
    return all(g.device == device and g.dtype is dtype and g.layout is torch.strided for g in gradients)


def _joint_norm(gradients: list[Tensor], uniform: bool) -> Tensor:
    """The same bits as `torch.nn.utils.get_total_norm`, at a fraction of its cost in the usual case."""
    if uniform:
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        return norm
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    return torch.nn.utils.get_total_norm(dense)


def _scale(gradients: list[Tensor], factor: Tensor, uniform: bool) -> None:
    if uniform:
        torch._foreach_mul_(gradients, factor)
        return
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device))
