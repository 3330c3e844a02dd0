"""One rank of the workload `fsdp`: W3, sharded by hand or by the library, with a count of its collectives.

It imports the library only for contenders of the library, so that the hand-written loop does not include this time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tools.bench.contender import Run
from tools.bench.task import Task

NEW = hasattr(dist, "all_gather_single")  # from torch 2.13 on
GATHER, SCATTER = (
    ("all_gather_single", "reduce_scatter_single") if NEW else ("all_gather_into_tensor", "reduce_scatter_tensor")
)
"""The functions with which FSDP2 gathers and reduces."""


@contextmanager
def count_collectives() -> Iterator[Counter[str]]:
    """A block in which calls of `torch.distributed` are counted by name."""
    counts, before = Counter[str](), {name: getattr(dist, name) for name in (GATHER, SCATTER)}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return before[name](*args, **kwargs)

        return call

    for name in before:
        setattr(dist, name, counting(name))
    try:
        yield counts
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def prepare(contender: str, task: Task, folder: Path, size: int) -> Run:
    """The training of `task` on this rank, with every `size`-th batch; it returns the local weights."""
    return _by_hand(task, size) if contender == "raw" else _by_library(contender, task, folder, size)


def _by_hand(task: Task, size: int) -> Run:
    from torch.distributed.fsdp import fully_shard

    def train() -> Sequence[Tensor]:
        dist.init_process_group("gloo")
        model, mine = task.make_model(), task.batches()[dist.get_rank() :: size]
        for part in model.modules():
            if isinstance(part, nn.TransformerEncoderLayer):
                fully_shard(part)
        fully_shard(model, reshard_after_forward=False)
        optimizer = task.make_optimizer(model.parameters())
        model.train()
        for inputs, targets in mine:
            optimizer.zero_grad()
            task.loss(model(inputs), targets).backward()
            optimizer.step()
        weights = _own(model)
        dist.destroy_process_group()
        return weights

    return train


def _by_library(contender: str, task: Task, folder: Path, size: int) -> Run:
    from tools.bench.library import TaskModule, prepare_library

    module = TaskModule(task)
    module.loader = task.batches()
    options: dict[str, Any] = {} if contender == "trainstack_default" else {"writers": (), "progress": "none"}
    run = prepare_library(
        replace(task, accumulation=size), folder, module=module, backend="fsdp", clip_grads=False, **options
    )

    def train() -> Sequence[Tensor]:
        run()
        return _own(module.model)

    return train


def _own(model: nn.Module) -> list[Tensor]:
    return [one.to_local() for one in model.state_dict().values()]
