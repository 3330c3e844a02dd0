"""Probes of plain attributes do not change the current step, and find those that carry records into later steps."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import trainstack as ts
from tests.backends.dp.test_sealed_state import BATCH, STEPS, WIDTH, Gradients, Net, private_trainer, slow_mean, sums_of
from tests.helpers.modules import arguments
from trainstack.backends.dp.sealed import attribute_watch
from trainstack.errors import PrivacyError


class Counts(Net):
    """Counts its forward passes."""

    calls = 0

    def remember(self, step: int, x: Tensor) -> None:
        self.calls += 1


def small_batches(directory: Any, module: ts.ModuleInterface) -> list[Tensor]:
    seen = Gradients()
    private = ts.DifferentialPrivacyArguments(delta=1e-4, noise_multiplier=0.0, debug_seed=7, accountant="rdp")
    args = arguments(
        directory,
        backend="sp-dp",
        differential_privacy_args=private,
        epochs=1,
        train_batch_size=BATCH,
        gpu_batch_size_limit=4,
        writers=[],
    )
    ts.Trainer(module, args, callbacks=[seen]).train()
    return seen.sums


def test_a_probe_keeps_the_sums_of_earlier_micro_batches(tmp_path: Any) -> None:
    plain, counted = small_batches(tmp_path / "plain", Net(0.5)), small_batches(tmp_path / "counts", Counts(0.5))
    for one, other in zip(plain, counted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("clipping", ["flat", "adaptive"])
def test_a_probe_leaves_telemetry_alone(clipping: Any, tmp_path: Any) -> None:
    telemetry = {"loss": (0.0, 5.0), "grad_norm": (0.1, 1.0)}
    found = sums_of(tmp_path, Counts(0.5), grad_mode="auto", telemetry=telemetry, clipping=clipping)
    assert len(found) == STEPS


class RunningAccuracy(Net):
    right = total = 0

    def train_step(self, global_step: int, batch: Any, device: torch.device) -> Any:
        scores = self.net(batch[0])
        if global_step >= 3:
            self.right += float((scores.argmax(1) == batch[1]).sum())
            self.total += len(batch[1])
        loss = cross_entropy(scores, batch[1])
        return {"loss": loss, "accuracy": torch.full((len(batch[1]),), self.right / max(1, self.total))}


def test_telemetry_of_earlier_records_is_refused(tmp_path: Any) -> None:
    with pytest.raises(PrivacyError, match="right, total changed in the course of training"):
        sums_of(tmp_path, RunningAccuracy(0.5), telemetry={"accuracy": (0.0, 1.0)})


class FirstMean(Net):
    """Centres by the records of its first forward pass."""

    begins = 1

    def remember(self, step: int, x: Tensor) -> None:
        if step >= self.begins and self.kept is None:
            self.kept = x.mean(0)


@pytest.mark.parametrize("mode", ["auto", "loop"])
def test_an_attribute_that_a_forward_pass_sets_is_never_released(mode: str, tmp_path: Any) -> None:
    seen = Gradients()
    with pytest.raises(PrivacyError, match="gradients of other records change"):
        private_trainer(tmp_path / "1", FirstMean(0.5), [seen], grad_mode=mode).train()
    assert not seen.sums
    late = FirstMean(0.5)
    late.begins = 2
    with pytest.raises(PrivacyError, match="kept changed in the course of training"):
        private_trainer(tmp_path / "2", late, [seen], grad_mode=mode).train()
    assert len(seen.sums) == 1


class LateMean(Net):
    def remember(self, step: int, x: Tensor) -> None:
        if step >= STEPS:
            self.kept = slow_mean(self.kept, x)


def test_the_last_step_is_checked_too(tmp_path: Any) -> None:
    with pytest.raises(PrivacyError, match="kept changed"):
        sums_of(tmp_path, LateMean(0.5))


class WritesIntoList(Net):
    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.kept = [0.0]

    def remember(self, step: int, x: Tensor) -> None:
        if step >= STEPS:
            self.kept[0] += float(x.mean())


def test_the_last_planned_step_compares_all_values(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribute_watch, "_FIRST", 0)
    monkeypatch.setattr(attribute_watch, "_SHARE", -1.0)
    with pytest.raises(PrivacyError, match="kept changed"):
        sums_of(tmp_path, WritesIntoList(0.5))


class KeptInSlots:
    __slots__ = ("mean",)

    def __init__(self) -> None:
        self.mean = 0.0


@dataclass(slots=True)
class KeptInFields:
    mean: float = 0.0


class Places(Net):
    """Shifts its input by a value that it keeps in one of several kinds of objects."""

    queue: ClassVar[list[float]] = []
    total = 0.0

    def __init__(self, kind: str) -> None:
        super().__init__(0.5)
        self.kind = kind
        self.held: Any = {
            "defaultdict": defaultdict(float),
            "counter": Counter(),
            "ordered": OrderedDict(mean=0.0),
            "deque": type("Recent", (deque,), {})([0.0]),
            "slots": KeptInSlots(),
            "fields": KeptInFields(),
            "frozen": (SimpleNamespace(), [KeptInFields()]),
            "array": np.zeros(2_000_000),
        }.get(kind)

    @property
    def mean(self) -> float:
        held = self.held
        if isinstance(held, dict):
            return float(held["mean"])
        if isinstance(held, deque | np.ndarray):
            return float(held[0])
        if self.kind == "class list":
            return sum(type(self).queue)
        if self.kind == "class number":
            return type(self).total
        return float(held[1][0].mean if isinstance(held, tuple) else held.mean)

    def train_step(self, global_step: int, batch: Any, device: torch.device) -> Tensor:
        x, y = batch
        loss = cross_entropy(self.net(x - self.mean), y)
        if global_step >= 3:
            mean, held = self.mean + 0.1 * float(x.mean()), self.held
            if isinstance(held, dict):
                held["mean"] = mean
            elif isinstance(held, deque | np.ndarray):
                held[0] = mean
            elif self.kind == "class list":
                type(self).queue.append(mean)
            elif self.kind == "class number":
                type(self).total = mean
            elif isinstance(held, tuple):
                held[1][0].mean = mean
            else:
                held.mean = mean
        return loss


KINDS = ["defaultdict", "counter", "ordered", "deque", "slots", "fields", "frozen", "class list", "class number"]


@pytest.mark.parametrize("kind", KINDS)
def test_state_in_other_places_than_plain_attributes_is_refused(kind: str, tmp_path: Any) -> None:
    made = type("Made", (Places,), {"queue": [], "total": 0.0, "__module__": __name__})
    seen = Gradients()
    with pytest.raises(PrivacyError, match="changed in the course of training"):
        private_trainer(tmp_path, made(kind), [seen], grad_mode="loop").train()
    assert len(seen.sums) == 2


def test_a_large_array_that_is_written_is_noted(tmp_path: Any) -> None:
    trainer = private_trainer(tmp_path, Places("array"), grad_mode="loop")
    trainer.train()
    assert "changes of held during training" in trainer.privacy_statement().not_covered


class Recurrent(Net):
    def __init__(self) -> None:
        super().__init__(0.5)
        self.cells = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def train_step(self, global_step: int, batch: Any, device: torch.device) -> Tensor:
        return cross_entropy(self.net(self.cells(batch[0][:, None])[0][:, -1]), batch[1])

    def get_optimizers_schedulers(self, *given: Any) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1)], []


def test_lists_of_parameters_are_not_state_of_the_user(tmp_path: Any) -> None:
    assert len(sums_of(tmp_path, Recurrent())) == STEPS


class Scheduled(Net):
    def get_optimizers_schedulers(self, *given: Any) -> Any:
        self.made = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        by_epoch = ts.SchedulerConfig(torch.optim.lr_scheduler.ExponentialLR(self.made, 0.9), interval="epoch")
        return [self.made], [torch.optim.lr_scheduler.CosineAnnealingLR(self.made, 10), by_epoch]


class LowersRate(Scheduled):
    largest = 0.0

    def train_step(self, global_step: int, batch: Any, device: torch.device) -> Tensor:
        loss = super().train_step(global_step, batch, device)
        self.largest = max(self.largest, float(loss.detach()))
        return loss

    def on_end_train_step(self, global_step: int) -> None:
        if self.largest > 0.0:
            self.made.param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize("module", [Scheduled, LowersRate])
def test_a_learning_rate_that_no_scheduler_has_set_is_noted(module: type[Scheduled], tmp_path: Any) -> None:
    trainer = private_trainer(tmp_path, module(0.5))
    trainer.train()
    found = [line for line in trainer.privacy_statement().not_covered if "other code than a scheduler" in line]
    assert [line.split(" of an optimizer")[0] for line in found] == (["changes of lr"] if module is LowersRate else [])


class Labelled(Tensor):
    """A tensor with a name."""


class Wrapper(Tensor):
    """A tensor that computes with another one and has no memory."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = [one.inner if isinstance(one, Wrapper) else one for one in args]
        return func(*inner, **(kwargs or {}))


class WritesBuffer(Net):
    def __init__(self, buffer: Tensor) -> None:
        super().__init__(0.5)
        self.register_buffer("buffer", buffer)

    def train_step(self, global_step: int, batch: Any, device: torch.device) -> Tensor:
        x, y = batch
        if global_step >= 3:
            self.buffer.data.copy_(x.mean(0))
        return cross_entropy(self.net(x), y)


def test_a_buffer_of_a_subclass_is_sealed(tmp_path: Any) -> None:
    with pytest.raises(PrivacyError, match=r"buffer has changed|buffer changes"):
        sums_of(tmp_path, WritesBuffer(torch.zeros(WIDTH).as_subclass(Labelled)))


def test_a_buffer_that_cannot_be_sealed_is_noted(tmp_path: Any) -> None:
    module = Net(0.5)
    module.register_buffer("wrapper", Wrapper(torch.ones(3)))
    trainer = private_trainer(tmp_path, module, grad_mode="loop")
    trainer.train()
    assert "changes of wrapper during training" in trainer.privacy_statement().not_covered
