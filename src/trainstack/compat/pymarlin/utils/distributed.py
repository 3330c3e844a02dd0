"""The place of this process: trainstack's `DistributedTrainingArguments`, in PyMarlin's order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import trainstack as ts
from trainstack.backends.processes.environment import detect_process_info
from trainstack.compat.pymarlin.utils.mutable import Mutable
from trainstack.ranks import rank_zero_only


class DistributedTrainingArguments(Mutable, ts.DistributedTrainingArguments):
    """`trainstack.DistributedTrainingArguments` by position as in PyMarlin.

    Args:
        backend: None, the default, follows the device: nccl on GPUs, gloo on CPUs.
        **more: other arguments of trainstack's class.
    """

    def __init__(
        self,
        local_rank: int = 0,
        global_rank: int = 0,
        world_size: int = 1,
        backend: str | None = None,
        init_method: str = "env://",
        gather_frequency: int | None = None,
        **more: Any,
    ) -> None:
        super().__init__(
            local_rank=local_rank,
            global_rank=global_rank,
            world_size=world_size,
            backend=backend,
            init_method=init_method,
            gather_frequency=gather_frequency,
            **more,
        )


@dataclass
class DistributedPreprocessArguments:
    """The place of this process among those that prepare data, for `DataProcessor.multi_process_data`.

    Attributes:
        node_count: machines.
        local_size: processes on each.
        node_rank: the number of this machine; None for `global_rank // local_size`.
    """

    local_rank: int = 0
    global_rank: int = 0
    world_size: int = 1
    node_count: int = 1
    local_size: int = 1
    node_rank: int | None = None


def place_of_this_process() -> DistributedTrainingArguments:
    """The place in the launcher's variables; rank 0 of 1 without a launcher."""
    found = detect_process_info()
    if found is None:
        return DistributedTrainingArguments()
    return DistributedTrainingArguments(local_rank=found.local_rank, global_rank=found.rank, world_size=found.size)


__all__ = ["DistributedPreprocessArguments", "DistributedTrainingArguments", "place_of_this_process", "rank_zero_only"]
