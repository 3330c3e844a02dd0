"""`shard` applies `fully_shard` to the units of a module, and refuses parameters that FSDP2 cannot shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from trainstack.backends.model_units import Unit, find_units
from trainstack.backends.sharding.torch_groups import parameter_groups, reduce_unused
from trainstack.errors import ConfigurationError

OPTION = "backend_options={'fsdp': {'units': [...]}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The settings of `shard`.

    Attributes:
        units: the units that the user named; see `find_units`.
        reshard_after_forward: whether a unit frees its gathered parameters after its forward pass.
        gathered_dtype: of gathered parameters and of their gradients in a process; None for that of the parameter.
            Gradients are summed in float32.
        cpu_offload: whether parameters, gradients and optimizer states are kept in host memory.
    """

    units: Sequence[Unit] | None = None
    reshard_after_forward: bool = True
    gathered_dtype: torch.dtype | None = None
    cpu_offload: bool = False

    @property
    def precision(self) -> MixedPrecisionPolicy:
        """The policy for `fully_shard`. Inputs keep their dtype, because autocast chooses it for each operation."""
        if self.gathered_dtype is None:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(
            param_dtype=self.gathered_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )

    @property
    def offload(self) -> OffloadPolicy:
        """The policy for `fully_shard`."""
        return CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy()


def shard(module: nn.Module, mesh: DeviceMesh, how: Sharding) -> list[FSDPModule]:
    """Shard `module` over `mesh`, in place. Returns the root, then its units.

    Raises:
        ConfigurationError: a parameter cannot be sharded, or `how.units` does not match the module.
    """
    _check(module)
    chosen = find_units(module, how.units, option=OPTION)
    policies: dict[str, Any] = {"mesh": mesh, "mp_policy": how.precision, "offload_policy": how.offload}
    for unit in reversed(chosen):  # inner units first, as `fully_shard` requires
        fully_shard(unit, reshard_after_forward=how.reshard_after_forward, **policies)
    fully_shard(module, reshard_after_forward=False, **policies)  # its backward pass follows directly
    sharded: list[FSDPModule] = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in sharded:  # each of the three calls affects one unit only
        part.set_gradient_divide_factor(1.0)  # the weights of a step sum to one over all ranks
        part.set_force_sum_reduction_for_comms(True)
        reduce_unused(part)
    return sharded


def _check(module: nn.Module) -> None:
    """Refuse parameters that FSDP2 cannot shard (torch 2.13.0), by name."""
    for name, part in module.named_modules():
        if getattr(part, "sparse", False) is True and isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            raise ConfigurationError(
                f"backend 'fsdp' cannot shard {name}: it has sparse gradients. Write sparse=False, or use 'ddp'."
            )
    for name, parameter in module.named_parameters():
        reason = _problem(parameter)
        if reason:
            raise ConfigurationError(f"backend 'fsdp' cannot shard {name}: {reason}")


def _problem(parameter: nn.Parameter) -> str | None:
    if parameter.dim() == 0:
        return "it has no dimension. Make it 1-dimensional: nn.Parameter(torch.zeros(1))."
    if not parameter.is_contiguous():
        return (
            "its memory is not contiguous (channels_last, a transposed view). Remove channels_last, or assign "
            "nn.Parameter(weight.contiguous())."
        )
    if parameter.is_complex():
        return "it is complex. Keep torch.view_as_real(weight) as the parameter, and view_as_complex in forward."
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):  # torch 2.13.0
        return "it has a hook on its gradient, which the shards do not call. Remove it, or use 'ddp'."
    if type(parameter) is not nn.Parameter and type(parameter) is not torch.Tensor:
        return f"it is a {type(parameter).__name__}. Use plain parameters, or use 'ddp'."
    return None


def gather_all(sharded: Sequence[FSDPModule]) -> None:
    """Gather all parameters, which remain whole until `reshard_all`. All processes call it together.

    torch 2.13.0: `state_dict` shards parameters again, so the next forward pass would gather them, perhaps on this
    process alone. `_to_sharded` is replaced to prevent it, and `state_dict` returns whole tensors until `reshard_all`.
    """
    for unit in sharded:
        unit.unshard()
        for group in parameter_groups(unit):
            group._to_sharded = _stay_whole


def reshard_all(sharded: Sequence[FSDPModule]) -> None:
    """Undo `gather_all`, on this process alone."""
    for unit in sharded:
        for group in parameter_groups(unit):
            vars(group).pop("_to_sharded", None)
        unit.reshard()


def _stay_whole() -> None:
    """Replaces `FSDPParamGroup._to_sharded`."""
