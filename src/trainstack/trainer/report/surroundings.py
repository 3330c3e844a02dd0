"""What a run runs on, and what it trains, as rows of tables."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import nn
from torch.optim import Optimizer

_DEEPEST, _MOST_ROWS = 3, 80
_PACKAGES = ("trainstack", "torch", "numpy", "opacus")


def environment_rows(device: torch.device, processes: int) -> tuple[tuple[str, str], ...]:
    """Versions, machine and device. Nothing that names the machine or its user."""
    rows = [("python", platform.python_version())]
    rows += [(package, found) for package in _PACKAGES if (found := _version_of(package)) is not None]
    rows += [("system", f"{platform.system()} {platform.release()}, {platform.machine()}")]
    rows += [("CPU cores", str(os.cpu_count())), ("threads of torch", str(torch.get_num_threads()))]
    if device.type == "cuda":
        rows += [("device", torch.cuda.get_device_name(device)), ("CUDA", str(torch.version.cuda))]
    return (*rows, ("processes", str(processes)))


def model_rows(module: nn.Module) -> tuple[tuple[str, str, int, int], ...]:
    """Name, class, parameters and trained parameters of submodules, three levels deep; shared ones count once each."""
    rows: list[tuple[str, str, int, int]] = []
    for name, part in module.named_modules():
        if name.count(".") < _DEEPEST and len(rows) < _MOST_ROWS:
            sizes = [(0 if nn.parameter.is_lazy(p) else p.numel(), p.requires_grad) for p in part.parameters()]
            trained = sum(size for size, is_trained in sizes if is_trained)
            rows.append((name or "(all)", type(part).__name__, sum(size for size, _ in sizes), trained))
    return tuple(rows)


def optimizer_rows(optimizers: Iterable[Optimizer]) -> list[tuple[str, str]]:
    """Class and numbers of each optimizer, as it was made."""
    return [("optimizer", f"{type(one).__name__}: {_numbers_of(one) or 'no numbers'}") for one in optimizers]


def _numbers_of(optimizer: Optimizer) -> str:
    return ", ".join(
        f"{name} {value}"
        for name, value in optimizer.defaults.items()
        if isinstance(value, int | float | tuple) and not isinstance(value, bool)
    )


@cache  # what is installed stays, and looking it up takes a millisecond each
def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
