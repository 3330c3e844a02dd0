"""What processes exchange: gathered outputs, printed lines, and the number of collectives."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers
from tests.helpers.workers import RANK


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


_DTYPES = (torch.float32, torch.float32, torch.float64)


def gathered() -> Any:
    """What `gather` makes of uneven and nested things."""
    stack = ts.build_trainer_backend("ddp", ddp={"gather_frequency": 2})
    world = stack.open("cpu")
    mine = torch.arange(world.rank * 3, dtype=torch.float64).reshape(-1, 3)
    joined = stack.gather(
        {
            "rows": mine + 10 * world.rank,
            "flags": mine[:, 0] > 0,
            "scalar": torch.tensor(world.rank),
            "text": [world.rank],
        }
    )
    nothing = stack.gather([] if world.rank != 1 else [torch.ones(2), ["a"]])
    pair = stack.gather(Pair(torch.tensor([world.rank], dtype=torch.uint16), torch.ones(1, 0)))
    refused = []
    for odd in (torch.ones(2, 3 + world.rank % 2), {"b": mine} if world.rank else {"a": mine}, mine.to(_DTYPES[RANK])):
        try:
            stack.gather(odd)
        except ts.ModuleContractError as error:
            refused.append(str(error))
    stack.close()
    joined |= {"pair": [pair.first.tolist(), list(pair.second.shape)], "refused": refused}
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in joined.items()} | {
        "nothing": [nothing[0].tolist(), nothing[1]]
    }


def together() -> Any:
    """`trainer.gather` and `trainer.print`."""
    import io

    trainer = ts.Trainer(Classifier(), arguments("unused", backend="ddp"))
    joined = trainer.gather({"rows": torch.full((trainer.world.rank + 1,), float(trainer.world.rank))})
    with contextlib.redirect_stdout(io.StringIO()) as out:
        trainer.print("said", 1)
        trainer.print("node", once="node")
    return {"rows": joined["rows"].tolist(), "printed": out.getvalue()}


def all_reduces(accumulation: int) -> dict[str, int]:
    """How many all-reduces and other collectives a run needs."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    reduced = 0

    class Counted(Classifier):
        def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
            def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations and wants its own
                nonlocal reduced
                reduced += 1
                return default_hooks.allreduce_hook(state, bucket)

            trainer._ready().loop.work.model.register_comm_hook(None, hook)

    module = Counted(numbers(8 * 40))
    made: dict[str, Any] = {"log_every": 100, "gpu_batch_size_limit": 4 // accumulation}
    trainer = ts.Trainer(module, arguments("unused", backend="ddp", **made))
    names = ("all_reduce", "all_gather_object", "all_gather", "broadcast", "barrier", "broadcast_object_list")
    with contextlib.ExitStack() as patches:
        counts = {
            name: patches.enter_context(mock.patch.object(dist, name, side_effect=getattr(dist, name)))
            for name in names
        }
        trainer.train()
    spent = {name: counted.call_count for name, counted in counts.items()}
    return {"buckets": reduced, "steps": trainer.global_steps_finished, **spent}
