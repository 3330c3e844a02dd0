"""The backend strings of a test: every legal one, with a skip mark if it cannot run in this process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import trainstack as ts

NEEDS_APEX = "needs NVIDIA apex and a GPU (tests/backends/test_apex.py runs this with apex's own code, under a shim)"


def stacks_that_run_here(*, trainer: bool = True) -> list[Any]:
    """Every legal string; those with apex are skipped, unless apex's shim makes CPU tensors report the types of CUDA.

    Without `trainer`, none that draws records or shards the module before optimizers exist.
    """
    under_shim = torch.empty(0).is_cuda
    skip = pytest.mark.skip(reason=NEEDS_APEX)
    return [
        spec if under_shim or not spec.endswith("amp-apex") else pytest.param(spec, marks=skip)
        for spec in ts.legal_specs()
        if trainer or not {"dp", "fsdp"} & set(spec.split("-"))
    ]


def stacks_with_public_calls() -> list[Any]:
    """Strings to run a second time with fast paths off.

    The fast paths are in the core, below every layer. So one stack is enough for each way to use the core: alone, by a
    layer and through a wrapper.
    """
    return [
        pytest.param(spec, marks=pytest.mark.public_calls, id=f"{spec}-public-calls") for spec in ("sp", "sp-dp", "ddp")
    ]


every_stack = pytest.mark.parametrize("spec", stacks_that_run_here())
every_stack_and_switch = pytest.mark.parametrize("spec", stacks_that_run_here() + stacks_with_public_calls())
"""With fast paths, and with public calls only."""
every_stack_without_a_trainer = pytest.mark.parametrize("spec", stacks_that_run_here(trainer=False))
"""Those that may be driven by `train_dl` with optimizers that exist: private training and `fsdp` need a `Trainer`."""
