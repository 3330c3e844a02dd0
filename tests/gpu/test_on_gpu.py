"""Behaviour that needs a GPU. `pytest -m gpu` runs all such tests of the tree; without a device they are skipped.

The tests of two processes need two devices. Figures that have to be looked at are printed with `-s`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import trainstack as ts
from tests.helpers.modules import FEATURES, Classifier, arguments, numbers, train, weights
from tests.helpers.processes import run_world
from tests.helpers.workers import gpu as workers
from trainstack.backends import World
from trainstack.backends.single_process import SingleProcess
from trainstack.trainer.evaluation.metrics import MetricPass

DEVICE = "cuda"
MIB = 1 << 20
on_gpu = pytest.mark.gpu
on_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
on_mac = pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs an MPS device")


def keep_busy() -> None:
    """Work of about 50 ms on the device, behind which copies and kernels wait."""
    if torch.cuda.is_available():
        torch.cuda._sleep(100_000_000)


@contextmanager
def waits_counted() -> Iterator[list[str]]:
    """The operations that wait for the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen: list[str] = []
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode("default")
            seen += [str(one.message) for one in caught if "called a synchronizing" in str(one.message)]


# --- copies


class Kept:
    """A metric that keeps its inputs."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def update(self, values: Tensor) -> None:
        self.values.append(values.cpu().clone())

    def compute(self) -> int:
        return len(self.values)

    def reset(self) -> None: ...


class Alone(ts.Communicator):
    pass


@on_gpu
def test_metric_inputs_have_arrived() -> None:
    class Module:
        def metric_inputs(self, outputs: Any, batch: Any) -> Any:
            return (outputs,)

    metric = Kept()
    metrics = MetricPass({"kept": metric}, Module(), World(rank=0, size=2), ts.Stage.VAL, in_parts=True)  # type: ignore[arg-type]
    for i in range(4):
        keep_busy()
        metrics.add(torch.full((1 << 22,), float(i + 1), device=DEVICE), None)
    metrics.results(Alone())
    assert [float(one.sum()) for one in metric.values] == [(i + 1) * float(1 << 22) for i in range(4)]


@on_gpu
@on_two
@pytest.mark.distributed
def test_a_metric_without_a_loss_is_that_of_one_process() -> None:
    one = run_world(1, workers.metric_without_loss, timeout=120)[0]
    assert run_world(2, workers.metric_without_loss, timeout=120) == [pytest.approx(one)] * 2


class Refills(IterableDataset[Any]):
    """Batches of 64 MiB in one pinned buffer, which is filled again as soon as the next one is requested."""

    def __iter__(self) -> Iterator[Any]:
        buffer = torch.empty(8, 2 * MIB).pin_memory() if torch.cuda.is_available() else torch.empty(8, 2 * MIB)
        for i in range(6):
            yield [buffer.fill_(float(i + 1)), torch.zeros(8, dtype=torch.int64)]


class SeesSums(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.sums: list[Tensor] = []

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(Refills(), batch_size=None)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.sums.append(batch[0].mean())
        keep_busy()
        return nn.functional.cross_entropy(self.net(batch[0][:, :FEATURES]), batch[1])


@on_gpu
def test_a_pinned_buffer_may_be_refilled(tmp_path: Path) -> None:
    module = SeesSums()
    train(module, tmp_path, device=DEVICE, log_every=100)
    assert [float(one) for one in module.sums] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


@on_gpu
def test_evaluation_outputs_equal_the_cpu_and_are_fetched_together(tmp_path: Path) -> None:
    class Predicts(Classifier):
        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return {"rows": batch[0] * 2, "label": batch[1], "one": batch[0].sum().bfloat16()}

    def outputs(device: str, count: int) -> tuple[Any, int]:
        module = Predicts(numbers(count), validate=True)
        trainer = ts.Trainer(module, arguments(tmp_path, device=device, val_batch_size=4))
        trainer.validate()
        with waits_counted() as waits:
            found = trainer.validate()["default"]
        return found, len(waits)

    few, many = outputs(DEVICE, 64), outputs(DEVICE, 512)
    print(f"waits of an evaluation: {few[1]} for 16 batches, {many[1]} for 128")
    assert many[1] <= few[1]
    for name, value in outputs("cpu", 512)[0].items():
        assert torch.allclose(many[0][name], value, rtol=1e-2)
        assert many[0][name].device.type == "cpu"


@on_gpu
def test_numbers_of_all_dtypes_are_read_together() -> None:
    values = [torch.tensor(1 / 3).to(DEVICE, dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)]
    values.append(torch.tensor(2**24 + 1, device=DEVICE))
    assert SingleProcess().read(values) == [float(value) for value in values]


# --- the current device, memory, waits


@on_gpu
@on_two
@pytest.mark.distributed
def test_nothing_is_made_on_a_device_that_is_not_used() -> None:
    (found,) = run_world(1, workers.own_device, fresh=True, timeout=120, index=1)
    assert set(found["seen"]) == {1}
    assert (found["reserved"], found["context"]) == (0, False)


@on_gpu
def test_a_checkpoint_needs_no_memory_on_the_device(tmp_path: Path) -> None:
    trainer = ts.Trainer(workers.Large(1024), arguments(tmp_path, device=DEVICE, clip_grads=False))
    trainer.train()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trainer._take_checkpoint()
    peak = torch.cuda.max_memory_allocated() - before
    print(f"a checkpoint of {before / MIB:.0f} MiB took {peak / MIB:.1f} MiB more")
    assert peak < 16 * MIB


@on_gpu
@pytest.mark.distributed
def test_gradients_that_are_views_of_buckets_take_less_memory() -> None:
    peaks = [run_world(1, workers.peak_memory, fresh=True, timeout=120, views=views)[0] for views in (False, True)]
    print(f"peak without views {peaks[0] / MIB:.0f} MiB, with views {peaks[1] / MIB:.0f} MiB")
    assert peaks[1] < peaks[0] - 200 * MIB


class Watched(Classifier):
    """Waits between the end of one step and the end of the next."""

    def __init__(self, count: int, fused: bool) -> None:
        super().__init__(numbers(8 * 12))
        self.count, self.fused, self.seen = count, fused, list[int]()
        self.waits: list[Any] = []

    def get_optimizers_schedulers(self, *sizes: Any) -> Any:
        parts = [self.net[0], self.net[3]] if self.count == 2 else [self.net]
        return [torch.optim.AdamW(part.parameters(), lr=0.1, fused=self.fused) for part in parts], []

    def on_end_train_step(self, global_step: int) -> None:
        self.seen.append(len(self.waits))


@on_gpu
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize(("backend", "expected"), [("sp", 0), ("sp-bf16", 0), ("sp-amp", 1)])
def test_only_amp_waits_for_the_device_in_a_step(
    backend: str, expected: int, optimizers: int, fused: bool, tmp_path: Path
) -> None:
    module = Watched(optimizers, fused)
    with warnings.catch_warnings(record=True) as module.waits:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            train(module, tmp_path, backend=backend, device=DEVICE, log_every=100)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [after - before for before, after in pairwise(module.seen[2:])] == [expected] * 9


@on_gpu
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_on_the_device_skips_the_step(fused: bool, tmp_path: Path) -> None:
    class Overflows(Watched):
        def on_end_backward(self, global_step: int, loss: Any) -> None:
            if global_step == 3:
                self.net[0].weight.grad[0, 0] = float("inf")

    module = Overflows(2, fused)
    trainer = train(module, tmp_path, backend="sp-amp", device=DEVICE)
    assert trainer.state.skipped_steps == 1
    assert torch.isfinite(weights(module)).all()


# --- compiled models


@on_gpu
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_hook_gets_the_outputs_of_replayed_graphs(tmp_path: Path) -> None:
    class Hears(Classifier):
        def __init__(self) -> None:
            super().__init__(numbers(8 * 6), validate=True)
            self.heard: list[Tensor] = []

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            outputs = self.net(batch[0])
            return nn.functional.cross_entropy(outputs, batch[1]), outputs.detach()

        def on_end_train_step(self, global_step: int, losses: Tensor, outputs: Tensor) -> None:
            self.heard.append(outputs.cpu())

        def on_end_train_epoch(self, global_step: int, losses: Tensor, outputs: Tensor) -> None:
            self.epoch = outputs

    plain, replayed = Hears(), Hears()
    for module, compiled in ((plain, False), (replayed, {"mode": "reduce-overhead"})):
        train(module, tmp_path, device=DEVICE, compile=compiled, gpu_batch_size_limit=4)
    for one, other in zip(plain.heard, replayed.heard, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert torch.allclose(plain.epoch, replayed.epoch, atol=1e-5)
    assert torch.equal(torch.cat(replayed.heard), replayed.epoch)


@on_gpu
def test_tf32_is_used_on_request(tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs a device with TF32")
    factors = torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(0)).to(DEVICE)

    class Multiplies(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            self.product = factors[0] @ factors[1]
            return super().train_step(global_step, batch, device)

    exact, errors = factors[0].double() @ factors[1].double(), {}
    for precision in ("highest", "high"):
        module = Multiplies(numbers(8))
        train(module, tmp_path, device=DEVICE, float32_matmul_precision=precision)
        errors[precision] = float((module.product - exact).abs().max())
    assert errors["high"] > 10 * errors["highest"]


# --- several processes


@on_gpu
@on_two
@pytest.mark.distributed
@pytest.mark.parametrize("synchronized", [False, True])
def test_two_gpus_train_alike(synchronized: bool) -> None:
    one = run_world(1, workers.trained, timeout=120, synchronized=synchronized)[0]
    for rank in run_world(2, workers.trained, timeout=120, synchronized=synchronized):
        assert rank == pytest.approx(one, abs=1e-5)


@on_gpu
@on_two
@pytest.mark.distributed
def test_no_rank_steps_with_gradients_that_were_not_reduced() -> None:
    """A rank fails while another one waits for its gradients in nccl. Its kernels return when the group is aborted."""
    for _ in range(20):
        one, other = run_world(2, workers.failure, fresh=True, timeout=120)
        assert (one["error"], other["error"]) == ("PeerError", "ValueError")
        assert one["same"]


# --- MPS


@on_mac
def test_a_run_on_mps_equals_one_on_the_cpu(tmp_path: Path) -> None:
    module = Classifier(numbers(40), validate=True, scheduler=True)
    saving = ts.DefaultCheckpointerArguments()
    trainer = train(module, tmp_path, device="mps", log_every=2, clip_grads=False, checkpointer_args=saving)
    reference = Classifier(numbers(40), validate=True, scheduler=True)
    train(reference, tmp_path / "cpu", clip_grads=False)
    assert trainer.history.get_latest_metric("val/loss") > 0
    moved = torch.cat([parameter.detach().cpu().flatten() for parameter in module.parameters()])
    assert torch.allclose(moved, weights(reference).float(), atol=1e-4)
