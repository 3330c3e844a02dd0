"""The loop must not read the device, collect unused outputs, or grow faster than the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import trainstack as ts
from tests.helpers.costs import cpu_s, least_ratio
from tests.helpers.modules import Classifier, arguments, numbers
from trainstack.backends import fast_paths

READERS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")


class CountsReads(TorchDispatchMode):
    """Counts conversions of a tensor into a Python number, below and above the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@contextmanager
def reads_counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountsReads]:
    counter = CountsReads()
    with monkeypatch.context() as patch:
        for name in READERS:
            original = getattr(torch.Tensor, name)

            def read(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
                counter.count += 1
                return _original(self, *args, **kwargs)

            patch.setattr(torch.Tensor, name, read)
        with counter:
            yield counter


class ReadsPerStep(Classifier):
    """Records the number of reads until the end of each step."""

    counter: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reads: list[int] = []

    def on_end_train_step(self, global_step: int, *outputs: Any) -> None:
        self.log("loss", outputs[0].mean())
        self.reads.append(self.counter.count)


@pytest.mark.spec("F124", "F125", "PMT-25")
@pytest.mark.parametrize("backend", ["sp", "sp-bf16"])
@pytest.mark.parametrize("limit", [8, 4])
def test_nothing_is_read_back_between_log_points(
    backend: str, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With bar, history, writers, hook, logged values and clipping: reads happen at steps 10, 20, 30 only.

    Gradient norms and losses on the CPU are usually read at once, which waits for nothing. The test turns this off.
    """
    monkeypatch.setattr(fast_paths, "MOST_ON_HOST", 0.0)
    monkeypatch.setattr(fast_paths, "READS_ON_HOST", False)
    module = ReadsPerStep(numbers(8 * 40), scheduler=True)
    trainer = ts.Trainer(
        module,
        arguments(
            tmp_path,
            backend=backend,
            gpu_batch_size_limit=limit,
            log_every=10,
            writers=["csv", "stdout"],
            progress="plain",
        ),
    )
    with reads_counted(monkeypatch) as counter:
        module.counter = counter
        trainer.train()

    assert [step for step, (a, b) in enumerate(pairwise(module.reads), start=1) if b > a] == [10, 20, 30]


class TwoOptimizers(ReadsPerStep):
    def get_optimizers_schedulers(self, *sizes: Any) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net[0], self.net[3])], []

    def on_end_train_step(self, global_step: int) -> None:
        self.reads.append(self.counter.count)


@pytest.mark.parametrize("clip_grads", [True, False])
def test_amp_reads_one_number_a_step_for_two_optimizers(
    clip_grads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_paths, "MOST_ON_HOST", 0.0)
    monkeypatch.setattr(fast_paths, "READS_ON_HOST", False)
    module = TwoOptimizers(numbers(8 * 6))
    trainer = ts.Trainer(module, arguments(tmp_path, backend="sp-amp", clip_grads=clip_grads, log_every=100))
    with reads_counted(monkeypatch) as counter:
        module.counter = counter
        trainer.train()

    assert [b - a for a, b in pairwise(module.reads)] == [1] * 5


def test_the_counter_counts_each_kind_of_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with reads_counted(monkeypatch) as counter:
        value = torch.ones(2).sum()
        before = counter.count
        value.item(), float(value), bool(value > 0), torch.ones(2).tolist()

    assert before == 0
    assert counter.count >= 4


@pytest.mark.spec("F123", "PMB-05")
def test_collecting_validation_outputs_takes_linear_time(tmp_path: Path) -> None:
    def cost(batches: int) -> Callable[[], float]:
        trainer = ts.Trainer(Evaluated(batches), arguments(tmp_path, val_batch_size=1))
        assert trainer.validate()["default"][0].shape == (batches, 32)
        return lambda: cpu_s(trainer.validate)

    assert least_ratio(cost(4000), cost(1000), 5) <= 5


class Evaluated(Classifier):
    def __init__(self, count: int) -> None:
        super().__init__(numbers(count), validate=True)

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return batch[0].new_zeros(len(batch[0]), 32)


@pytest.mark.spec("PMB-09")
def test_nothing_is_collected_that_no_hook_reads(tmp_path: Path) -> None:
    for module, collects in ((Classifier(), False), (OnlyStep(), False), (ReadsEpoch(), True)):
        trainer = ts.Trainer(module, arguments(tmp_path))
        trainer.train()
        assert (trainer._ready().loop.epoch_outputs is not None) is collects

    assert ReadsEpoch.shape == (6,)


class OnlyStep(Classifier):
    def on_end_train_epoch(self, global_step: int) -> None:
        assert global_step == 6


class ReadsEpoch(Classifier):
    shape: Any = None

    def on_end_train_epoch(self, global_step: int, losses: torch.Tensor) -> None:
        ReadsEpoch.shape = tuple(losses.shape)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["sp", "sp-bf16"])
def test_no_step_waits_for_a_gpu_between_log_points(backend: str, tmp_path: Path) -> None:
    class Watched(Classifier):
        def on_end_train_step(self, global_step: int) -> None:
            last = global_step == self.plan.total_steps  # the epoch's end reads its losses
            if global_step > 2:  # the first steps create handles of CUDA libraries
                torch.cuda.set_sync_debug_mode("default" if last else "error")

    module = Watched(dataset=numbers(96))
    try:
        ts.Trainer(module, arguments(tmp_path, backend=backend, device="cuda", log_every=1000)).train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
