"""`StepParameters` holds the parameters of the current global step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from trainstack.errors import ModuleContractError


class StepParameters:
    """The parameters that a global step zeroes, clips, reduces and checks.

    The loop and the layers read them here, through `Workload`, and collect them nowhere else. The loop calls `refresh`
    in each step, so that parameters that are added during training are treated like the others.

    Attributes:
        all: the parameters of the module and of the optimizers, each once, including frozen ones.
        optimized: the parameters of the optimizers, each once. They are the ones to clip.
        find_originals: for a layer whose optimizers hold copies: returns each parameter by the id of its copy.
    """

    all: tuple[Any, ...]
    optimized: tuple[Any, ...]

    def __init__(self, module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        self._module, self._optimizers = module, tuple(optimizers)
        self._ids: list[int] = []  # safe to compare, because `optimized` keeps the objects alive
        self._known: set[int] | None = None
        self._module_changed = True
        self.find_originals: Callable[[], dict[int, nn.Parameter]] = dict
        self.refresh()

    def refresh(self) -> None:
        """Read the parameters of the module and the optimizers again, if they have changed.

        Changes of the module are noticed only within `watch`.

        Raises:
            ModuleContractError: an optimizer was given a parameter that the module does not have.
        """
        ids: list[int] = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                ids += map(id, group["params"])
        if ids == self._ids and not self._module_changed:
            return
        self._ids, self._module_changed = ids, False
        held = [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]
        own = {id(p): p for p in self._module.parameters()}
        optimized = {id(p): p for p in held}
        # A trainer refuses parameters outside the module when it begins. A parameter that has left the module since has
        # no gradient, so no optimizer moves it.
        known = optimized.keys() if self._known is None else self._known
        if foreign := optimized.keys() - own.keys() - known:
            shapes = [tuple(optimized[one].shape) for one in foreign]
            raise ModuleContractError(
                f"an optimizer was given {len(foreign)} parameters that the module does not have, of shapes {shapes}, "
                "so no checkpoint would contain them. Assign them to the module first: self.extra = layer."
            )
        self._known = {*own, *optimized}
        self.all, self.optimized = tuple({**own, **optimized}.values()), tuple(optimized.values())

    @contextmanager
    def watch(self) -> Iterator[None]:
        """A block in which `refresh` notices parameters and submodules that are assigned to any module."""

        def changed(*given: Any) -> None:
            self._module_changed = True

        self._module_changed = True
        hooks = (register_module_parameter_registration_hook, register_module_module_registration_hook)
        handles = [register(changed) for register in hooks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._module_changed = True

    def clipping(self, optimized: Iterable[nn.Parameter]) -> StepParameters:
        """The same with `optimized` to clip, for a layer that steps copies of the parameters."""
        params = copy(self)
        params.optimized = tuple(optimized)
        return params
