"""The steps at which a trainer saves, the checkpoints that it keeps, and the one from which it continues."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, train, weights
from trainstack.backends import Communicator, World
from trainstack.checkpointing import list_checkpoints, read_checkpoint
from trainstack.errors import ConfigurationError
from trainstack.trainer.core.intervals import whole_steps
from trainstack.trainer.core.plan import TrainingPlan
from trainstack.trainer.resume.rank_zero import wait_for_rank_zero


class Scored(Classifier):
    """Logs a given accuracy after each epoch."""

    def __init__(self, scores: list[float], **fields: Any) -> None:
        super().__init__(validate=True, **fields)
        self.scores = scores

    def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str = "default") -> None:
        self.log("val/accuracy", self.scores[global_step // 6 - 1])


def saving(**fields: Any) -> ts.DefaultCheckpointerArguments:
    return ts.DefaultCheckpointerArguments(**{"keep_last": None, **fields})


def steps(directory: Path) -> list[int | None]:
    found = list_checkpoints(directory / "checkpoints")
    return [info.global_step for info in found if info.kind == "checkpoint"]


def plan(total: int | None, epochs: int = 1) -> TrainingPlan:
    return TrainingPlan.make(train_batch_size=1, gpu_batch_size_limit=1, epochs=epochs, dataset_length=total)


@pytest.mark.spec("HZ-20")
@pytest.mark.parametrize(
    ("every", "total", "epochs", "steps"),
    [(0.5, 10, 1, 5), (0.5, 11, 1, 6), (0.07, 100, 1, 7), (1.0, 7, 3, 21), (1e-9, 10, 1, 1), (0.1, 5, 4, 2)],
)
def test_a_fraction_of_the_run_is_rounded_up(every: float, total: int, epochs: int, steps: int) -> None:
    assert whole_steps("every_n_steps", every, plan(total, epochs)) == steps


def test_whole_numbers_of_steps_are_unchanged() -> None:
    assert whole_steps("every_n_steps", 3, plan(None)) == 3


@pytest.mark.spec("HZ-20")
def test_a_run_saves_at_fractions_and_ends_of_epochs(tmp_path: Path) -> None:
    train(Classifier(), tmp_path, epochs=2, checkpointer_args=saving(every_n_steps=0.4))
    assert steps(tmp_path) == [5, 6, 10, 12]  # 12 steps in all


@pytest.mark.parametrize("fields", [{"every_n_epochs": 2}, {"period": 2}, {"every_n_epochs": 2, "period": 2}], ids=str)
def test_a_run_saves_every_second_epoch_and_its_end(tmp_path: Path, fields: dict[str, int]) -> None:
    train(Classifier(), tmp_path, epochs=4, checkpointer_args=saving(**fields))
    assert steps(tmp_path) == [6, 18, 24]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(numbers(16))


class Streamed(Classifier):
    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(Stream(), batch_size=batch_size)


def test_a_fraction_of_an_unknown_length_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"every_n_steps=0.5 is a fraction.*Write a whole number"):
        train(Streamed(), tmp_path, checkpointer_args=saving(every_n_steps=0.5))
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.spec("HZ-19", "FN-54")
def test_a_run_keeps_its_newest_and_best_over_interruptions(tmp_path: Path) -> None:
    keep = saving(keep_last=2, keep_best=1, monitor="val/accuracy")
    scores = [0.3, 0.9, 0.5, 0.6, 0.7, 0.8]
    for epochs in (1, 3, 5, 6):
        train(Scored(scores), tmp_path, epochs=epochs, checkpointer_args=keep, resume="auto")
    assert steps(tmp_path) == [12, 30, 36]
    keeper = ts.DefaultCheckpointer(saving(save_dir=str(tmp_path / "checkpoints"), monitor="val/accuracy"))
    best, last = keeper.best(), keeper.last()
    assert best is not None
    assert last is not None
    assert (best.metrics["val/accuracy"], last.metrics["val/accuracy"]) == (0.9, 0.8)
    assert {"val/loss", "train/loss_epoch"} <= set(best.metrics)


@pytest.mark.spec("HZ-06")
def test_resume_continues_from_the_best_or_the_last(tmp_path: Path) -> None:
    keep = saving(keep_last=1, keep_best=1, monitor="val/accuracy")
    train(Scored([0.3, 0.9, 0.5]), tmp_path, epochs=3, checkpointer_args=keep)
    expected = {12: read_checkpoint(tmp_path / "checkpoints" / "checkpoint-000000012").module_interface_state}
    expected[18] = read_checkpoint(tmp_path / "checkpoints" / "checkpoint-000000018").module_interface_state
    folder = tmp_path / "checkpoints"
    for resume, step in [("best", 12), (folder / "best", 12), ("last", 18), (True, 18), (folder / "last", 18)]:
        module = Scored([0.3, 0.9, 0.5])
        trainer = train(module, tmp_path, epochs=0, checkpointer_args=keep, resume=resume)
        assert trainer.state.global_step == step
        state = expected[step]
        assert state is not None
        assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())


def test_retention_changes_nothing_of_the_training(tmp_path: Path) -> None:
    one = train(Classifier(validate=True), tmp_path / "a", epochs=2)
    keep = saving(every_n_steps=1, keep_last=1, keep_best=1)
    other = train(Classifier(validate=True), tmp_path / "b", epochs=2, checkpointer_args=keep)
    assert torch.equal(weights(one.module), weights(other.module))


def test_a_checkpoint_within_an_epoch_has_no_validation_metrics(tmp_path: Path) -> None:
    train(Scored([0.9, 0.1]), tmp_path, epochs=2, checkpointer_args=saving(every_n_steps=4))
    found = {info.global_step: info.metrics.get("val/accuracy") for info in list_checkpoints(tmp_path / "checkpoints")}
    assert {step: found[step] for step in (4, 6, 8, 12)} == {4: None, 6: 0.9, 8: None, 12: 0.1}


class Pins(Classifier):
    trainer: ts.Trainer

    def on_end_train_step(self, global_step: int) -> None:
        if global_step in (2, 6):  # within an epoch, and at its end
            self.trainer.save_checkpoint(pin=True)


def test_a_pinned_checkpoint_outlives_the_others(tmp_path: Path) -> None:
    module = Pins()
    trainer = ts.Trainer(module, arguments(tmp_path, epochs=3, checkpointer_args=saving(keep_last=1)))
    module.trainer = trainer
    trainer.train()
    assert steps(tmp_path) == [2, 6, 18]
    resumed = train(Classifier(), tmp_path, epochs=4, checkpointer_args=saving(keep_last=1), resume=True)
    assert resumed.state.epoch == 4
    assert steps(tmp_path) == [2, 6, 24]


def test_an_unlogged_monitor_is_named_at_the_first_validation(tmp_path: Path) -> None:
    keep = saving(every_n_steps=2, keep_last=1, keep_best=1, monitor="val/f1")
    with pytest.raises(ts.ConfigurationError, match=r"'val/f1' has been recorded.*train/loss_epoch, val/loss"):
        train(Classifier(validate=True), tmp_path, epochs=2, checkpointer_args=keep)


class _Texts(Communicator):
    """Two ranks in one process that share a store."""

    size = 2

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts

    def put(self, name: str, text: str) -> None:
        self.texts[name] = text

    def get_if_all(self, names: Sequence[str]) -> list[str] | None:
        found = [self.texts[name] for name in names if name in self.texts]
        return found if len(found) == len(names) else None


def test_other_ranks_answer_each_request_of_rank_0_in_order() -> None:
    texts: dict[str, str] = {}
    main, other = (
        World(rank=rank, size=2, local_rank=0, device=torch.device("cpu"), comm=_Texts(texts)) for rank in range(2)
    )
    with wait_for_rank_zero(main, "a task", 60.0) as ask:
        for request in ("first", "second", "third"):
            ask(request)

    answered: list[str] = []
    with wait_for_rank_zero(other, "a task", 0.5, answered.append):
        pass
    assert answered == ["first", "second", "third"]
