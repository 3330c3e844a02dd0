"""The parts of `fully_shard` that are private in torch, or that not all its versions have."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


def parameter_groups(unit: FSDPModule) -> list[Any]:
    """The groups of parameters that `unit` gathers and reduces together. Checked on torch 2.10.0, 2.12.1 and 2.13.0."""
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.10 has one group at most
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def reduce_unused(unit: FSDPModule) -> None:
    """Include zeros for parameters without a gradient in each reduction of `unit`: all ranks then reduce the same."""
    setter = getattr(unit, "set_reduce_scatter_unused_params", None)
    if setter is not None:
        setter(True)
        return
    for group in parameter_groups(unit):  # torch 2.10 to 2.12 have no such setter
        group.post_backward = partial(_reduce_with_zeros, group)


def _reduce_with_zeros(group: Any, *given: Any) -> None:
    """Replaces `FSDPParamGroup.post_backward`."""
    for one in group.fsdp_params if group.reduce_grads else ():
        gathered = getattr(one, "_unsharded_param", None)  # None: no pass has used the unit
        if gathered is None or not gathered.requires_grad or one.unsharded_accumulated_grad is not None:
            continue
        if gathered.grad is None:
            gathered.grad = torch.zeros_like(gathered)
    type(group).post_backward(group, *given)
