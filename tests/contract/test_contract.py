"""The contract of every stack. The tests include registered layers automatically."""

from __future__ import annotations

import copy
import functools
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import trainstack as ts
from tests.helpers.modules import Classifier, Noisy, arguments, numbers, train, weights
from tests.helpers.specs import every_stack, every_stack_and_switch
from trainstack.backends.fast_paths import VARIABLE


@pytest.fixture(autouse=True)
def public_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn fast paths off for the stacks that are marked so."""
    if request.node.get_closest_marker("public_calls"):
        monkeypatch.setenv(VARIABLE, "0")


# Sums in half precision depend on the split. The reference is the same stack on the whole batch.
TOLERANCE = {"bf16": 2e-3, "amp": 2e-3, "apex": 2e-3}


@every_stack_and_switch
def test_plan_and_counters_equal_those_of_sp(spec: str, tmp_path: Path) -> None:
    trainer = train(Classifier(), tmp_path, backend=spec, epochs=2, gpu_batch_size_limit=3)
    reference = train(Classifier(), tmp_path, epochs=2, gpu_batch_size_limit=3)

    assert replace(trainer.plan, is_sampled=False) == reference.plan
    if "dp" in spec.split("-"):  # the number of drawn records is secret, so the planned micro-batches count
        planned = trainer.plan.total_steps * trainer.plan.accumulation
        reference.state.batches = planned
    assert trainer.state == reference.state
    assert trainer.global_steps_finished == trainer.plan.total_steps == 12
    assert trainer.state.skipped_steps == 0


@every_stack_and_switch
@pytest.mark.usefixtures("unprobed")
@pytest.mark.spec("PA-08", "PMT-19")
def test_accumulation_equals_the_large_batch(spec: str, tmp_path: Path) -> None:
    whole, parts = Classifier(), Classifier()
    train(whole, tmp_path / "whole", backend=spec, train_batch_size=16, epochs=2)
    train(parts, tmp_path / "parts", backend=spec, train_batch_size=16, epochs=2, gpu_batch_size_limit=4)

    assert (weights(whole) - weights(parts)).abs().max() <= TOLERANCE.get(spec.split("-")[-1], 1e-6)
    assert (weights(whole) - weights(Classifier())).abs().max() > 0.01


@every_stack_and_switch
@pytest.mark.usefixtures("unprobed")
@pytest.mark.spec("F109", "FN-32")
@pytest.mark.parametrize("stop_at", [4, *(pytest.param(step, marks=pytest.mark.long) for step in (1, 6, 7, 11))])
def test_stop_and_resume_equals_an_unbroken_run(spec: str, stop_at: int, tmp_path: Path) -> None:
    """6 steps an epoch: within an epoch, and in `make test-long` at other steps."""
    check_stop_and_resume(spec, stop_at, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("unprobed")
@pytest.mark.spec("F109", "FN-32")
@pytest.mark.parametrize("stop_at", [6, 7])
@pytest.mark.parametrize("spec", ["sp", "sp-dp", "ddp", "fsdp"])
def test_a_resume_at_the_end_of_an_epoch_is_exact(spec: str, stop_at: int, tmp_path: Path) -> None:
    """At the last step of an epoch and at the first of the next, which the other layers do not affect."""
    check_stop_and_resume(spec, stop_at, tmp_path)


def check_stop_and_resume(spec: str, stop_at: int, folder: Path) -> None:
    torch.manual_seed(5)
    saving = ts.DefaultCheckpointerArguments(every_n_steps=stop_at)
    stopped = Stops(stochastic(), arguments(folder, checkpointer_args=saving, backend=spec, **MADE), stop_at)
    with pytest.raises(Stopped):
        stopped.train()
    torch.manual_seed(77)
    resumed = train(stochastic(), folder, checkpointer_args=saving, resume=True, backend=spec, **MADE)

    assert_same(end_of(resumed), unbroken_end(spec, os.environ.get(VARIABLE)))


MADE: dict[str, Any] = {"epochs": 2, "train_batch_size": 8, "gpu_batch_size_limit": 4}


class Draws(Classifier):
    """Draws a number as each epoch begins."""

    scale = 1.0

    def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
        self.scale = 1.0 + torch.rand(1).item()

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return super().train_step(global_step, batch, device) * self.scale


def stochastic() -> Classifier:
    return Draws(Noisy(), dropout=0.3, optimizer=torch.optim.AdamW, lr=0.01, scheduler=True, validate=True)


def end_of(trainer: ts.Trainer) -> dict[str, Any]:
    return {
        "weights": weights(trainer.module),
        "trainer": trainer.get_state(),
        "backend": nameless(trainer.trainer_backend.get_state()),
        "history": trainer.history.get_state(),
    }


@functools.cache
def unbroken_end(spec: str, switch: str | None) -> dict[str, Any]:
    """The end of an unbroken run under `switch`, the value of `VARIABLE`."""
    torch.manual_seed(5)
    with tempfile.TemporaryDirectory() as folder:
        return end_of(train(stochastic(), Path(folder), backend=spec, **MADE))


@every_stack_and_switch
def test_layer_states_survive_a_checkpoint(spec: str, tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments()
    trained = train(Classifier(), tmp_path, backend=spec, checkpointer_args=saving)
    again = ts.Trainer(Classifier(), arguments(tmp_path, backend=spec, checkpointer_args=saving, resume=True))
    assert again.plan == trained.plan

    assert_same(again.trainer_backend.get_state(), trained.trainer_backend.get_state())


@every_stack_and_switch
@pytest.mark.usefixtures("unprobed")
@pytest.mark.spec("F110", "PMB-14")
def test_an_overflowing_step_moves_nothing(spec: str, tmp_path: Path) -> None:
    module = Overflowing(numbers(32), optimizer=torch.optim.AdamW, scheduler=True)
    trainer = train(module, tmp_path, backend=spec, nonfinite="skip", train_batch_size=8)

    if "dp" in spec.split("-"):  # such records count as zero, and their existence is secret
        assert trainer.state.skipped_steps == 0
        assert torch.isfinite(weights(module)).all()
        return
    before, after = module.seen[1], module.seen[2]
    assert torch.equal(before["weights"], after["weights"])
    assert before["lr"] == after["lr"]
    assert not torch.equal(module.seen[2]["weights"], module.seen[3]["weights"])
    assert trainer.state.skipped_steps == 1
    assert trainer.global_steps_finished == 4


@every_stack_and_switch
@pytest.mark.usefixtures("unprobed")
@pytest.mark.spec("HZ-30", "F201", "F412")
def test_validation_does_not_change_training(spec: str, tmp_path: Path) -> None:
    results = []
    for validate in (False, True):
        torch.manual_seed(3)
        module = Classifier(Noisy(), dropout=0.3, validate=validate)
        train(module, tmp_path / str(validate), backend=spec, epochs=2)
        results.append((weights(module), torch.rand(1).item(), module.training))

    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]


@every_stack_and_switch
@pytest.mark.usefixtures("unprobed")
def test_training_and_validation_run_in_the_same_precision(spec: str, tmp_path: Path) -> None:
    module = SeesPrecision(validate=True)
    train(module, tmp_path, backend=spec)

    assert len(module.dtypes) == 1, f"training and validation differ: {module.dtypes}"


@every_stack
@pytest.mark.usefixtures("unprobed")
def test_fast_paths_change_no_bit(spec: str, tmp_path: Path) -> None:
    states = []
    for fast in (True, False):
        torch.manual_seed(3)
        module = Classifier(dropout=0.3, optimizer=torch.optim.AdamW, scheduler=True, validate=True)
        trainer = train(module, tmp_path / str(fast), backend=spec, fast_paths=fast, gpu_batch_size_limit=3)
        states.append([trainer.get_state(), nameless(trainer.trainer_backend.get_state()), trainer.history.get_state()])
        states[-1].append(weights(module))

    assert_same(*states)


# --- helpers ------------------------------------------------------------------------------------------------


class Stopped(Exception):
    """Simulates the end of a process."""


class Stops(ts.Trainer):
    """A trainer whose process ends right after it has written the checkpoint of a step."""

    def __init__(self, module: ts.ModuleInterface, args: ts.TrainerArguments, step: int) -> None:
        super().__init__(module, args)
        self.step = step

    def save_checkpoint(self, force: bool = False) -> None:
        super().save_checkpoint(force)
        if self.state.global_step >= self.step:
            raise Stopped


class Overflowing(Classifier):
    """The gradient of the second step is inf."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: dict[int, dict[str, Any]] = {}

    def get_optimizers_schedulers(self, *args: Any) -> Any:
        made = super().get_optimizers_schedulers(*args)
        self.rates = made[0][0].param_groups
        return made

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        loss = super().train_step(global_step, batch, device)
        return loss * (float("inf") if global_step == 2 else 1.0)

    def on_end_train_step(self, global_step: int) -> None:
        self.seen[global_step] = {"weights": weights(self).clone(), "lr": self.rates[0]["lr"]}


class SeesPrecision(Classifier):
    """Records the dtype of the outputs of its network."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dtypes: set[torch.dtype] = set()
        self.net.register_forward_hook(self._note)

    def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
        self.dtypes.clear()  # a layer may have probed the module before

    def _note(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.dtypes.add(output.dtype)


def nameless(state: dict[str, Any]) -> dict[str, Any]:
    """`state` without the random name under which a private run keeps its account, and without its ledger's path."""
    state = copy.deepcopy(state)
    private = state.get("dp", {"accountant": {}})
    private["accountant"].pop("run", None)
    private.pop("ledger", None)
    return state


def assert_same(one: Any, other: Any, path: str = "state") -> None:
    """Equal to the bit, in any nesting."""
    one, other = copy.copy(one), copy.copy(other)
    assert type(one) is type(other), f"{path}: {type(one)} and {type(other)}"
    if isinstance(one, dict):
        assert list(one) == list(other), f"{path}: {list(one)} and {list(other)}"
        for key in one:
            assert_same(one[key], other[key], f"{path}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for position, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{path}[{position}]")
    elif isinstance(one, DTensor):  # torch does not compare tensors of two meshes
        assert torch.equal(one.to_local(), other.to_local()), path
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    else:
        assert one == other, f"{path}: {one!r} and {other!r}"
