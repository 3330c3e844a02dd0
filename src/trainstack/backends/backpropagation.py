"""Running a backward pass without the checks of a gradient that needs none."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import has_torch_function_unary

_engine = getattr(torch.autograd.graph, "_engine_run_backward", None)
_transforming = getattr(torch._C, "_are_functorch_transforms_active", None)


def run_backward(loss: Tensor, seed: Tensor) -> None:
    """`loss.backward(seed)`, to the bit; `seed` is 0-dim like `loss`, of its dtype and on its device.

    torch compares shapes symbolically, looks for nested tensors and makes tuples, which costs a third of the backward
    pass of a small model. What `loss` itself or a mode overrides is left to torch, as is anything under `torch.func`,
    and everything where a later torch has renamed what is used here.
    """
    if _engine is None or _transforming is None or has_torch_function_unary(loss) or _transforming():
        loss.backward(seed)  # type: ignore[no-untyped-call]
        return
    _engine((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)
