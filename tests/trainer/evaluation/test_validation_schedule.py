"""The schedule of validations, which have no effect on training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, train, weights
from trainstack.trainer.run.due_work import DueWork

EVERY_STEP = ts.DefaultCheckpointerArguments(every_n_steps=1, keep_last=None)


def steps(trainer: ts.Trainer) -> list[int]:
    """The global steps of the validations."""
    history = trainer.history
    return [record.step for record in history.records("val/loss")] if "val/loss" in history.get_metric_names() else []


def module(**changes: Any) -> Classifier:
    return Classifier(**{"dropout": 0.3, "validate": True, "scheduler": True, **changes})


@pytest.mark.spec("FN-14", "HZ-16", "PMT-10")
@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (None, [6, 12, 18]),
        (0, []),
        (-1, [6, 12, 18]),
        (-2, [12]),
        (ts.Every(epochs=2), [12]),
        (4, [4, 8, 12, 16]),
        (ts.Every(steps=6), [6, 12, 18]),
        (0.25, [5, 9, 14, 18]),
        (ts.Every(steps=0.5), [9, 18]),
        (lambda trainer: trainer.global_steps_finished in (2, 6, 7), [2, 6, 7]),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_validations_occur_at_the_scheduled_steps(every: Any, expected: list[int], tmp_path: Path) -> None:
    trainer = train(module(), tmp_path, epochs=3, validate_every=every)

    assert steps(trainer) == expected
    if expected:
        assert [r.epoch for r in trainer.history.records("val/loss")] == [(step - 1) // 6 for step in expected]


@pytest.mark.spec("F201", "F412")
@pytest.mark.parametrize(
    "backend", ["sp", *(pytest.param(backend, marks=pytest.mark.long) for backend in ("sp-amp", "sp-dp"))]
)
def test_validations_do_not_change_weights_or_random_states(backend: str, tmp_path: Path) -> None:
    results = []
    for every in (0, 1):
        torch.manual_seed(1)
        trainer = train(module(), tmp_path / str(every), epochs=2, backend=backend, validate_every=every)
        results.append((weights(trainer.module), torch.rand(3), trainer.module.training))

    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] is results[1][2] is True


def test_due_work_runs_only_at_scheduled_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    attend = DueWork.attend
    monkeypatch.setattr(DueWork, "attend", lambda due: (looks.append(due.state.global_step), attend(due)))
    train(module(), tmp_path, epochs=3, validate_every=-3, log_every=1000)
    assert looks == []
    train(module(), tmp_path, epochs=3, validate_every=4, log_every=1000)
    assert looks == [4, 8, 12, 16]


@pytest.mark.parametrize(
    "every",
    [2, 0.3, lambda trainer: trainer.global_steps_finished % 4 == 1],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_resume_keeps_the_steps_and_results_of_validations(every: Any, tmp_path: Path) -> None:
    made: dict[str, Any] = {"epochs": 2, "validate_every": every, "log_every": 3}
    torch.manual_seed(1)
    unbroken = train(module(), tmp_path, checkpointer_args=EVERY_STEP, **made)
    found = [i for i in ts.list_checkpoints(tmp_path / "checkpoints") if i.kind == "checkpoint"]
    assert len(found) == 12
    for position, info in enumerate(found):
        torch.manual_seed(50 + position)
        resumed = train(module(seed=9), tmp_path / info.name, resume=str(info.path), **made)
        assert torch.equal(weights(resumed.module), weights(unbroken.module))
        assert resumed.history.to_dict() == unbroken.history.to_dict()


class Signalled(Classifier):
    """Two validation loaders; a signal arrives in batch `at` of the validations, counted over the run."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__(dropout=0.3, validate=True)
        self.at, self.batches, self.trainer = at, 0, None
        self.finished: list[tuple[int, str]] = []

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        loader = super().get_val_dataloaders(sampler, batch_size)
        return {"one": loader, "two": loader}

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.batches += 1
        if self.batches == self.at:
            self.trainer._stopper.request("SIGTERM", 15)  # type: ignore[attr-defined]
        return super().val_step(global_step, batch, device)

    def on_end_val_epoch(self, global_step: int, key: str = "default") -> None:
        self.finished.append((global_step, key))


@pytest.mark.parametrize("at", [1, 6, 7, 11, 13, 23])
def test_a_validation_that_a_signal_interrupts_continues_on_resume(at: int, tmp_path: Path) -> None:
    """Six batches a loader, so twelve a validation, after the steps 4, 8 and 12 of twelve."""
    made: dict[str, Any] = {"epochs": 2, "validate_every": 4, "val_batch_size": 8, "handle_signals": False}
    made["checkpointer_args"] = ts.DefaultCheckpointerArguments(keep_last=None)
    torch.manual_seed(1)
    unbroken = train(Signalled(), tmp_path / "unbroken", **made)
    torch.manual_seed(1)
    cut = Signalled(at)
    cut.trainer = trainer = ts.Trainer(cut, arguments(tmp_path, **made))  # type: ignore[assignment]
    with pytest.raises(ts.Preempted):
        trainer.train()
    assert trainer.global_steps_finished == (4 if at <= 12 else 8)
    torch.manual_seed(2)
    resumed = train(Signalled(), tmp_path, **{**made, "resume": True})

    assert torch.equal(weights(resumed.module), weights(unbroken.module))
    assert resumed.history.to_dict() == unbroken.history.to_dict()
    assert cut.finished + resumed.module.finished == unbroken.module.finished  # type: ignore[operator]


def test_a_checkpoint_has_the_validation_result_of_its_step(tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments(every_n_steps=4, keep_last=None)
    trainer = train(module(), tmp_path, epochs=2, validate_every=4, checkpointer_args=saving)
    found = {i.global_step: i.metrics for i in ts.list_checkpoints(tmp_path / "checkpoints") if i.kind == "checkpoint"}

    measured = dict(zip(steps(trainer), trainer.history.get_metric_values("val/loss"), strict=True))
    assert {step: metrics.get("val/loss") for step, metrics in found.items()} == {
        4: measured[4],
        6: None,
        8: measured[8],
        12: measured[12],
    }


class Plateau(Classifier):
    def __init__(self) -> None:
        super().__init__(validate=True)

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=100)
        return optimizer, ts.SchedulerConfig(schedule, monitor="val/loss")


def test_a_plateau_schedule_steps_only_after_validations(tmp_path: Path) -> None:
    trainer = train(Plateau(), tmp_path, epochs=4, validate_every=-2)
    assert trainer.get_state()["schedulers"][0]["state"]["last_epoch"] == 2

    with pytest.raises(ts.ConfigurationError, match="a scheduler monitors 'val/loss'"):
        train(Plateau(), tmp_path / "never", validate_every=0)


def test_an_error_in_validate_every_names_the_argument(tmp_path: Path) -> None:
    def broken(trainer: ts.Trainer) -> bool:
        raise KeyError(trainer.global_steps_finished)

    with pytest.raises(KeyError) as raised:
        train(module(), tmp_path, validate_every=broken)
    assert "raised in the function given as validate_every" in " ".join(raised.value.__notes__)


@pytest.mark.parametrize(
    "wrong",
    [1.5, 0.0, -0.5, True, "epoch", [1], float("nan"), dict],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_value_other_than_a_schedule_is_refused(wrong: Any) -> None:
    with pytest.raises(ts.ConfigurationError, match=r"validate_every=.*Every\(steps=...\)"):
        ts.TrainerArguments(validate_every=wrong)


@pytest.mark.parametrize(
    "wrong", [{}, {"steps": 1, "epochs": 1}, {"steps": 0}, {"steps": 2.0}, {"epochs": 0.5}], ids=str
)
def test_every_takes_one_number(wrong: Any) -> None:
    with pytest.raises(ts.ConfigurationError, match=r"Every\(.*write"):
        ts.Every(**wrong)


def test_every_survives_a_round_trip_through_json(tmp_path: Path) -> None:
    args = ts.TrainerArguments(validate_every=ts.Every(steps=0.5))
    assert ts.TrainerArguments.from_dict(json.loads(json.dumps(args.to_dict()))).validate_every == args.validate_every


@pytest.mark.spec("HZ-13")
def test_the_validation_batch_may_be_the_micro_batch(tmp_path: Path) -> None:
    seen = []

    class Looks(Classifier):
        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            seen.append(len(batch[0]))
            return super().val_step(global_step, batch, device)

    trainer = train(Looks(numbers(10), validate=True), tmp_path, val_batch_size=None, gpu_batch_size_limit=4)
    assert seen == [4, 4, 2]
    assert trainer.val_step_batch_size == 4


def test_a_validation_before_the_first_step_is_recorded_once(tmp_path: Path) -> None:
    checkpoints = ts.DefaultCheckpointerArguments()
    changes: dict[str, Any] = {"validate_at_start": True, "checkpointer_args": checkpoints, "resume": "auto"}
    trainers = [train(Classifier(validate=True), tmp_path / "start", **changes)]
    trainers += [train(Classifier(validate=True), tmp_path / "start", epochs=2, **changes)]
    plain = train(Classifier(validate=True), tmp_path / "plain", epochs=2, checkpointer_args=checkpoints)

    at_start = [record.step for record in trainers[0].history.records("val/loss")]
    assert at_start == [0, trainers[0].state.global_step]
    assert [record.step for record in trainers[1].history.records("val/loss")].count(0) == 1
    states = [trainer.module.state_dict() for trainer in (trainers[1], plain)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
