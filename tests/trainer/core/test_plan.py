"""Step arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers
from trainstack.trainer.callbacks import LimitBatches
from trainstack.trainer.core.order import DataOrder
from trainstack.trainer.data.step_batches import CustomOrderSource

sizes = st.fixed_dictionaries(
    {
        "dataset_length": st.integers(1, 300),
        "world_size": st.integers(1, 5),
        "per_process": st.integers(1, 40),
        "gpu_batch_size_limit": st.integers(1, 50),
        "drop_last": st.booleans(),
        "max_steps_per_epoch": st.none() | st.integers(1, 20),
    }
)


def make(per_process: int, world_size: int, **rest: object) -> ts.TrainingPlan:
    return ts.TrainingPlan.make(train_batch_size=per_process * world_size, world_size=world_size, **rest)  # type: ignore[arg-type]


@given(sizes)
@pytest.mark.spec("PMT-18", "PMT-19", "F106")
def test_a_step_has_the_fewest_micro_batches_within_the_limit(size: dict[str, object]) -> None:
    plan = make(**size)  # type: ignore[arg-type]
    limit = size["gpu_batch_size_limit"]
    assert isinstance(limit, int)

    sizes = [len(part) for part in torch.arange(plan.process_batch).split(plan.micro_batch)]
    assert max(sizes) == plan.micro_batch <= limit
    assert len(sizes) == plan.accumulation == math.ceil(plan.process_batch / limit)
    assert sizes[-1] == plan.last_micro_batch > 0
    assert plan.accumulation == 1 or plan.micro_batch > limit / 2, "no step is cut into tiny parts"


@pytest.mark.parametrize(
    ("batch", "limit", "parts"),
    [(1109, 512, [370, 370, 369]), (1021, 512, [511, 510]), (514, 512, [257, 257]), (31, 12, [11, 11, 9])],
)
def test_micro_batches_need_not_divide_the_batch(batch: int, limit: int, parts: list[int]) -> None:
    plan = ts.TrainingPlan.make(train_batch_size=batch, gpu_batch_size_limit=limit, dataset_length=batch)
    (share,) = DataOrder(length=batch, global_batch=batch, micro_batch=plan.micro_batch).local_batches(0)

    assert [len(part) for part in share.micro_batches] == parts
    assert (plan.accumulation, plan.batches_per_epoch) == (len(parts), len(parts))
    unlimited = ts.TrainingPlan.make(train_batch_size=batch)
    assert (unlimited.micro_batch, unlimited.accumulation) == (batch, 1)


@given(sizes)
@pytest.mark.spec("PMT-05", "FN-24", "F104")
def test_the_plan_agrees_with_the_order(size: dict[str, object]) -> None:
    plan = make(**size)  # type: ignore[arg-type]
    orders = [
        DataOrder(
            length=size["dataset_length"],  # type: ignore[arg-type]
            global_batch=plan.global_batch,
            micro_batch=plan.micro_batch,
            world_size=plan.world_size,
            rank=rank,
            drop_last=bool(size["drop_last"]),
        )
        for rank in range(plan.world_size)
    ]
    shares = [list(order.local_batches(epoch=0)) for order in orders]
    steps = len(shares[0])
    cap = size["max_steps_per_epoch"]

    assert plan.steps_per_epoch == (steps if cap is None else min(steps, cap))  # type: ignore[type-var]
    assert sum(share.samples for share in shares[0]) == plan.samples_per_epoch
    if steps:
        assert shares[0][-1].samples == plan.last_step_samples
    seen = [i for rank in shares for share in rank for batch in share.micro_batches for i in batch.tolist()]
    assert len(seen) == len(set(seen)) == plan.samples_per_epoch
    for step in range(steps):
        in_step = [sum(map(len, rank[step].micro_batches)) for rank in shares]
        assert sum(in_step) == shares[0][step].samples
        assert max(in_step) - min(in_step) <= 1, "the processes share evenly"
        assert max(map(len, (rank[step].micro_batches for rank in shares))) <= plan.accumulation


@given(
    st.fixed_dictionaries(
        {
            "loader_length": st.integers(0, 200),
            "world_size": st.integers(1, 5),
            "per_process": st.integers(1, 40),
            "gpu_batch_size_limit": st.integers(1, 50),
        }
    )
)
@pytest.mark.spec("PMT-05", "FN-24")
def test_the_plan_agrees_with_a_loader_of_custom_order(size: dict[str, int]) -> None:
    plan = make(**size)
    batches = range(size["loader_length"])
    steps = []
    for rank in range(plan.world_size):
        source = CustomOrderSource(batches, plan.accumulation, lambda _: 1.0, rank, plan.world_size)
        steps.append(sum(bool(list(step.micro_batches)) for step in source.iter_steps(0, 0, 0)))
    assert steps == [plan.steps_per_epoch] * plan.world_size
    assert plan.batches_per_epoch == size["loader_length"]
    assert max(steps) <= plan.estimated_global_steps_per_epoch


@given(sizes)
@pytest.mark.spec("PMT-20", "F107")
def test_the_estimate_is_an_upper_bound_on_the_exact_number(size: dict[str, object]) -> None:
    plan = make(**size)  # type: ignore[arg-type]

    assert plan.steps_per_epoch is not None
    assert plan.steps_per_epoch <= plan.estimated_global_steps_per_epoch or plan.steps_per_epoch == 0


@pytest.mark.spec("PMT-20", "T6")
def test_the_estimate_has_its_documented_value() -> None:
    plan = ts.TrainingPlan.make(train_batch_size=4, gpu_batch_size_limit=1, world_size=2, loader_length=100)

    assert (plan.micro_batch, plan.accumulation) == (1, 2)
    assert plan.estimated_global_steps_per_epoch == 26


@pytest.mark.spec("PMT-05")
def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ts.ConfigurationError, match=r"train_batch_size=10 .* 4 processes.*train_batch_size=8 or 12"):
        ts.TrainingPlan.make(train_batch_size=10, gpu_batch_size_limit=8, world_size=4)


@pytest.mark.spec("PMT-18", "T2", "T3")
@pytest.mark.parametrize(("limit", "micro", "accumulation"), [(1000, 6, 1), (3, 3, 2), (4, 3, 2), (1, 1, 6)])
def test_the_trainer_has_the_sizes_of_the_plan(limit: int, micro: int, accumulation: int, tmp_path: object) -> None:
    trainer = ts.Trainer(
        Classifier(), arguments(tmp_path, train_batch_size=6, gpu_batch_size_limit=limit, val_batch_size=8)
    )

    assert trainer.train_step_batch_size == micro
    assert trainer.gradient_accumulation == accumulation
    assert trainer.val_step_batch_size == 8


class Hungry(Classifier):
    """Runs out of memory beyond 3 samples a forward pass."""

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        self.validated_by = batch_size

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        if len(batch[0]) > 3:
            raise torch.OutOfMemoryError("no memory for so many")
        return super().train_step(global_step, batch, device)


def sizes_of(trainer: ts.Trainer, module: Hungry) -> tuple[int, int, int]:
    """Samples of a step, samples of a micro-batch and micro-batches of a step, after a check that all places agree."""
    by_name = (trainer.pergpu_global_batch_size, trainer.train_step_batch_size, trainer.gradient_accumulation)
    plan, val_dataloaders = trainer.plan, trainer.view.val_dataloaders
    assert by_name == (plan.process_batch, plan.micro_batch, plan.accumulation)
    assert plan.process_batch == plan.micro_batch * (plan.accumulation - 1) + plan.last_micro_batch
    assert trainer.view.batches_per_step == plan.accumulation
    assert module.plan is plan
    assert not val_dataloaders
    assert module.validated_by == trainer.val_step_batch_size == plan.micro_batch
    return by_name


@pytest.mark.slow
@pytest.mark.spec("PMT-18", "PMT-19")
@pytest.mark.parametrize("limited", [False, True])
def test_all_attributes_give_the_same_sizes_after_fitting(limited: bool, tmp_path: object) -> None:
    callbacks = [LimitBatches(train=2)] if limited else []
    args = arguments(tmp_path, train_batch_size=16, fit_micro_batch=True, val_batch_size=None)
    module = Hungry()
    trainer = ts.Trainer(module, args, callbacks=callbacks)
    assert (trainer.train_step_batch_size, trainer.gradient_accumulation) == (16, 1)
    assert sizes_of(trainer, module) == (16, 16, 1)
    trainer.train()
    assert sizes_of(trainer, module) == (16, 2, 8)
    trainer.train(epochs=2)
    assert sizes_of(trainer, module) == (16, 2, 8)
    assert trainer.plan.epochs == trainer.view.epochs == trainer.args.epochs == 2
    assert trainer.plan.steps_per_epoch == trainer.view.steps_per_epoch == (2 if limited else 3)
    assert trainer.state.batches == (2 * 2 * 8 if limited else 2 * (8 + 8 + 5))


def test_with_micro_batch_equals_a_plan_with_that_limit() -> None:
    made = [
        ts.TrainingPlan.make(
            train_batch_size=12, gpu_batch_size_limit=limit, world_size=2, epochs=3, dataset_length=41, max_steps=5
        )
        for limit in (6, 4, 1)
    ]
    assert [made[0].with_micro_batch(limit) for limit in (6, 4, 1)] == made


@pytest.mark.spec("PMT-21", "F103")
def test_a_cap_in_global_steps_fetches_no_further_batch(tmp_path: object) -> None:
    module = Classifier(Counting(), num_workers=0)
    trainer = ts.Trainer(
        module, arguments(tmp_path, train_batch_size=8, gpu_batch_size_limit=4, max_train_steps_per_epoch=2, epochs=3)
    )
    trainer.train()

    assert trainer.global_steps_finished == 6
    assert module.dataset.fetched == 3 * 16


class Counting:
    def __init__(self) -> None:
        self.base, self.fetched = numbers(41), 0

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> object:
        self.fetched += 1
        return self.base[index]


def test_the_plan_is_shown_when_training_starts(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    ts.Trainer(Classifier(), arguments(tmp_path, writers=["stdout"], gpu_batch_size_limit=4)).train()

    shown = capsys.readouterr().out
    assert "8 samples = 1 process x 2 micro-batches x 4" in shown
    assert "6 per epoch (1 sample in the last)" in shown


def test_processes_need_not_divide_a_batch_that_is_drawn() -> None:
    with pytest.raises(ts.ConfigurationError, match="train_batch_size=39 or 42"):
        ts.TrainingPlan.make(train_batch_size=40, world_size=3)
    plan = ts.TrainingPlan.make(
        train_batch_size=40, world_size=3, gpu_batch_size_limit=10, epochs=2, dataset_length=1000, is_sampled=True
    )
    assert (plan.process_batch, plan.accumulation, plan.micro_batch) == (14, 2, 7)
    assert (plan.steps_per_epoch, plan.total_steps) == (25, 50)
    assert plan.estimated_global_steps_per_epoch >= 25
    rows = dict(plan.rows())
    assert rows["batch"] == "40 on average, a new random sample each step; 3 processes, micro-batches of at most 7"
    assert rows["steps"] == "25 per epoch, 50 in 2 epochs", "samples of random size fill no epoch"
