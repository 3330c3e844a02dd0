"""Events of micro-batches, evaluated batches, sanity checks, loaded weights and saved checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, train
from tests.helpers.processes import run_world


class Tells(Classifier):
    """Returns more than the loss."""

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        outputs = self.net(batch[0])
        return {"loss": nn.functional.cross_entropy(outputs, batch[1]), "outputs": outputs}

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.net(batch[0])

    test_step = predict_step = val_step


class Records(ts.Callback):
    def __init__(self) -> None:
        self.names: list[str] = []
        self.saved: list[Any] = []
        self.indices: list[Any] = []


def _records(event: ts.Event) -> Any:
    def method(self: Records, trainer: ts.Trainer, *given: Any) -> None:
        self.names.append(event.name)
        if event is ts.Event.CHECKPOINT_SAVED:
            assert ts.read_checkpoint(given[0]).trainer_state
            self.saved.append((trainer.state.global_step, given[0].name))
        if event in (ts.Event.TRAIN_BATCH_BEGIN, ts.Event.TRAIN_BATCH_END):
            self.indices.append(trainer.view.indices)

    return method


for _event in ts.Event:
    setattr(Records, _event.method, _records(_event))


@pytest.mark.spec("FN-36", "FN-30")
@pytest.mark.parametrize("async_save", [False, True])
def test_all_events_occur_in_the_documented_order(async_save: bool, tmp_path: Path) -> None:
    train(Classifier(), tmp_path / "before").export(tmp_path / "weights")
    records = Records()
    changes: dict[str, Any] = {
        "checkpointer_args": ts.DefaultCheckpointerArguments(async_save=async_save),
        "init_weights_from": tmp_path / "weights",
        "sanity_val_steps": 2,
        "gpu_batch_size_limit": 25,
        "train_batch_size": 41,
        "val_batch_size": 30,
        "log_every": 1,
    }
    trainer = ts.Trainer(Tells(validate=True), arguments(tmp_path / "run", **changes), callbacks=records)
    trainer.train()
    batch = ["TRAIN_BATCH_BEGIN", "BEFORE_BACKWARD", "TRAIN_BATCH_END", "AFTER_BACKWARD"]
    update = ["BEFORE_OPTIMIZER_STEP", "AFTER_OPTIMIZER_STEP", "BEFORE_ZERO_GRAD", "AFTER_ZERO_GRAD", "TRAIN_STEP_END"]
    evaluated = ["VALIDATION_BATCH_BEGIN", "VALIDATION_BATCH_END"] * 2
    fetch = ["FETCH_DATA_BEGIN", "FETCH_DATA_END"]
    names = [name for name in records.names if name != "CHECKPOINT_SAVED"]
    assert names == [
        *["INIT", "LOAD_MODEL", "READY", "SANITY_CHECK_BEGIN", "SANITY_CHECK_END"],
        *["TRAIN_BEGIN", "EPOCH_BEGIN", "TRAIN_EPOCH_BEGIN"],
        *[*fetch, *batch, *fetch, *batch, *update, "LOG", "FETCH_DATA_BEGIN"],
        *["TRAIN_EPOCH_END", "VALIDATION_BEGIN", *evaluated, "VALIDATION_END", "EPOCH_END"],
        *["SAVE_CHECKPOINT", "TRAIN_END", "SAVE_MODEL"],
    ]
    assert records.saved == [(1, "checkpoint-000000001")]
    assert records.names.index("CHECKPOINT_SAVED") > records.names.index("SAVE_CHECKPOINT")
    assert set(names) | {"CHECKPOINT_SAVED"} >= {e.name for e in ts.Event} - {
        "LOAD_CHECKPOINT",
        "STOP_TRAINING",
        "EXCEPTION",
    }


@pytest.mark.spec("PA-30", "FN-42")
def test_a_callback_gets_each_micro_batch_with_its_indices(tmp_path: Path) -> None:
    class Sees(ts.Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_train_batch_end(self, trainer: ts.Trainer, batch: Any, outputs: Any, loss: Any) -> None:
            assert not outputs["outputs"].requires_grad
            assert not loss.requires_grad
            expected = nn.functional.cross_entropy(outputs["outputs"], batch[1])
            assert torch.equal(expected, loss)
            dataset = trainer.module.dataset  # type: ignore[attr-defined]
            indices = trainer.view.indices
            assert torch.equal(batch[0], torch.stack([dataset[index][0] for index in indices]))
            self.seen.append(indices)

    sees = Sees()
    module, plain = Tells(), Tells()
    trainer = ts.Trainer(module, arguments(tmp_path, epochs=2, gpu_batch_size_limit=3), callbacks=sees)
    trainer.train()
    epochs = sees.seen[: len(sees.seen) // 2], sees.seen[len(sees.seen) // 2 :]
    assert [sorted(index for indices in epoch for index in indices) for epoch in epochs] == [list(range(41))] * 2
    assert epochs[0] != epochs[1]
    assert trainer.view.indices is None
    train(plain, tmp_path / "plain", epochs=2, gpu_batch_size_limit=3)
    assert all(map(torch.equal, plain.state_dict().values(), module.state_dict().values()))


class Accuracy(ts.Callback):
    """Counts correct predictions, and updates a metric if it has one."""

    def __init__(self, metric: Any = None) -> None:
        self.metric, self.counts, self.stages = metric, torch.zeros(1, 2), set[str]()

    def on_validation_batch_end(self, trainer: ts.Trainer, batch: Any, outputs: Any, stage: ts.Stage) -> None:
        self.stages.add(stage.name)
        right = int((outputs.argmax(1) == batch[1]).sum())
        self.counts += torch.tensor([[right, len(batch[1])]])
        if self.metric is not None:
            self.metric.update(outputs, batch[1])


def counted_in_a_callback(directory: str, backend: str = "ddp") -> list[Any]:
    accuracy = Accuracy()
    trainer = ts.Trainer(Tells(validate=True), arguments(directory, backend=backend), callbacks=accuracy)
    trainer.validate()
    trainer.test(trainer.module.dataset)  # type: ignore[attr-defined]
    trainer.predict(trainer.module.dataset)  # type: ignore[attr-defined]
    return [sorted(accuracy.stages), trainer.gather(accuracy.counts).sum(0).tolist()]


@pytest.mark.spec("PA-32", "PA-38")
@pytest.mark.distributed
def test_callbacks_get_every_evaluated_batch_on_all_ranks(tmp_path: Path) -> None:
    from torchmetrics.classification import MulticlassAccuracy

    accuracy = Accuracy(MulticlassAccuracy(3, average="micro"))
    ts.Trainer(Tells(validate=True), arguments(tmp_path), callbacks=accuracy).validate()
    right, seen = accuracy.counts[0].tolist()
    assert seen == 41
    assert accuracy.metric.compute().item() == pytest.approx(right / seen)

    alone = counted_in_a_callback(str(tmp_path), "sp")
    assert alone == [["PREDICT", "TEST", "VAL"], [3 * right, 3 * seen]]
    assert run_world(2, counted_in_a_callback, directory=str(tmp_path)) == [alone, alone]


@pytest.mark.spec("FN-30")
def test_a_sanity_check_returns_results_and_records_nothing(tmp_path: Path) -> None:
    given: list[Any] = []
    for batches in (1, -1):
        trainer = ts.Trainer(Classifier(validate=True), arguments(tmp_path, sanity_val_steps=batches, val_batch_size=8))
        expected = trainer.validate().metrics
        trainer.on(ts.Event.SANITY_CHECK_END)(lambda trainer, results: given.append(results))
        trainer.on(ts.Event.TRAIN_BEGIN)(lambda trainer: given.append(set(trainer.history.get_metric_names())))
        trainer.train()
    first, nothing, whole, also_nothing = given
    assert list(first) == ["val/loss"]
    assert first != expected
    assert whole == expected
    assert nothing == also_nothing == set()
