"""Several trainers in one process, and several calls of `train`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, train, weights


def broken(**methods: Any) -> Classifier:
    """A classifier with some methods replaced."""
    return type("Broken", (Classifier,), methods)(numbers(16))


def test_one_backend_object_serves_one_trainer(tmp_path: Path) -> None:
    backend = ts.build_trainer_backend("sp-amp")
    first = ts.Trainer(Classifier(), arguments(tmp_path), trainer_backend=backend)

    with pytest.raises(ts.ConfigurationError, match=r"belongs to another Trainer already\. Build one for each"):
        ts.Trainer(Classifier(), arguments(tmp_path), trainer_backend=backend)
    assert first.trainer_backend is backend


def test_two_trainers_log_at_their_own_levels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Partial(Classifier):
        def get_optimizers_schedulers(self, *_: Any) -> Any:
            return torch.optim.SGD(self.net[0].parameters(), lr=0.1)

    loud, quiet = (ts.Trainer(Partial(), arguments(tmp_path, log_level=level)) for level in ("WARNING", "ERROR"))
    quiet.train()
    assert "in no optimizer" not in caplog.text
    loud.train()
    assert "2 trainable parameters are in no optimizer and will not change: net.3.weight, net.3.bias" in caplog.text


def test_training_a_finished_run_again_changes_nothing(tmp_path: Path) -> None:
    ended = []
    module = broken(on_end_train=lambda self, global_step: ended.append(global_step))
    trainer = train(module, tmp_path)
    after = weights(module)
    trainer.train()

    assert ended == [2]
    assert torch.equal(weights(module), after)


def test_training_continues_after_an_interruption(tmp_path: Path) -> None:
    def train_step(self: Any, global_step: int, batch: Any, device: Any) -> Any:
        if global_step == 3 and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return Classifier.train_step(self, global_step, batch, device)

    interrupted: list[bool] = []
    module, unbroken = broken(train_step=train_step), Classifier(numbers(16))
    trainer = ts.Trainer(module, arguments(tmp_path, epochs=2))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    train(unbroken, tmp_path, epochs=2)

    assert torch.equal(weights(module), weights(unbroken))


@pytest.mark.parametrize("form", [tuple, dict])
def test_outputs_of_an_interrupted_epoch_have_each_sample_once(form: type, tmp_path: Path) -> None:
    class Collects(Classifier):
        calls = 0
        seen: Any = None

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            self.calls += 1
            if self.calls == 4:  # the second micro-batch of the second step
                raise KeyboardInterrupt
            loss = super().train_step(global_step, batch, device)
            return (loss, batch[0]) if form is tuple else {"loss": loss, "x": batch[0]}

        def on_end_train_epoch(self, global_step: int, *outputs: Any) -> None:
            self.seen = outputs[0]["x"] if form is dict else outputs[1]

    module = Collects(numbers(16))
    trainer = ts.Trainer(module, arguments(tmp_path, train_batch_size=8, gpu_batch_size_limit=4))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()

    assert sorted(module.seen.tolist()) == sorted(numbers(16).tensors[0].tolist())


def test_two_trainers_in_one_process_are_independent(tmp_path: Path) -> None:
    alone = train(Classifier(), tmp_path / "alone", epochs=2)
    one = ts.Trainer(Classifier(), arguments(tmp_path / "one", epochs=2))
    other = ts.Trainer(Classifier(numbers(30), seed=7), arguments(tmp_path / "other", epochs=1, backend="sp-amp"))
    one.validate()
    other.train()
    one.train()

    assert one.history.to_dict() == alone.history.to_dict()
    assert other.global_steps_finished == 4


@pytest.mark.parametrize("hook", ["on_end_val_epoch", "val_step", "on_validation_begin"])
def test_a_validation_within_a_validation_is_refused(hook: str, tmp_path: Path) -> None:
    def again(self: Any, *_: Any, **__: Any) -> None:
        trainer.validate()

    module = type("Nested", (Classifier,), {hook: again})(numbers(16), validate=True)
    trainer = ts.Trainer(module, arguments(tmp_path))
    for start in (trainer.train, trainer.validate):
        with pytest.raises(ts.ConfigurationError, match=r"trainer\.validate\(\) was called within an evaluation"):
            start()


def test_other_evaluations_within_a_validation_are_allowed(tmp_path: Path) -> None:
    class Looks(Classifier):
        def predict_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return self.net(batch[0])

        def on_end_val_epoch(self, global_step: int, *_: Any, key: str = "default") -> None:
            seen.append(trainer.predict(self.get_val_dataloaders(torch.utils.data.SequentialSampler, 8)).shape)

        def on_validation_end(self) -> None:
            if not seen[1:]:
                trainer.validate()

    seen: list[Any] = []
    trainer = ts.Trainer(Looks(numbers(16), validate=True), arguments(tmp_path))
    trainer.train()
    assert seen == [(16, 3)] * 2


def test_deepcopy_of_a_trainer_is_refused(tmp_path: Path) -> None:
    trainer = ts.Trainer(Classifier(), arguments(tmp_path))
    with pytest.raises(ts.ConfigurationError, match=r"cannot be copied.*copy\.deepcopy\(trainer\.module\)"):
        copy.deepcopy(trainer)
    assert weights(copy.deepcopy(trainer.module)).equal(weights(trainer.module))
