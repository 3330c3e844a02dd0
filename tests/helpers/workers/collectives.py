"""Exchanges of processes: gathered outputs, printed lines, and the number of collectives."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers
from tests.helpers.pretended_gpu import pretended_gpu
from tests.helpers.workers import RANK
from trainstack.backends.processes.packing import broadcast_coalesced


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


_DTYPES = (torch.float32, torch.float32, torch.float64)


def gathered() -> Any:
    """The results of `gather` for uneven and nested values."""
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
    """The numbers of all-reduces and other collectives of a run."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    reduced = 0

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations and wants its own
        nonlocal reduced
        reduced += 1
        return default_hooks.allreduce_hook(state, bucket)

    module = Classifier(numbers(8 * 40))
    made: dict[str, Any] = {"log_every": 100, "gpu_batch_size_limit": 4 // accumulation}
    made["backend_options"] = {"ddp": {"comm_hook": hook}}
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


_BUFFER_DTYPES = (
    torch.float32,
    torch.int64,
    torch.int16,
    torch.bool,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.uint32,
)


def _buffers(rank: int) -> list[torch.Tensor]:
    """50 buffers of many kinds, with other values on each rank."""
    dense = [torch.full((i % 5, 3), rank + i % 2 + 1.0).to(_BUFFER_DTYPES[i % 7]) for i in range(42)]
    odd = [
        torch.tensor(float(rank)),
        torch.full((4, 6), float(rank)).t(),
        torch.full((4, 6), float(rank))[:, ::2],
        torch.full((3,), complex(rank, 1)).conj(),
        torch.full((3,), float(rank), dtype=torch.complex128),
        torch.full((2, 2), float(rank))[:, None].transpose(0, 2),
    ]
    return [*dense, *odd, torch.eye(3 + rank)[:3, :3].to_sparse() * (rank + 1), torch.ones(1 << 18) * rank]


def coalesced() -> dict[str, Any]:
    """50 buffers in one broadcast of dense bytes, and those too large for a bucket or sparse."""
    stack = ts.build_trainer_backend("ddp")
    world = stack.open("cpu")
    mine, first = _buffers(world.rank), _buffers(0)
    strides = [one.stride() for one in mine if one.layout is torch.strided]
    with (
        mock.patch("trainstack.backends.processes.packing._BUCKET_BYTES", 1 << 19),
        mock.patch.object(
            type(world.comm), "broadcast_", autospec=True, side_effect=type(world.comm).broadcast_
        ) as sent,
    ):
        broadcast_coalesced(world, mine)
    stack.close()
    return {
        "sent": [str(call.args[1].dtype) for call in sent.call_args_list],
        "equal": [torch.equal(one.to_dense(), other.to_dense()) for one, other in zip(mine, first, strict=True)],
        "strides": strides == [one.stride() for one in mine if one.layout is torch.strided],
    }


class _ManyBuffers(Classifier):
    def __init__(self) -> None:
        super().__init__(numbers(8), validate=True)
        for i in range(50):
            self.register_buffer(f"b{i}", torch.full((2,), float(i)))

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        for name, buffer in self.named_buffers():
            buffer += RANK + 1 + len(name)
        return super().train_step(global_step, batch, device)


def evaluation_broadcasts() -> dict[str, Any]:
    """The broadcasts of tensors as an evaluation begins, and the buffers in it."""
    trainer = ts.Trainer(module := _ManyBuffers(), arguments("unused", backend="ddp"))
    trainer.train()
    stack, work = trainer.trainer_backend, trainer._ready().loop.work
    for buffer in module.buffers():
        buffer += RANK
    broadcast = dist.broadcast
    with mock.patch.object(dist, "broadcast", side_effect=broadcast) as sent:
        stack.begin_evaluation(work)
    total = sum(float(buffer.sum()) for buffer in module.buffers())
    stack.end_evaluation(work)
    trainer.close()
    return {"sent": sent.call_count, "total": total}


def selected() -> dict[str, Any]:
    """The current device of a rank of `ddp` on devices that it pretends to have, while it is open and afterwards."""
    stack = ts.build_trainer_backend("ddp")
    with pretended_gpu() as gpu, mock.patch.object(dist, "get_default_backend_for_device", return_value="gloo"):
        world = stack.open("cuda")
        joined = [index for name, index in gpu.calls if name == "set in thread"]
        found = {"device": str(world.device), "open": gpu.index, "joined": joined}
        stack.close()
        return found | {"closed": gpu.index}


class Strided(Classifier):
    """A buffer and predictions with one element, which is not next to another one in memory."""

    def __init__(self, count: int = 17) -> None:
        super().__init__(numbers(count), validate=True)
        self.register_buffer("factor", torch.tensor([[0.5, 2.0]])[:, 0])

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return super().train_step(global_step, batch, device) * self.factor.sum()

    def predict_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.net(batch[0])[:, 0]


def strided(folder: str) -> list[float]:
    """Train, save, and predict; the last batch has one sample."""
    saving = ts.DefaultCheckpointerArguments(every_n_steps=1)
    args = arguments(folder, backend="ddp", val_batch_size=8, checkpointer_args=saving, record="full")
    trainer = ts.Trainer(module := Strided(), args)
    trainer.train()
    found: list[float] = trainer.predict(module.dataset).tolist()
    trainer.trainer_backend.close()
    return found
