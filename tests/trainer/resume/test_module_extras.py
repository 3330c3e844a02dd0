"""State of a module and its callbacks outside of `state_dict` is restored with the run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trainstack as ts
from tests.helpers.modules import Classifier, InMemory, arguments, numbers, weights
from trainstack.trainer.core.state_tree import same

SAVING = ts.DefaultCheckpointerArguments(every_n_steps=1)
STOP_AT = 6
"""In the second of three epochs of four steps."""

Made = tuple[ts.ModuleInterface, list[ts.Callback]]


class Stopped(Exception):
    pass


def train(made: Made, directory: Path, stop_at: int | None = None, **changes: Any) -> ts.ModuleInterface:
    module, callbacks = made
    args = arguments(directory, **{"epochs": 3, "checkpointer_args": SAVING, **changes})
    trainer = ts.Trainer(module, args, callbacks=callbacks)

    @trainer.on(ts.Event.TRAIN_STEP_END)
    def stop(trainer: ts.Trainer) -> None:
        if trainer.global_steps_finished == stop_at:
            raise Stopped

    try:
        trainer.train()
    except Stopped:
        pass
    finally:
        trainer.close()
    return module


class Small(Classifier):
    def __init__(self) -> None:
        super().__init__(numbers(32))

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return super().train_step(global_step, batch, device) * self.factor(batch)

    def factor(self, batch: Any) -> Any:
        return 1.0


class Logs(Small):
    """Changes its state in place where the loader or the optimizers are made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.sizes = [0], np.ones(3)

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        self.calls.append(1)
        self.sizes += 1
        return super().get_train_dataloader(sampler, batch_size)

    def factor(self, batch: Any) -> Any:
        return len(self.calls) * float(self.sizes[0])

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "calls": self.calls, "sizes": self.sizes}

    def update_state(self, state: Any) -> None:
        if state:
            rest = dict(state)
            self.calls, self.sizes = rest.pop("calls"), rest.pop("sizes")
            super().update_state(rest)


class FreezesAtStep(Small):
    def on_end_train_step(self, global_step: int) -> None:
        if global_step in (3, 10):
            self.net[0].weight.requires_grad_(global_step == 10)


class ThawsAtEpochEnd(Small):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_end_train_epoch(self, global_step: int) -> None:
        self.net[0].requires_grad_(True)


class FreezesByEpoch(Small):
    def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
        self.net[0].requires_grad_(epoch != 1)


class Averages(Small):
    """A non-persistent buffer that steps and a hook change, one in a part, and one that is None at first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()), persistent=False)
        self.net[1].register_buffer("count", torch.zeros(2), persistent=False)
        self.register_buffer("first", None, persistent=False)

    def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
        self.mean += 1

    def factor(self, batch: Any) -> Any:
        if self.first is None:
            self.first = batch[0].mean(0)
        self.mean = 0.9 * self.mean + 0.1 * batch[0].mean()
        self.net[1].count += 1
        return (1 + self.mean) * (1 + self.net[1].count.sum() / 10) * (1 + self.first[0])


class Reshapes(Small):
    """Persistent buffers whose shape or dtype changes, or that become None."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(0, 6))
        self.register_buffer("mean", None)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("once", torch.ones(2))

    def factor(self, batch: Any) -> Any:
        self.queue = torch.cat([self.queue, batch[0]])[-20:]
        self.mean, self.count, self.once = self.queue.mean(0), self.count + 0.5, None
        return 1 + self.mean[0] + self.count


class Grows(Small):
    """A persistent buffer that has its first shape until step 5."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(0))

    def on_end_train_step(self, global_step: int) -> None:
        if global_step == 5:
            self.queue = torch.ones(2)

    def factor(self, batch: Any) -> Any:
        return 1 + self.queue.sum()


class Wide(Small):
    """The weights of a layer are too large for a checkpoint to keep their values at the start of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 3000), nn.Tanh(), nn.Linear(3000, 3))


class Noise(ts.Callback):
    def __init__(self) -> None:
        self.rng = torch.Generator().manual_seed(3)

    def on_train_step_end(self, trainer: ts.Trainer) -> None:
        with torch.no_grad():
            for parameter in trainer.module.parameters():
                parameter += 0.01 * torch.randn(parameter.shape, generator=self.rng)


CASES: dict[str, Callable[[], Made]] = {
    **{kind.__name__: lambda kind=kind: (kind(), []) for kind in (Logs, FreezesAtStep, ThawsAtEpochEnd)},
    **{kind.__name__: lambda kind=kind: (kind(), []) for kind in (FreezesByEpoch, Averages, Reshapes, Grows)},
    "Freezer": lambda: (Small(), [ts.callbacks.Freezer("net.0", until_epoch=2)]),
    "Freezer and EMA": lambda: (Wide(), [ts.callbacks.Freezer("net.0", until_epoch=2), ts.callbacks.EMA(0.9)]),
    "Noise": lambda: (Small(), [Noise()]),
}


@pytest.fixture(scope="module", params=CASES)
def uncut(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ts.ModuleInterface]:
    """The name of a case, and its module after an unbroken run, which saves nothing."""
    made = CASES[request.param]()
    saving = ts.DefaultCheckpointerArguments(checkpoint=False)
    return request.param, train(made, tmp_path_factory.mktemp("uncut"), checkpointer_args=saving)


@pytest.mark.parametrize("stop_at", [4, STOP_AT])
def test_a_resumed_run_ends_with_the_same_bits(
    uncut: tuple[str, ts.ModuleInterface], stop_at: int, tmp_path: Path
) -> None:
    case, whole = uncut
    train(CASES[case](), tmp_path, stop_at)
    resumed = train(CASES[case](), tmp_path, resume=True, checkpointer_args=ts.DefaultCheckpointerArguments())

    assert torch.equal(weights(resumed), weights(whole))
    assert [p.requires_grad for p in resumed.parameters()] == [p.requires_grad for p in whole.parameters()]
    for name, buffer in whole.named_buffers():
        assert torch.equal(dict(resumed.named_buffers())[name], buffer), name


@pytest.mark.parametrize("step", [2, STOP_AT])
def test_a_trained_trainer_continues_an_earlier_checkpoint_exactly(
    uncut: tuple[str, ts.ModuleInterface], step: int, tmp_path: Path
) -> None:
    case, whole = uncut
    module, callbacks = CASES[case]()
    saving = ts.DefaultCheckpointerArguments(every_n_steps=2, keep_last=None)
    trainer = ts.Trainer(module, arguments(tmp_path, epochs=3, checkpointer_args=saving), callbacks=callbacks)
    trainer.train()
    trainer.load_checkpoint(tmp_path / "checkpoints" / f"checkpoint-{step:09d}")
    trainer.train()

    assert torch.equal(weights(module), weights(whole))
    assert [p.requires_grad for p in module.parameters()] == [p.requires_grad for p in whole.parameters()]


class Scaled(Small):
    """A non-persistent buffer that changes after step 5."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        return torch.utils.data.DataLoader(self.dataset, batch_size=8)

    def on_end_train_step(self, global_step: int) -> None:
        self.scale.fill_(2.0 if global_step >= 5 else 1.0)

    def factor(self, batch: Any) -> Any:
        return self.scale

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return super().train_step(global_step, batch, device) * self.scale


def test_an_evaluation_uses_the_changed_buffers_of_the_checkpoint(tmp_path: Path) -> None:
    whole = ts.Trainer(Scaled(), arguments(tmp_path, epochs=3, checkpointer_args=SAVING))
    whole.train()
    resumed = ts.Trainer(Scaled(), arguments(tmp_path, epochs=4, checkpointer_args=SAVING, resume=True))
    assert resumed.validate().metrics == whole.validate().metrics
    resumed.train()
    last = ts.Trainer(Scaled(), arguments(tmp_path, checkpointer_args=SAVING, resume=True))
    assert last.validate().metrics == resumed.validate().metrics


def test_a_failed_load_of_a_checkpoint_changes_nothing(tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments(every_n_steps=2, keep_last=None)
    other = ts.Trainer(Scaled(), arguments(tmp_path / "other", checkpointer_args=saving))
    other.module.net.append(nn.Linear(3, 3))
    other.user_state.counter = nn.Linear(1, 1)
    other.train()
    trainer = ts.Trainer(
        Scaled(), arguments(tmp_path, epochs=3, checkpointer_args=saving), callbacks=[ts.callbacks.EMA()]
    )
    trainer.on(ts.Event.READY)(lambda trainer: None)  # so that all states are loaded at once
    trainer.train()
    before = copy.deepcopy((trainer.module.state_dict(), trainer.history.get_state(), trainer.state.get_state()))

    for path, message in (
        (tmp_path / "other" / "checkpoints" / "last", "does not fit Scaled"),
        (tmp_path / "checkpoints" / "checkpoint-000000004", "lacks scale: these buffers are not in state_dict"),
    ):
        with pytest.raises(ts.CheckpointError, match=message):
            trainer.load_checkpoint(path)
        now = trainer.module.state_dict(), trainer.history.get_state(), trainer.state.get_state()
        assert same(now, before)
        assert trainer.module.scale == 2.0
        assert trainer.keeps_trained_weights
    trainer.train(epochs=4)
    assert trainer.global_steps_finished == 16


def test_training_on_does_not_write_to_the_states_of_a_checkpointer(tmp_path: Path) -> None:
    class Counted(Small):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", None)

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            self.steps = torch.zeros(1) if self.steps is None else self.steps
            self.steps += 1
            return super().train_step(global_step, batch, device)

    kept = InMemory()
    ts.Trainer(Counted(), arguments(tmp_path / "one", epochs=1), checkpointer=kept).train()
    before = copy.deepcopy(kept.kept[-1])
    ts.Trainer(Counted(), arguments(tmp_path / "two", epochs=3, resume=True), checkpointer=kept).train()
    assert same(before, kept.kept[0])


class Tables(Small):
    """A constant table, and a flag that the second version of the code sets differently."""

    def __init__(self, scale: float = 1.0, *, frozen: bool = False) -> None:
        super().__init__()
        self.register_buffer("table", scale * torch.arange(50_000.0), persistent=False)
        self.net[0].requires_grad_(not frozen)


def test_constant_tables_are_not_stored_and_new_code_sets_them(tmp_path: Path) -> None:
    train((Tables(), []), tmp_path, STOP_AT)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 150_000
    changed = train((Tables(2.0, frozen=True), []), tmp_path, resume=True)

    assert changed.table[1] == 2.0
    assert not changed.net[0].weight.requires_grad


def test_weights_only_resumes_and_exports_ignore_extras(tmp_path: Path) -> None:
    train((Averages(), []), tmp_path / "run", STOP_AT)
    checkpoints = tmp_path / "run" / "checkpoints"
    module = train((Averages(), []), tmp_path / "new", resume=str(checkpoints), resume_mode="weights", max_steps=1)

    assert module.net[1].count[0] == 1
    ts.export_model(module, tmp_path / "export")
    assert all("count" not in name for name in ts.read_model(tmp_path / "export"))


class AddsLayer(Small):
    late: Any

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> tuple[Any, Any]:
        return torch.optim.SGD(self.net.parameters(), lr=0.1), None

    def on_end_train_epoch(self, global_step: int) -> None:
        if not hasattr(self, "late"):
            self.late = nn.Linear(2, 2)


class MakesLayer(AddsLayer):
    def update_state(self, state: Any) -> None:
        if state and "late.weight" in state and not hasattr(self, "late"):
            self.late = nn.Linear(2, 2)
        super().update_state(state)


def test_an_added_layer_is_named_at_the_first_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train((AddsLayer(), []), tmp_path / "one")
    assert caplog.text.count("late.weight, late.bias were added after AddsLayer.__init__") == 1
    caplog.clear()
    train((MakesLayer(), []), tmp_path / "two", STOP_AT)
    resumed = train((MakesLayer(), []), tmp_path / "two", resume=True)
    assert "were added after" not in caplog.text
    assert isinstance(resumed.late.weight, Tensor)


class Counted(Small):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()), persistent=False)


class Counts(ts.Callback):
    def on_train_step_end(self, trainer: Any) -> None:
        with trainer.post_processing():  # a private run refuses other changes
            trainer.module.count += 1


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize("spec", ["sp", "sp-dp"])
def test_a_private_run_does_not_store_extras(spec: str, tmp_path: Path) -> None:
    train((Counted(), [Counts()]), tmp_path, 2, backend=spec)
    resumed = train((Counted(), [Counts()]), tmp_path, backend=spec, resume=True)

    assert resumed.count == (12 if spec == "sp" else 11)
