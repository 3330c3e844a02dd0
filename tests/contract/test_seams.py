"""The calls of `place` and `end_evaluation`, and of `read`, the only way of values to the host."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers
from tests.helpers.specs import every_stack
from tests.trainer.run.test_hot_loop import CountsReads, reads_counted
from trainstack.backends import fast_paths
from trainstack.trainer.data.training_data import TrainingData

META = torch.device("meta")


class Notes(ts.AbstractTrainerBackendDecorator):
    """Records the calls of some verbs in order, and the number of tensors of each `read`."""

    def __init__(self, inner: ts.TrainerBackend) -> None:
        super().__init__(inner)
        self.calls: list[str] = []
        self.reads: list[int] = []
        self.counter: CountsReads | None = None
        self.read_inside = 0

    def place(self, module: nn.Module, world: ts.World) -> None:
        self.calls.append("place")
        self.inner.place(module, world)

    def prepare(self, work: ts.Workload) -> ts.Workload:
        self.calls.append("prepare")
        return self.inner.prepare(work)

    def begin_evaluation(self, work: ts.Workload) -> None:
        self.calls.append("begin")
        self.inner.begin_evaluation(work)

    def end_evaluation(self, work: ts.Workload) -> None:
        self.calls.append("end")
        self.inner.end_evaluation(work)

    def read(self, tensors: Sequence[Tensor]) -> list[float]:
        before = 0 if self.counter is None else self.counter.count
        values = self.inner.read(tensors)
        self.reads.append(len(tensors))
        self.read_inside += 0 if self.counter is None else self.counter.count - before
        return values


class Ordered(Classifier):
    """Records the creation of its optimizers, and can fail or stop in a validation batch."""

    def __init__(self, calls: list[str], **changes: Any) -> None:
        super().__init__(numbers(32), validate=True, **changes)
        self.calls, self.fail, self.stop, self.validated = calls, False, False, 0

    def get_optimizers_schedulers(self, *sizes: Any) -> Any:
        self.calls.append("optimizers")
        return super().get_optimizers_schedulers(*sizes)

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        if self.fail:
            raise ValueError("a validation batch")
        if self.stop:
            signal.raise_signal(signal.SIGTERM)
        self.validated += 1
        return super().val_step(global_step, batch, device)


def stack_and_module(spec: str = "sp") -> tuple[Notes, Ordered]:
    stack = Notes(ts.build_trainer_backend(spec))
    return stack, Ordered(stack.calls)


def test_the_module_is_placed_before_its_optimizers_are_made(tmp_path: Path) -> None:
    stack, module = stack_and_module()
    ts.Trainer(module, arguments(tmp_path), trainer_backend=stack).train()

    assert stack.calls[:3] == ["place", "optimizers", "prepare"]
    assert stack.calls.count("place") == 1


def test_a_stack_without_a_trainer_places_the_module() -> None:
    stack, module = stack_and_module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    stack.init(ts.TrainerBackendArguments(model=module, optimizers=[optimizer]))
    stack.validate_dl([[torch.zeros(2, 6), torch.zeros(2, dtype=torch.long)]])

    assert stack.calls == ["place", "prepare", "begin", "end"]


@every_stack
def test_place_moves_the_parameters_and_keeps_their_identity(spec: str) -> None:
    if spec.startswith("fsdp"):
        pytest.skip("fsdp shards: it puts other parameters in their places, before optimizers are made")
    module = nn.Linear(2, 2)
    before = [id(p) for p in module.parameters()]
    ts.build_trainer_backend(spec).place(module, ts.World(device=torch.device("cpu")))
    assert [id(p) for p in module.parameters()] == before

    ts.build_trainer_backend(spec).place(module, ts.World(device=META))
    assert {p.device for p in module.parameters()} == {META}


def test_a_failed_evaluation_calls_end_evaluation(tmp_path: Path) -> None:
    stack, module = stack_and_module()
    trainer = ts.Trainer(module, arguments(tmp_path), trainer_backend=stack)
    trainer.validate()
    module.fail = True
    with pytest.raises(ValueError, match="a validation batch"):
        trainer.validate()

    assert [call for call in stack.calls if call in ("begin", "end")] == ["begin", "end", "begin", "end"]


def test_an_interrupted_evaluation_calls_end_evaluation(tmp_path: Path) -> None:
    stack, module = stack_and_module()
    trainer = ts.Trainer(module, arguments(tmp_path, val_batch_size=8), trainer_backend=stack)
    module.stop = True
    with pytest.raises(ts.Preempted):
        trainer.train()

    assert module.validated == 1
    assert [call for call in stack.calls if call in ("begin", "end")] == ["begin", "end"]


def test_values_reach_the_host_through_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With skipping, validation and checkpoints: each conversion of a tensor into a number happens within `read`."""
    monkeypatch.setattr(fast_paths, "MOST_ON_HOST", 0.0)
    monkeypatch.setattr(fast_paths, "READS_ON_HOST", False)
    stack = Notes(ts.build_trainer_backend("sp"))
    saving = ts.DefaultCheckpointerArguments()
    module = Classifier(numbers(32), validate=True)
    # The step log copies checksums from the device without `read`.
    args = arguments(tmp_path, nonfinite="skip", log_every=2, checkpointer_args=saving, record="off")
    trainer = ts.Trainer(module, args, trainer_backend=stack)
    with reads_counted(monkeypatch) as counter:
        stack.counter = counter
        for name in ("save", "save_model"):
            monkeypatch.setattr(trainer.checkpointer, name, uncounted(getattr(trainer.checkpointer, name), counter))
        monkeypatch.setattr(TrainingData, "hash_samples", uncounted(TrainingData.hash_samples, counter))
        trainer.train()

    assert len(stack.reads) > 4
    assert stack.read_inside == counter.count


def uncounted(write: Any, counter: CountsReads) -> Any:
    """`write`, whose reads do not count: files have whole tensors, and hashed samples are on the host."""

    def written(*args: Any, **kwargs: Any) -> Any:
        before = counter.count
        result = write(*args, **kwargs)
        counter.count = before
        return result

    return written


def test_read_takes_tensors_of_several_dtypes() -> None:
    values = [torch.tensor(1.5), torch.tensor(2.0, dtype=torch.bfloat16), torch.tensor(0.1, dtype=torch.float64)]
    values += [torch.tensor(True), torch.tensor(7)]

    assert ts.build_trainer_backend("sp").read(values) == [1.5, 2.0, 0.1, 1.0, 7.0]
    assert ts.build_trainer_backend("sp").read([]) == []
