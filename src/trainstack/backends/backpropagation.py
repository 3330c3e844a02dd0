"""Running a backward pass without the checks of a gradient that needs none."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import has_torch_function_unary


def run_backward(loss: Tensor, seed: Tensor) -> None:
    """`loss.backward(seed)`, to the bit; `seed` is 0-dim like `loss`, of its dtype and on its device.

    torch compares shapes symbolically, looks for nested tensors and makes tuples, which costs a third of the backward
    pass of a small model. What `loss` itself or a mode overrides is left to torch, as is anything under `torch.func`.
    """
    if has_torch_function_unary(loss) or torch._C._are_functorch_transforms_active():
        loss.backward(seed)  # type: ignore[no-untyped-call]
        return
    _engine_run_backward((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)
