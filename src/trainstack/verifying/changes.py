"""Changes of a module under test: fewer loader workers, and a restore that deliberately omits a parameter."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainstack.trainer import ModuleInterface
from trainstack.trainer.data.step_batches import unsupported_order_reason


def limit_workers(module: ModuleInterface, most: int | None) -> list[int]:
    """Limit the workers of the training loaders of `module` to `most`; None changes nothing.

    Only loaders in the library's order are changed, because their samples do not depend on the number of workers. It is
    never increased, because a dataset may not work in another process.

    Returns:
        a list to which the module's numbers of workers are added, if they can be changed.
    """
    asked: list[int] = []
    original = module.get_train_dataloader

    @functools.wraps(original)
    def get_train_dataloader(*arguments: Any, **named: Any) -> Any:
        loader = original(*arguments, **named)
        if _may_be_changed(loader):
            asked.append(loader.num_workers)
            if most is not None and most < loader.num_workers:
                loader.num_workers = most
        return loader

    module.get_train_dataloader = get_train_dataloader  # type: ignore[method-assign]
    return asked


def _may_be_changed(loader: Any) -> bool:
    return (
        isinstance(loader, DataLoader)
        and loader.num_workers > 0
        and not loader.persistent_workers
        and not loader.timeout
        and unsupported_order_reason(loader) is None
    )


def break_restore(module: ModuleInterface) -> list[str]:
    """Make `module` leave one parameter unchanged each time its state is restored.

    A comparison that does not notice this cannot notice state that a module does not save.

    Returns:
        a list to which the name of the parameter is added.
    """
    broken: list[str] = []
    original = module.update_state

    @functools.wraps(original)
    def update_state(state: Mapping[str, Any] | None, *arguments: Any, **named: Any) -> Any:
        fresh = {name: value.detach().clone() for name, value in module.named_parameters()}
        result = original(state, *arguments, **named)
        for name, value in module.named_parameters():
            if value.shape == fresh[name].shape and not torch.equal(value.detach(), fresh[name]):
                with torch.no_grad():
                    value.copy_(fresh[name])
                broken.append(name)
                break
        return result

    module.update_state = update_state  # type: ignore[method-assign]
    return broken
