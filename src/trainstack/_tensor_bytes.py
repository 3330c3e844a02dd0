"""`bytes_of`: the memory of a tensor as bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def bytes_of(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in C order as uint8, 1-dim: a view of its memory if they are there in this order.

    torch counts a tensor with one element as contiguous, whatever its strides are, and refuses to view it as bytes
    unless they are 1 (torch 2.10 to 2.13). So the strides are set here.
    """
    whole = tensor.contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
