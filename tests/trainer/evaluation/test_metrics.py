"""Metrics: their inputs, the records of their values, and refusals."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score

import trainstack as ts
from tests.helpers.modules import CLASSES, FEATURES, Classifier, arguments, numbers, train, weights


class Counts:
    """A custom metric: the number of correct predictions."""

    def __init__(self) -> None:
        self.reset()

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.right += int((preds.reshape(target.shape[0], -1)[:, 0] == target).sum())
        self.seen.append(len(target))

    def compute(self) -> int:
        return self.right

    def reset(self) -> None:
        self.right, self.seen = 0, []


class Measured(Classifier):
    """Returns (loss, predicted classes), or the result of `outputs` for them."""

    def __init__(self, metrics: Any, outputs: Any = None, **changes: Any) -> None:
        super().__init__(validate=True, **changes)
        self.metrics, self.make_outputs = metrics, outputs

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        loss, predicted = super().val_step(global_step, batch, device)
        return (loss, predicted) if self.make_outputs is None else self.make_outputs(loss, predicted, batch)

    test_step = val_step

    def get_test_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        return {"some": DataLoader(numbers(10, seed=4), batch_size=batch_size)}

    def right(self) -> int:
        inputs, labels = self.dataset.tensors
        self.net.eval()
        return int((self.net(inputs).argmax(1) == labels).sum())


def accuracy() -> MulticlassAccuracy:
    return MulticlassAccuracy(CLASSES, average="micro")


@dataclass
class Named:
    loss: Tensor
    logits: Tensor
    targets: Tensor


@pytest.mark.spec("FN-13", "HZ-18", "F306")
@pytest.mark.parametrize(
    "outputs",
    [
        None,
        lambda loss, predicted, batch: predicted,
        lambda loss, predicted, batch: (loss, predicted, batch[1]),
        lambda loss, predicted, batch: {"loss": loss, "preds": predicted},
        lambda loss, predicted, batch: {"pred": predicted, "target": batch[1]},
        lambda loss, predicted, batch: {"loss": loss, "outputs": predicted, "labels": batch[1]},
        lambda loss, predicted, batch: Named(loss, predicted, batch[1]),
    ],
    ids=["loss and predictions", "predictions", "with targets", "preds", "pred", "labels", "dataclass"],
)
def test_metrics_find_predictions_and_targets_in_all_output_forms(outputs: Any, tmp_path: Path) -> None:
    module = Measured({"right": Counts(), "accuracy": accuracy()}, outputs)
    trainer = train(module, tmp_path, epochs=2, val_batch_size=8)

    assert trainer.history.records("val/right")[-1] == ts.Record("val/right", module.right(), 12, 1)
    assert trainer.history.get_latest_metric("val/accuracy") == pytest.approx(module.right() / 41, abs=1e-7)
    assert len(trainer.history.get_metric_values("val/right")) == 2


@pytest.mark.spec("PA-38")
def test_metrics_in_the_module_are_moved_and_not_saved(tmp_path: Path) -> None:
    collection = MetricCollection({"accuracy": accuracy(), "f1": MulticlassF1Score(CLASSES)})
    module = Measured(collection)
    trainer = train(module, tmp_path)

    assert trainer.history.get_latest_metric("val/accuracy") == pytest.approx(module.right() / 41, abs=1e-7)
    assert "val/f1" in trainer.history.get_metric_names()
    assert not any("metrics" in name for name in module.get_state())


def test_metrics_do_not_change_weights_or_random_states(tmp_path: Path) -> None:
    class Draws(Counts):
        def update(self, preds: Tensor, target: Tensor) -> None:
            torch.rand(5)
            super().update(preds, target)

    torch.manual_seed(3)
    plain = train(Classifier(dropout=0.3, validate=True), tmp_path / "plain", validate_every=2)
    torch.manual_seed(3)
    measured = train(Measured({"right": Draws()}, dropout=0.3), tmp_path / "measured", validate_every=2)
    assert torch.equal(weights(plain.module), weights(measured.module))


class Loaders(Measured):
    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        return {name: DataLoader(numbers(size), batch_size=batch_size) for name, size in (("one", 5), ("two", 9))}


def test_a_loader_may_have_separate_metrics(tmp_path: Path) -> None:
    trainer = train(Loaders({"all": Counts(), "two": {"own": Counts()}}), tmp_path)
    names = {name for name in trainer.history.get_metric_names() if name.startswith("val/")}
    assert names == {"val/one/loss", "val/two/loss", "val/one/all", "val/two/all", "val/two/own"}
    assert trainer.history.get_latest_metric("val/two/own") == trainer.history.get_latest_metric("val/two/all")

    with pytest.raises(ts.ConfigurationError, match=r"metrics\['three'\] is a dict.*loaders are 'one', 'two'"):
        train(Loaders({"three": {"own": Counts()}}), tmp_path)


def test_metrics_of_the_trainer_replace_those_of_the_module(tmp_path: Path) -> None:
    class Method(Classifier):
        made = 0

        def metrics(self) -> Any:
            self.made += 1
            return {"of_module": self.counts}

    module = Method(validate=True)
    module.counts = Counts()  # type: ignore[assignment]
    assert "val/of_module" in train(module, tmp_path).history.get_metric_names()
    assert module.made == 1
    trainer = ts.Trainer(module, arguments(tmp_path / "other"), metrics={"of_trainer": Counts()})
    trainer.train()
    assert {"val/of_trainer"} == trainer.history.get_metric_names() & {"val/of_trainer", "val/of_module"}


@pytest.mark.spec("PA-19", "HZ-30", "PA-20")
def test_separate_evaluations_record_metrics_only_on_request(tmp_path: Path) -> None:
    class Logs(Measured):
        def on_end_val_epoch(self, global_step: int, key: str = "default") -> None:
            self.log("of_hook", 3)

    module = Logs({"right": Counts()})
    trainer = train(module, tmp_path)
    before = trainer.history.to_dict()
    found = trainer.validate()
    tested = trainer.test()

    assert found.metrics == {name: trainer.history.get_latest_metric(name) for name in found.metrics}
    assert set(found.metrics) == {"val/loss", "val/right", "of_hook"}
    assert len(found["default"][1]) == 41
    assert set(tested.metrics) == {"test/some/loss", "test/some/right"}
    assert trainer.history.to_dict() == before
    other = trainer.validate(DataLoader(numbers(7, seed=9), batch_size=3)).metrics["val/right"]
    named = trainer.test({"x": DataLoader(numbers(7, seed=9), batch_size=2)}).metrics["test/x/right"]
    assert other == named <= 7
    trainer.module.make_outputs = lambda loss, predicted, _: loss
    with pytest.raises(ts.ModuleContractError):
        trainer.validate()
    trainer.module.make_outputs = None
    trainer.validate()
    assert trainer.history.to_dict() == before
    trainer.validate(log=True)
    assert len(trainer.history.get_metric_values("val/right")) == 2


def test_a_metric_of_several_numbers_is_returned_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = Measured({"matrix": MulticlassConfusionMatrix(CLASSES)})
    trainer = train(module, tmp_path, epochs=2)
    assert "val/matrix" not in trainer.history.get_metric_names()
    assert caplog.text.count("val/matrix is not one number") == 1
    assert int(trainer.validate().metrics["val/matrix"].sum()) == 41


def test_supervised_modules_feed_outputs_and_targets(tmp_path: Path) -> None:
    class Dicts(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 41

        def __getitem__(self, index: int) -> Any:
            inputs, label = numbers(41)[index]
            return {"inputs": inputs, "label": label}

    class Net(nn.Linear):
        def forward(self, inputs: Tensor) -> Any:
            return {"scores": super().forward(inputs)}

    def loss(scores: Tensor, label: Tensor) -> Tensor:
        return nn.functional.cross_entropy(scores, label)

    torch.manual_seed(0)
    pairs = ts.SupervisedModule(
        nn.Linear(FEATURES, CLASSES), nn.functional.cross_entropy, "sgd", numbers(41), numbers(41),
        optimizer_kwargs={"lr": 0.1}, metrics={"accuracy": accuracy()},
    )  # fmt: skip
    torch.manual_seed(0)
    named = ts.SupervisedModule(
        Net(FEATURES, CLASSES), loss, "sgd", Dicts(), Dicts(),
        optimizer_kwargs={"lr": 0.1}, metrics={"accuracy": accuracy()},
    )  # fmt: skip
    values = [train(m, tmp_path, val_batch_size=7).history.get_metric_values("val/accuracy") for m in (pairs, named)]
    assert values[0] == values[1]


def test_each_metric_gets_matching_items_of_a_dict(tmp_path: Path) -> None:
    class Sizes:
        total = 0

        def update(self, weight: Tensor) -> None:
            self.total += int(weight.sum())

        def compute(self) -> Any:
            return {"sum": self.total}

        def reset(self) -> None:
            self.total = 0

    def outputs(loss: Tensor, predicted: Tensor, batch: Any) -> Any:
        return {"loss": loss, "preds": predicted, "target": batch[1], "weight": torch.full_like(batch[1], 2)}

    trainer = train(Measured({"sizes": Sizes(), "right": Counts()}, outputs), tmp_path)
    assert trainer.history.get_latest_metric("val/sizes/sum") == 82
    assert "val/right" in trainer.history.get_metric_names()


class TestRefusals:
    def test_an_invalid_metric_is_refused(self, tmp_path: Path) -> None:
        for wrong, words in (
            (3, "metrics is a int"),
            ({"a": 1}, r"metrics\['a'\] is a int"),
            ({"a": Counts}, r"metrics\['a'\] is a type"),
            ({"all": {"a": Counts}}, r"metrics\['a'\] is the class Counts"),
            ({"loss": Counts()}, "a metric has the name 'loss'"),
            ({1: Counts()}, "a metric has the name 1"),
        ):
            with pytest.raises(ts.ConfigurationError, match=words):
                train(Measured(wrong), tmp_path)

    def test_outputs_without_predictions_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ts.ModuleContractError, match=r"returned only a loss.*metric_inputs"):
            train(Measured({"a": Counts()}, lambda loss, *_: loss), tmp_path)

    def test_an_update_parameter_without_a_match_is_refused(self, tmp_path: Path) -> None:
        class Odd(Counts):
            def update(self, thing: Tensor) -> None:  # type: ignore[override]
                pass

        with pytest.raises(
            ts.ModuleContractError, match=r"Odd.update requires 'thing'.*\['found', 'target'\]"
        ) as raised:
            train(Measured({"odd": Odd()}, lambda loss, predicted, _: {"loss": loss, "found": predicted}), tmp_path)
        assert "raised in update of the metric 'odd'" in " ".join(raised.value.__notes__)

    def test_metric_inputs_of_a_wrong_form_are_refused(self, tmp_path: Path) -> None:
        class Wrong(Measured):
            def metric_inputs(self, outputs: Any, batch: Any) -> Any:
                return outputs[1]

        with pytest.raises(ts.ModuleContractError, match=r"metric_inputs returned a Tensor\. Return a tuple"):
            train(Wrong({"a": Counts()}), tmp_path)


def test_metric_inputs_may_skip_batches(tmp_path: Path) -> None:
    class Leaves(Measured):
        def metric_inputs(self, outputs: Any, batch: Any) -> Any:
            return None

    trainer = train(Leaves({"a": Counts()}), tmp_path)
    assert "val/a" not in trainer.history.get_metric_names()


@pytest.mark.spec("FN-13")
@pytest.mark.distributed
def test_values_equal_one_process_on_uneven_shares() -> None:
    """101 samples. Some metrics are means and sums of floats, which depend on the order of addition."""
    from tests.helpers.processes import run_world
    from tests.helpers.workers.evaluation import measured

    alone = measured("unused", backend="sp")
    assert [name for name, *_ in alone["history"][::2]] == [
        *("val/all/accuracy", "val/all/auroc", "val/mean", "val/rounds/sum", "val/rounds/texts"),
    ]
    for rank in run_world(2, measured, directory="unused"):
        assert rank["history"] == alone["history"]
        assert rank["alone"] == alone["alone"]


def test_the_protocol_is_that_of_torchmetrics() -> None:
    assert isinstance(accuracy(), Metric)
    assert isinstance(accuracy(), ts.Metric)
    assert isinstance(Counts(), ts.Metric)
    assert not isinstance(TensorDataset(), ts.Metric)
