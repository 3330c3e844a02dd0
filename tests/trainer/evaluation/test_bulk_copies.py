"""Outputs on a device: copied there at once, fetched a few MiB at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import trainstack as ts
from tests.helpers.modules import FEATURES, Classifier, numbers, train
from trainstack.trainer import torch_settings
from trainstack.trainer.evaluation import collector


class CountsCopies(TorchDispatchMode):
    """Counts copies from one device to another. Here the device is `meta`, whose tensors have shapes and no values."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def collect(outputs: list[Any], **options: Any) -> Any:
    made = ts.OutputCollector(**options)
    for one in outputs:
        made.collect(one)
    return made.all_outputs


def of_shapes(batches: int, rows: int = 4) -> list[Any]:
    return [{"a": torch.ones(rows, 3), "b": (torch.ones(rows, dtype=torch.int64), torch.tensor(1.0))}] * batches


def copies(outputs: list[Any]) -> int:
    with CountsCopies() as counter:
        joined = collect(outputs, device="meta")
    rows = sum(len(one["a"]) for one in outputs)
    assert (joined["a"].shape, joined["a"].device.type) == ((rows, 3), "meta")
    assert (joined["b"][0].shape, joined["b"][0].dtype) == ((rows,), torch.int64)
    assert joined["b"][1].shape == (len(outputs),)
    return counter.count


def test_the_number_of_copies_does_not_depend_on_batches() -> None:
    assert copies(of_shapes(1)) == copies(of_shapes(50)) == 1


def test_outputs_that_wait_on_the_device_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "_BYTES_WAITING", 1000)
    fetched: list[int] = []
    original = collector.pack
    monkeypatch.setattr(
        collector, "pack", lambda tensors: fetched.append(sum(t.nbytes for t in tensors)) or original(tensors)
    )
    copies(of_shapes(50))  # of 84 bytes each
    assert len(fetched) == 5
    assert max(fetched) < 2000
    fetched.clear()
    assert copies(of_shapes(3, rows=100)) == 3 + 2  # each large one is copied alone
    assert max(fetched) < 2000


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat tensors as tensors of another device, with their values."""
    monkeypatch.setattr(collector._Target, "is_elsewhere", lambda self, value: self.device is not None)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    items = one.values() if isinstance(one, dict) else one
    others = other.values() if isinstance(other, dict) else other
    return all(same(a, b) for a, b in zip(items, others, strict=True))


DTYPES = [torch.bool, torch.float64, torch.int16, torch.bfloat16, torch.complex64, torch.float32, torch.uint8]


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("limit", [1, 100, 1 << 20])
def test_collected_values_equal_the_returned_ones(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "_BYTES_WAITING", limit)
    outputs = [
        {
            "x": [torch.arange(3 + i).add(i).to(dtype) for dtype in DTYPES],
            "y": (torch.ones(2, 3).mul(i).t(), torch.tensor(i)),
        }
        for i in range(5)
    ]
    outputs[0]["y"][0].requires_grad_()
    assert same(collect(outputs), collect(outputs, device=None))


@pytest.mark.usefixtures("elsewhere")
def test_memory_that_steps_reuse_is_copied() -> None:
    """The collector must copy a tensor before the step writes to its memory again."""
    buffer, made = torch.zeros(2), ts.OutputCollector()
    for i in range(3):
        made.collect((buffer.fill_(i), buffer[:1]))
    assert [one.tolist() for one in made.all_outputs] == [[0, 0, 1, 1, 2, 2], [0, 1, 2]]


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("limit", [1, 1 << 20])
@pytest.mark.parametrize("is_repeated", [False, True])
def test_outputs_of_a_failed_step_are_removed(limit: int, is_repeated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "_BYTES_WAITING", limit)
    made = ts.OutputCollector()
    made.collect(torch.zeros(1))
    made.mark()
    made.collect(torch.ones(1))
    made.back_to_mark()
    if is_repeated:
        made.collect(torch.full((1,), 2.0))
    assert made.all_outputs[0].tolist() == ([0.0, 2.0] if is_repeated else [0.0])
    made.reset()
    assert made.all_outputs == []


# --- memory of replayed CUDA graphs


class Replayed(nn.Module):
    """Writes each result to the same memory, without a change of the tensor's version."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 3)
        self.register_buffer("memory", torch.zeros(8, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        result, kept = self.linear(x), self.memory
        kept.data[: len(x)] = result.detach()  # type: ignore[index, union-attr]
        return result, kept  # type: ignore[return-value]


class UsesReplayed(Classifier):
    def __init__(self) -> None:
        super().__init__(numbers(16))
        self.net = Replayed()  # type: ignore[assignment]
        self.seen: list[Tensor] = []
        self.right: list[Tensor] = []

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        result, memory = self.net(batch[0])
        self.right.append(memory[:4].clone())
        return nn.functional.cross_entropy(result, batch[1]), memory

    def on_end_train_step(self, global_step: int, losses: Tensor, memories: Tensor) -> None:
        self.seen.append(torch.stack([memories[:4], memories[8:12]]))

    def on_end_train_epoch(self, global_step: int, losses: Tensor, memories: Tensor) -> None:
        self.epoch = memories.view(4, 8, 3)[:, :4]


def uncompiled(model: Any, *, mode: Any = None, options: Any = None) -> Any:
    """A replacement for `torch.compile` that returns the model."""
    return model


@pytest.mark.parametrize(
    "compiled", [{"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}, "by the user"], ids=str
)
def test_outputs_of_replayed_graphs_are_copied(compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", uncompiled)
    module = UsesReplayed()
    if compiled == "by the user":
        compiled, module.net._compiled_call_impl = False, module.net._call_impl
    train(module, tmp_path, compile=compiled, gpu_batch_size_limit=4)
    right = torch.stack(module.right)
    assert torch.equal(torch.cat(module.seen), right)
    assert torch.equal(module.epoch, right)


@pytest.mark.parametrize(
    ("compiled", "reused"),
    [
        (False, False),
        (True, False),
        ({"mode": "max-autotune"}, True),
        ({"mode": "max-autotune-no-cudagraphs"}, False),
        ({"backend": "cudagraphs"}, True),
        ({"options": {"triton.cudagraphs": False}}, False),
    ],
    ids=str,
)
def test_options_that_enable_cuda_graphs_are_recognized(compiled: Any, reused: bool) -> None:
    assert torch_settings.reuses_memory(Classifier(), compiled) is reused
