"""Memory that runs out in the middle of training: the step is made again in smaller parts, with the same result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainstack as ts
from tests.helpers.modules import Classifier, Noisy, arguments, numbers, train, weights

SAVING = ts.DefaultCheckpointerArguments()
TOO_MUCH = 1 << 60
"""Bytes that no machine has: asking for them fails as memory that has run out does."""


class Hungry(Classifier):
    """From some step on no more than `most` samples fit into a pass. It draws, keeps statistics, and logs."""

    def __init__(self, most: int = 99, since: int = 1, **changes: Any) -> None:
        data = {"dataset": numbers(40), "dropout": 0.3, "optimizer": torch.optim.AdamW}
        super().__init__(**{**data, **changes})
        self.net.append(nn.BatchNorm1d(3))
        self.most, self.since = most, since
        self.sizes: list[int] = []

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.sizes.append(len(batch[0]))
        self.log("size", len(batch[0]))
        outputs = self.net(batch[0])
        if len(batch[0]) > self.most and global_step >= self.since:
            self.log("wasted", 1.0)
            torch.empty(TOO_MUCH, dtype=torch.uint8)
        return nn.functional.cross_entropy(outputs, batch[1])


def everything(trainer: ts.Trainer) -> tuple[Tensor, Tensor, Any, Any]:
    buffers = torch.cat([b.double().flatten() for b in trainer.module.buffers()])
    return weights(trainer.module), buffers, trainer.history.to_dict(), torch.get_rng_state().tolist()


def assert_same_bits(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    assert one[2:] == other[2:]


@pytest.mark.parametrize("backend", ["sp", "sp-amp", "sp-bf16"])
@pytest.mark.parametrize("loader", [{}, {"num_workers": 1, "persistent_workers": True}], ids=["host", "worker"])
def test_the_run_is_to_the_bit_the_one_that_was_split_so_from_that_step_on(
    backend: str, loader: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if loader and backend != "sp":
        pytest.skip("how samples are loaded does not depend on the precision")
    changes: dict[str, Any] = {"backend": backend, "log_every": 1, "checkpointer_args": SAVING}
    torch.manual_seed(1)
    train(Hungry(dataset=Noisy(40), **loader), tmp_path / "split", max_steps=8, **changes)
    changes |= {"epochs": 3}
    module = Hungry(dataset=Noisy(40), **loader)
    split = train(module, tmp_path / "split", resume=True, gpu_batch_size_limit=2, **changes)
    expected = everything(split)

    torch.manual_seed(1)
    module = Hungry(most=3, since=9, dataset=Noisy(40), **loader)
    refitted = train(module, tmp_path / "refitted", fit_micro_batch="always", **changes)

    assert_same_bits(everything(refitted), expected)
    assert module.sizes[9:14] == [8, 4, 2, 2, 2]  # the first is the trial; step 9 is made three times
    assert (refitted.plan.micro_batch, refitted.plan.accumulation, module.plan) == (2, 4, refitted.plan)
    said = [record.message for record in caplog.records if "memory ran out" in record.message]
    assert [text.partition(",")[0] for text in said] == ["memory ran out in global step 9"] * 2
    assert "into 4 micro-batches of 2 instead of 4, with the same result" in said[-1]


def test_what_micro_batches_gave_before_the_one_that_failed_is_taken_back(tmp_path: Path) -> None:
    collected: list[Tensor] = []

    class Collects(Hungry):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if len(self.sizes) % 2:  # the trial, and each second micro-batch
                self.most = 4 if global_step < 4 else 3
            loss = super().train_step(global_step, batch, device)
            self.most = 99
            return loss, batch[0]

        def on_end_train_epoch(self, global_step: int, *outputs: Any) -> None:
            collected.append(outputs[1])

    module = Collects(dropout=0.0)
    trainer = train(module, tmp_path, fit_micro_batch="always", gpu_batch_size_limit=4, log_every=1)

    assert 4 in module.sizes
    assert 2 in module.sizes
    rows = sorted(map(tuple, collected[0].tolist()))
    assert rows == sorted(map(tuple, module.dataset.tensors[0].tolist()))
    assert sum(trainer.history.get_metric_values("size")) == 40
    assert "wasted" not in trainer.history.get_metric_names()


def test_a_step_that_does_not_fit_in_single_samples_is_an_error_that_says_where(tmp_path: Path) -> None:
    module = Hungry(most=0, since=3)
    del module.net[-1]  # a batch norm has no use for a single sample
    with pytest.raises(RuntimeError, match="allocate") as caught:
        train(module, tmp_path, fit_micro_batch="always")
    notes = "\n".join(caught.value.__notes__)
    assert "in epoch 0, global step 3, micro-batch 0 of 8, with the samples " in notes


def test_without_being_asked_for_nothing_is_made_again(tmp_path: Path) -> None:
    module = Hungry(most=3, since=3)
    with pytest.raises(RuntimeError, match="allocate"):
        train(module, tmp_path, fit_micro_batch=True)
    assert module.sizes == [8, 8, 8, 8]


def test_a_step_that_has_moved_weights_before_it_failed_is_not_made_again(tmp_path: Path) -> None:
    class Moves(Hungry):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            with torch.no_grad():
                self.net[0].weight.mul_(0.5)
            return super().train_step(global_step, batch, device)

    with pytest.raises(RuntimeError, match="allocate"):
        train(Moves(most=3, since=3), tmp_path, fit_micro_batch="always")


def test_an_error_that_is_none_of_memory_goes_through(tmp_path: Path) -> None:
    class Broken(Hungry):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if global_step == 3:
                raise RuntimeError("something else")
            return super().train_step(global_step, batch, device)

    with pytest.raises(RuntimeError, match="something else"):
        train(Broken(), tmp_path, fit_micro_batch="always")


def test_layers_that_cannot_take_back_a_failed_pass_are_refused(tmp_path: Path) -> None:
    class Custom(ts.AbstractTrainerBackendDecorator):
        name = "custom"

    trainer = ts.Trainer(Hungry(), arguments(tmp_path, fit_micro_batch="always"), Custom(ts.SingleProcess()))
    with pytest.raises(ts.ConfigurationError, match=r"fit_micro_batch='always'.*the layer 'custom' cannot take back"):
        trainer.train()
    retried = {spec for spec in ts.legal_specs() if all(r.layer.leaves_no_trace for r in ts.parse_spec(spec))}
    assert retried == {"sp", "sp-amp", "sp-bf16"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_of_a_gpu_that_runs_out_in_a_backward_pass(tmp_path: Path) -> None:
    class Large(Classifier):
        """Later steps keep 32 times as much for the backward pass."""

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            width = 1 << (25 if global_step >= 3 else 20)
            factor = torch.ones(width, device=device)
            wide = self.net(batch[0]).mean(1, keepdim=True) * factor
            return wide.sin().square().mean()

    most = 2 << 30
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(most / total)
    try:
        plain = train(Large(), tmp_path, gpu_batch_size_limit=1, device="cuda")
        trainer = train(Large(), tmp_path, fit_micro_batch="always", device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert trainer.plan.micro_batch < 8
    assert torch.cuda.max_memory_allocated() <= most
    assert torch.allclose(weights(trainer.module), weights(plain.module), atol=1e-5)
