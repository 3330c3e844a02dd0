"""`verify_replay` runs steps twice: it finds nondeterministic steps, and the run keeps its bits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainstack as ts
from tests.helpers.modules import Classifier, numbers, train, weights
from tests.helpers.processes import run_world
from tests.helpers.workers import verified_steps
from tests.helpers.workers.sharded_models import Classifies
from tests.helpers.workers.updates import InTurns
from trainstack.trainer.run.step_verifier import is_chosen

SAME = {"checkpoints": None, "weights": True, "hooks": True, "attributes": True, "logs": True}


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({}, 1),
        ({"gpu_batch_size_limit": 3}, 3),
        ({"backend": "sp-amp"}, 1),
        ({"backend": "sp-bf16", "gpu_batch_size_limit": 3, "nonfinite": "skip"}, 3),
    ],
    ids=str,
)
def test_a_run_whose_steps_run_twice_has_the_same_bits(tmp_path: Path, changes: dict[str, Any], first: int) -> None:
    found = verified_steps.compared(str(tmp_path), **changes)

    assert {**found, **SAME} == found
    plain, verified = found["calls"]
    assert (
        verified == 2 * plain - first
    )  # not in the first step, whose passes are found to change an average of the weights


@pytest.mark.distributed
@pytest.mark.parametrize(
    "changes", [{}, {"gpu_batch_size_limit": 3, "backend": "ddp-bf16"}, {"backend": "fsdp"}], ids=str
)
def test_ranks_run_the_same_steps_twice(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The last step of an epoch has a borrowed micro-batch on one rank."""
    values = {"backend": "ddp", "samples": 41, "epochs": 1, **changes}
    ranks = run_world(2, verified_steps.compared, directory=str(tmp_path), **values)

    for found in ranks:
        assert {**found, **SAME} == found
        assert found["calls"][1] > 1.5 * found["calls"][0]


def test_the_choice_depends_on_seed_and_step_alone() -> None:
    chosen = [step for step in range(1, 10_001) if is_chosen(7, step, 0.01)]

    assert 70 < len(chosen) < 130
    assert chosen != [step for step in range(1, 10_001) if is_chosen(8, step, 0.01)]
    assert all(is_chosen(7, step, 1.0) for step in range(100))


class Faulty(Classifier):
    """Its `train_step` adds something to the loss at global step 3."""

    def __init__(self, add: Callable[[Any], Any], **changes: Any) -> None:
        super().__init__(numbers(40), **changes)
        self.add = add

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        loss = super().train_step(global_step, batch, device)
        return loss + self.add(loss) if global_step == 3 else loss


class _RandomBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * (1 + int.from_bytes(os.urandom(4), "little") * 1e-9)


FAULTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "clock": (lambda loss: time.perf_counter_ns() % 1000003 * 1e-9, "loss"),
    "system": (lambda loss: int.from_bytes(os.urandom(4), "little") * 1e-9, "loss"),
    "backward": (lambda loss: _RandomBackward.apply(loss), "gradient"),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_step_that_is_not_deterministic_stops_the_run(tmp_path: Path, name: str) -> None:
    add, quantity = FAULTS[name]
    module = Faulty(add)
    with pytest.raises(ts.ReplayMismatchError, match="global step 3 was run twice from the same state") as raised:
        train(module, tmp_path, verify_replay=1.0)

    error = raised.value
    assert (error.step, error.rank, error.quantity) == (3, 0, quantity)
    assert error.parameter == "net.0.weight" if quantity == "gradient" else True


def test_a_fault_in_an_unverified_step_is_not_noticed(tmp_path: Path) -> None:
    seed = next(seed for seed in range(100) if is_chosen(seed, 4, 0.5) and not is_chosen(seed, 3, 0.5))

    train(Faulty(FAULTS["clock"][0]), tmp_path, verify_replay=0.5, seed=seed)


def flip_once(module: nn.Module, call: int) -> None:
    """Flip one bit of one number of the output of `module`, in its call with this number."""
    calls = 0

    def hook(part: nn.Module, given: Any, output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls != call:
            return output
        flipped = output.detach().clone()
        flipped.view(torch.int32)[0, 0] ^= 1 << 20
        return output + (flipped - output).detach()

    module.register_forward_hook(hook)


@pytest.mark.parametrize("choice", ["stop", "warn", "record"])
def test_one_flipped_bit_is_found_at_its_step(tmp_path: Path, choice: str, caplog: pytest.LogCaptureFixture) -> None:
    module = Classifier(numbers(40), dropout=0.5)
    flip_once(module.net[0], 2 * 3 * 2 + 1)  # two micro-batches a step, each run twice: the first call of step 4
    values: dict[str, Any] = {"verify_replay": 1.0, "on_replay_mismatch": choice, "gpu_batch_size_limit": 4}
    if choice == "stop":
        with pytest.raises(ts.ReplayMismatchError, match=r"step 4 .* the loss of micro-batch 0 and the gradient"):
            train(module, tmp_path, **values)
        return

    trainer = train(module, tmp_path, **values)

    records = trainer.history.records("train/replay_mismatches")
    assert [record.step for record in records] == [4]
    assert records[0].value >= 2
    assert ("global step 4 was run twice" in caplog.text) == (choice == "warn")


def test_a_mismatch_that_is_recorded_keeps_the_first_result(tmp_path: Path) -> None:
    """The optimizer gets the gradients of the first run."""
    found = []
    for share in (0.0, 1.0):
        module, calls = Classifier(numbers(40)), iter(range(100))
        module.net[0].register_forward_hook(lambda part, given, output, calls=calls: output + next(calls) * 1e-3)
        train(module, tmp_path, verify_replay=share, on_replay_mismatch="record", max_steps=1)
        found.append(weights(module))

    assert torch.equal(*found)


class WritesGradients(Classifier):
    """Its hook, which a second run does not call, writes to gradients after each micro-batch."""

    def on_end_backward(self, global_step: int, loss: Tensor) -> None:
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)  # type: ignore[union-attr]


@pytest.mark.parametrize("limit", [None, 3])
def test_hooks_that_write_gradients_cause_no_mismatch(tmp_path: Path, limit: int | None) -> None:
    plain, verified = WritesGradients(), WritesGradients()
    train(plain, tmp_path / "a", gpu_batch_size_limit=limit)
    train(verified, tmp_path / "b", gpu_batch_size_limit=limit, verify_replay=1.0)

    assert torch.equal(weights(plain), weights(verified))


class CountsTokens(Classifier):
    """Its micro-batches are rescaled within a step, because the number of items is known late."""

    def batch_weight(self, batch: Any) -> float:
        return float(batch[1].sum())


def test_a_flipped_bit_is_found_in_rescaled_micro_batches(tmp_path: Path) -> None:
    module = CountsTokens()
    flip_once(module.net[0], 3 * 2 * 2 + 2)
    trainer = train(module, tmp_path, gpu_batch_size_limit=3, verify_replay=1.0, on_replay_mismatch="record")

    assert [record.step for record in trainer.history.records("train/replay_mismatches")] == [3]


class LateGenerator(Classifier):
    """Makes a generator within its third step."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        if global_step >= 3 and "late" not in vars(self):
            self.late = torch.Generator().manual_seed(1)
        noise = torch.rand(6, generator=self.late) if "late" in vars(self) else 0.0
        return super().train_step(global_step, (batch[0] + noise, batch[1]), device)


def test_a_generator_made_within_a_step_causes_no_mismatch(tmp_path: Path) -> None:
    plain, verified = LateGenerator(), LateGenerator()
    train(plain, tmp_path / "a")
    train(verified, tmp_path / "b", verify_replay=1.0)

    assert torch.equal(weights(plain), weights(verified))


class StepsItself(Classifier):
    """Moves a trained weight within `train_step`."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        with torch.no_grad():
            self.net[0].weight.mul_(0.99)
        return super().train_step(global_step, batch, device)


def test_steps_that_write_weights_are_not_verified(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain, verified = StepsItself(), StepsItself()
    train(plain, tmp_path / "a")
    train(verified, tmp_path / "b", verify_replay=1.0)

    assert torch.equal(weights(plain), weights(verified))
    assert caplog.text.count("has changed 'net.0.weight' within train_step") == 1


@pytest.mark.parametrize(
    "options", [{"activation_checkpointing": True}, {"compile": {"units": True, "backend": "eager"}}]
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo reads it
def test_verification_keeps_the_bits_of_recomputed_and_compiled_blocks(tmp_path: Path, options: dict[str, Any]) -> None:
    made = []
    for share in (0.0, 1.0):
        torch.manual_seed(0)
        module = Classifies("plain")
        module.model.blocks[0].up = nn.Sequential(module.model.blocks[0].up, nn.Dropout(0.3))
        train(module, tmp_path / str(share), verify_replay=share, **options)
        made.append(weights(module))

    assert torch.equal(*made)


def test_steps_that_cannot_run_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ts.ConfigurationError, match="secret stream, and a second pass would draw others"):
        train(Classifier(), tmp_path, backend="sp-dp", verify_replay=0.5)
    with pytest.raises(ts.ConfigurationError, match="train_step that yields"):
        train(InTurns(), tmp_path, verify_replay=0.5)
    hooked = Classifier()
    hooked.net[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ts.ConfigurationError, match=r"'net\.0\.weight' has a hook that is called when its gradient"):
        train(hooked, tmp_path, verify_replay=1.0)
    for wrong in (-0.1, 1.5, True, "all"):
        with pytest.raises(ts.ConfigurationError, match="verify_replay="):
            ts.TrainerArguments(verify_replay=wrong)  # type: ignore[arg-type]
