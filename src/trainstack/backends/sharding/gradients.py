"""`ShardedGradients` makes the gradients of sharded parameters equal to those of one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trainstack._tensor_classes import is_sharded
from trainstack.backends.losses import loss_item
from trainstack.backends.processes.communicator import Communicator
from trainstack.backends.sharding.torch_groups import parameter_groups
from trainstack.errors import ConfigurationError, ModuleContractError

_UNUSED = "backend_options={'fsdp': {'find_unused_parameters': True}}"


class ShardedGradients:
    """The backward passes of a module that `fully_shard` has sharded.

    FSDP2 reduces the gradients of a unit together, so all ranks need a gradient for each parameter: zeros if a pass did
    not use it. If no rank has used a parameter in a step, its `grad` is set to None.

    Args:
        module: the user's module.
        sharded: the root and its units.
        comm: the communicator of all ranks.
        finds_unused: whether a parameter may take no part in a step.
    """

    def __init__(
        self, module: nn.Module, sharded: Sequence[FSDPModule], comm: Communicator, *, finds_unused: bool
    ) -> None:
        self._module, self._comm, self._finds_unused = module, comm, finds_unused
        # torch 2.13.0: there is no public way to get the gathered tensor of a parameter, which a pass uses.
        self._groups = [group for unit in sharded for group in parameter_groups(unit)]
        self._params: list[Any] = [one for group in self._groups for one in group.fsdp_params]
        self._root = sharded[0]
        self._called = set[str]()
        names = {id(part): name for name, part in module.named_modules()}
        self._units = {names[id(unit)]: unit for unit in sharded[1:]}
        for name, unit in self._units.items():
            unit.register_forward_pre_hook(lambda *given, name=name: self._called.add(name))  # type: ignore[attr-defined]
        self._hooked: dict[int, Tensor] = {}
        self._storages = set[int]()
        self._counts, self._has_counted = True, False
        self._used, self._held = set[int](), set[int]()  # numbers in `_params`

    def check_forward(self, outputs: Any) -> None:
        """Check the outputs of a forward pass in training and register the hooks of the backward pass.

        Raises:
            ModuleContractError: an output shares the memory of a parameter.
            ConfigurationError: the pass did not call a unit. Ranks that gather different units would wait for each
                other, or receive the values of another unit.
        """
        if missing := [name for name in self._units if name not in self._called]:
            raise ConfigurationError(
                f"backend 'fsdp': the forward pass did not call {missing[0]!r}, which is a separate unit. All ranks "
                "have to gather the same units in each pass. Name the units that every pass calls: "
                "backend_options={'fsdp': {'units': [...]}}; with units=[] all parameters are gathered at once."
            )
        self._called.clear()
        self._hook()
        pytree = getattr(torch.utils, "_pytree", None)  # torch 2.13.0: FSDP2 looks for tensors with it
        leaves = [] if pytree is None else pytree.tree_leaves(outputs)
        if any(isinstance(leaf, Tensor) and self._is_of_parameter(leaf) for leaf in leaves):
            raise ModuleContractError(
                "backend 'fsdp': train_step returns a parameter or a view of one. Its memory is freed in the backward "
                "pass. Return a copy: weight.clone()."
            )
        loss = loss_item(outputs)
        if isinstance(loss, Tensor) and not any(leaf is loss for leaf in leaves):
            # torch 2.13.0: FSDP2 finds no tensor in a dataclass, so it would not register this hook.
            self._root._get_fsdp_state()._register_pre_backward_hook(loss)

    @contextmanager
    def backward(self, *, counts: bool, last: bool) -> Iterator[None]:
        """A block in which the backward pass runs.

        Args:
            counts: whether the pass has a positive weight. Otherwise its gradients are replaced by zeros, even if a
                derivative is inf or nan.
            last: whether the pass ends a step.

        Raises:
            ConfigurationError: a parameter took no part in the step, and `finds_unused` is False.
        """
        self._counts = counts
        self._has_counted |= counts
        yield
        self._counts = True
        if last:
            self._end_step()

    def begin_pass(self) -> None:
        """Called before a forward and a backward pass of training.

        torch 2.13.0 prefetches units in a backward pass in the order of all forward passes since the last backward
        pass. Evaluations may have run different numbers of forward passes on the ranks, which would then gather
        different units. So clear this order.
        """
        for group in self._groups:
            getattr(group.comm_ctx, "post_forward_order", []).clear()  # missing before the first pass
            group._post_forward_indices.clear()

    def begin_step(self) -> None:
        """Called before the first pass of a step."""
        self._used.clear()
        self._has_counted = False
        self._held = {n for n, one in enumerate(self._params) if one.sharded_param.grad is not None}

    def _hook(self) -> None:
        """Register hooks on the gathered parameters, which exist from their first use on."""
        for number, one in enumerate(self._params):
            whole = getattr(one, "_unsharded_param", None)  # torch 2.13.0
            if whole is not None and whole.requires_grad and self._hooked.get(number) is not whole:
                whole.register_hook(partial(self._on_gradient, number))
                self._hooked[number] = whole
                self._storages.add(whole.untyped_storage()._cdata)  # torch 2.13.0: constant, unlike the data pointer

    def _is_of_parameter(self, tensor: Tensor) -> bool:
        if is_sharded(tensor):
            return True
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._storages

    def _on_gradient(self, number: int, gradient: Tensor) -> Tensor | None:
        if not self._counts:
            return torch.zeros_like(gradient)
        self._used.add(number)
        return None

    def _end_step(self) -> None:
        trained = [n for n, one in enumerate(self._params) if one.sharded_param.requires_grad]
        unused = [n for n in trained if n not in self._used]
        if self._finds_unused:
            counts = self._comm.sum([float(n in self._used) for n in trained], "the parameters that a step has used")
            for number, count in zip(trained, counts, strict=True):
                if not count and number not in self._held:
                    self._params[number].sharded_param.grad = None
        elif unused and self._has_counted:
            raise ConfigurationError(
                f"{self._names(unused)} took no part in the loss of a step. If this is intended, write {_UNUSED}; "
                "otherwise freeze them with requires_grad_(False) in a hook, before the forward pass."
            )

    def _names(self, numbers: Sequence[int]) -> str:
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        found = [names.get(id(self._params[n].sharded_param), "a parameter") for n in numbers]
        return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")

    def check_members(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse parameters that were added after the module was sharded, because their gradients are not summed.

        Hooks on gradients of shards are refused too, because torch does not call them.

        Raises:
            ModuleContractError: there is such a parameter or hook; the message names it.
        """
        known = {id(one.sharded_param) for one in self._params}
        added = [p for p in parameters if p.requires_grad and id(p) not in known]
        if added:
            names = {id(parameter): name for name, parameter in self._module.named_parameters()}
            if id(added[0]) not in names:
                raise ModuleContractError(
                    "an optimizer holds parameters from before backend 'fsdp' sharded the module, so it would not "
                    "train the shards. Make optimizers in get_optimizers_schedulers, or pass SupervisedModule a "
                    "function that makes the optimizer."
                )
            raise ModuleContractError(
                f"the parameter {names[id(added[0])]!r} was added after backend 'fsdp' had "
                "sharded the module. Make it in __init__, and freeze it until it is needed; or use 'ddp'."
            )
        hooked = [
            number for number, one in enumerate(self._params) if one.sharded_param._backward_hooks
        ]  # torch 2.13.0
        if hooked:
            raise ModuleContractError(
                f"{self._names(hooked)} has a hook on its gradient, which backend 'fsdp' does not call. Change "
                "gradients in on_end_backward, or in the event BEFORE_OPTIMIZER_STEP; or use 'ddp'."
            )
