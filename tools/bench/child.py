"""The process that `tools.bench.processes` starts: one contender with one task.

It imports no other contender, so that a hand-written loop does not include the import of the library.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from tools.bench import fsdp_rank
from tools.bench.allocator import keep_freed_memory, memory
from tools.bench.contender import Run
from tools.bench.task import Task
from tools.bench.workloads import SEED, WORKLOADS


def main(case: str, contender: str) -> None:
    """Run one case: `startup` makes one step of W1, `memory` trains on W3, `ddp` on W2 and `fsdp` on W3 as one rank.

    `ddp` and `fsdp` print collectives, CPU seconds of the training and a sum over the final weights, `memory` prints
    the peak in MiB; the parent process measures `startup`.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(SEED)
        if case in ("ddp", "fsdp"):
            keep_freed_memory()
            size = int(os.environ["WORLD_SIZE"])
            if case == "ddp":
                run = _ddp(contender, WORKLOADS["W2"]().cut(60), Path(folder))
            else:
                task = WORKLOADS["W3"]()
                task = replace(task, inputs=task.inputs.repeat(5, 1), targets=task.targets.repeat(5))
                run = fsdp_rank.prepare(contender, task, Path(folder), size)
            with fsdp_rank.count_collectives() as counts:
                began = time.process_time()
                result = run()
            print(counts[fsdp_rank.GATHER], counts[fsdp_rank.SCATTER], end=" ")
            print(time.process_time() - began, sum(tensor.double().sum().item() for tensor in result))
            return
        task = WORKLOADS["W1"]().cut(1) if case == "startup" else WORKLOADS["W3"]()
        importlib.import_module(f"tools.bench.contenders.{contender}").CONTENDER.prepare(task, Path(folder))()
    if case == "memory":
        # Not `ru_maxrss` of the parent: it includes the memory of the parent before the child's program began.
        print(memory("VmHWM"))


def _ddp(contender: str, task: Task, folder: Path) -> Run:
    size = int(os.environ["WORLD_SIZE"])
    if contender != "raw":
        from tools.bench.library import TaskModule, prepare_library

        batches = _Batches(task)
        module = TaskModule(replace(task, make_model=batches.model))
        module.loader = batches
        options = {} if contender == "trainstack_default" else {"writers": (), "progress": "none"}
        return prepare_library(
            replace(task, accumulation=size), folder, module=module, backend="ddp", clip_grads=False, **options
        )

    def train() -> Sequence[Tensor]:
        torch.distributed.init_process_group("gloo")
        rank, model = torch.distributed.get_rank(), task.make_model()
        wrapped, mine = torch.nn.parallel.DistributedDataParallel(model), task.batches()[rank::size]
        optimizer = task.make_optimizer(model.parameters())
        wrapped.train()
        for inputs, targets in mine:
            optimizer.zero_grad()
            task.loss(wrapped(inputs), targets).backward()
            optimizer.step()
        weights = list(model.state_dict().values())
        del wrapped
        torch.distributed.destroy_process_group()
        return weights

    return train


class _Batches:
    """All batches; each process takes every second one. Neither contender has a loader."""

    def __init__(self, task: Task) -> None:
        self._batches, self.model = task.batches(), task.make_model

    def __iter__(self) -> object:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


if __name__ == "__main__":
    main(*sys.argv[1:])
