"""`SupervisedModule` with models and data sets of other libraries."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import trainstack as ts
from trainstack.errors import ConfigurationError, ModuleContractError
from trainstack.trainer.arg_matching import default_metric_inputs, parameters_of

ROWS = [{"x": torch.full((4,), i / 8), "labels": torch.tensor(i % 3)} for i in range(8)]


class OwnLoss(nn.Module):
    """Takes labels and any keyword argument, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None, **kwargs: Any) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"logits": logits} | ({} if labels is None else {"loss": cross_entropy(logits, labels)})


class Accuracy:
    def __init__(self) -> None:
        self.reset()

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.right += int((preds.argmax(1) == target).sum())
        self.count += len(target)

    def compute(self) -> float:
        return self.right / self.count

    def reset(self) -> None:
        self.right = self.count = 0


def run(module: ts.ModuleInterface, folder: Path, **more: Any) -> ts.Trainer:
    more = {"epochs": 1, "train_batch_size": 4, "writers": [], "progress": "none", **more}
    trainer = ts.Trainer(module, ts.TrainerArguments(output_dir=folder, **more))
    trainer.train()
    return trainer


def value(trainer: ts.Trainer, name: str) -> float:
    return trainer.history.get_latest_metric(name)


def test_metrics_get_labels_that_the_model_takes(tmp_path: Path) -> None:
    module = ts.SupervisedModule(
        OwnLoss(),
        None,
        "sgd",
        ROWS,
        ROWS,
        metrics={"own": Accuracy(), "f": ts.metric_of(lambda target, preds: float((target == preds).mean()))},
        compute_metrics=lambda both: {"acc": float((both.predictions.argmax(-1) == both.label_ids).mean())},
    )
    trainer = run(module, tmp_path)

    assert value(trainer, "val/own") == value(trainer, "val/f") == value(trainer, "val/acc") > 0


def test_metrics_match_the_names_of_a_custom_val_step(tmp_path: Path) -> None:
    class Ranks(ts.SupervisedModule):
        def val_step(self, global_step: int, batch: Any, device: torch.device) -> Any:
            return {"preds": torch.eye(3)[batch["labels"]], "target": batch["labels"]}

    trainer = run(Ranks(OwnLoss(), None, "sgd", ROWS, ROWS, metrics={"own": Accuracy()}), tmp_path)
    assert value(trainer, "val/own") == 1


class TestLosses:
    def test_a_dict_of_losses_is_added_up(self, tmp_path: Path) -> None:
        class Pairs(Accuracy):
            def update(self, preds: Any, target: Any) -> None:
                self.right += sum(p["boxes"].shape == t["boxes"].shape for p, t in zip(preds, target, strict=True))
                self.count = 1

        class Detector(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Linear(2, 2, bias=False)
                nn.init.eye_(self.net.weight)

            def forward(self, images: Any, targets: Any = None) -> Any:
                if not self.training:
                    return [{"boxes": self.net(image)} for image in images]
                pairs = zip(images, targets, strict=True)
                loss = torch.stack([(self.net(one) - t["boxes"]).pow(2).mean() for one, t in pairs]).mean()
                return {"one": loss, "two": 2 * loss}

        data = [(torch.ones(1 + i % 3, 2), {"boxes": torch.zeros(1 + i % 3, 2)}) for i in range(8)]
        module = ts.SupervisedModule(
            Detector(),
            None,
            "sgd",
            data,
            data,
            optimizer_kwargs={"lr": 0.0},
            collate_fn=lambda samples: tuple(zip(*samples, strict=True)),
            loss_weight=lambda batch: len(batch[0]),
            metrics={"pairs": Pairs()},
        )
        trainer = run(module, tmp_path, train_batch_size=8)

        assert value(trainer, "train/loss_epoch") == 3
        assert value(trainer, "val/pairs") == 8

    def test_other_outputs_are_still_refused(self, tmp_path: Path) -> None:
        class Pictures(OwnLoss):
            def forward(self, x: Tensor, **kwargs: Any) -> dict[str, Tensor]:
                return {"one": self.net(x).mean(), "picture": x}

        with pytest.raises(ModuleContractError, match=r"returned the items \['one', 'picture'\]"):
            run(ts.SupervisedModule(Pictures(), None, "sgd", ROWS), tmp_path)


class TestAdapted:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    class Wrapper(nn.Module):
        """A wrapper like `PeftModel`."""

        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base

        def get_base_model(self) -> nn.Module:
            return self.base

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.base(*args, **kwargs)

    def test_a_wrapped_model_has_the_parameters_of_its_base(self, tmp_path: Path) -> None:
        rows = [{**row, "idx": torch.tensor(0)} for row in ROWS]
        module = ts.SupervisedModule(
            self.Wrapper(self.Plain()), lambda input, labels: cross_entropy(input, labels), "sgd", rows
        )
        run(module, tmp_path)

        assert parameters_of(module.model).names == ("x",)
        assert not parameters_of(module.model).takes_all
        assert parameters_of(self.Wrapper(OwnLoss())).takes_all

    def test_args_without_kwargs_are_refused(self) -> None:
        with pytest.raises(ModuleContractError, match=r"takes \*args by position only"):
            parameters_of(lambda *args: None)
        assert parameters_of(lambda *args, x, **kwargs: None).names == ("x",)


class Columns(list[dict[str, Tensor]]):
    """Has the interface of `datasets.Dataset`."""

    @property
    def column_names(self) -> list[str]:
        return list(self[0])

    def remove_columns(self, names: list[str]) -> Columns:
        return Columns({key: item for key, item in row.items() if key not in names} for row in self)


class TestColumns:
    data = Columns({**row, "text": "words"} for row in ROWS)  # type: ignore[dict-item]

    @staticmethod
    def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}

    def module(self, **more: Any) -> ts.SupervisedModule:
        return ts.SupervisedModule(OwnLoss(), None, "sgd", self.data, collate_fn=self.collate, **more)

    def test_unused_columns_are_dropped_on_request(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO):
            module = self.module(remove_unused_columns=True, val_dataset={"one": self.data})
        run(module, tmp_path)

        assert module.train_dataset.column_names == module.val_dataset["one"].column_names == ["x", "labels"]
        assert "the columns text are dropped" in caplog.text

    def test_unused_columns_are_logged_by_default(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO):
            assert self.module().train_dataset is self.data
        assert "has the columns text, which neither the model nor the loss uses" in caplog.text

    def test_renamed_columns_and_target_keys_are_kept(self) -> None:
        module = self.module(remove_unused_columns=True, input_mapping={"text": "x2"})
        assert module.train_dataset is self.data
        assert self.module(remove_unused_columns=True, target_keys=["text"]).train_dataset is self.data

    def test_column_options_without_known_columns_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="with a list, whose columns are not known"):
            ts.SupervisedModule(OwnLoss(), None, "sgd", ROWS, remove_unused_columns=True)
        with pytest.raises(ConfigurationError, match="a function as input_mapping"):
            self.module(remove_unused_columns=True, input_mapping=dict)
        with pytest.raises(ConfigurationError, match=r"would drop all columns: text.*use labels, x"):
            ts.SupervisedModule(OwnLoss(), None, "sgd", Columns([{"text": ROWS[0]["x"]}]), remove_unused_columns=True)


def test_train_collate_fn_applies_to_training_only(tmp_path: Path) -> None:
    calls = []

    def mix(samples: Any) -> Any:
        calls.append(len(samples))
        return torch.utils.data.default_collate(samples)

    run(ts.SupervisedModule(OwnLoss(), None, "sgd", ROWS, ROWS, train_collate_fn=mix), tmp_path)
    assert calls == [4, 4]


class TestMetricOf:
    def test_batches_are_concatenated_and_padded(self) -> None:
        metric = ts.metric_of(lambda target, preds: (target.tolist(), preds.tolist()), predictions=lambda p: p)
        metric.update(torch.ones(1, 2), torch.ones(1, 2))
        metric.update(torch.zeros(1, 3), torch.zeros(1, 3))
        assert metric.compute() == ([[1, 1, -100], [0, 0, 0]],) * 2
        metric.reset()
        assert metric.compute() == ([], [])

    def test_logits_become_classes_and_ignored_labels_are_removed(self) -> None:
        metric = ts.metric_of(lambda target, preds: (target.tolist(), preds.tolist()))
        logits = torch.eye(3)[torch.tensor([[2, 1]])].transpose(1, 2)  # (samples, classes, tokens)
        metric.update(logits, torch.tensor([[2, -100]]))
        assert metric.compute() == ([2], [2])

    def test_options_reach_the_function(self) -> None:
        from sklearn.metrics import f1_score

        metric = ts.metric_of(f1_score, average="macro")
        metric.update(torch.eye(3), torch.tensor([0, 1, 1]))
        assert metric.compute() == pytest.approx(f1_score([0, 1, 1], [0, 1, 2], average="macro"))

    def test_a_class_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="give a function of targets and predictions"):
            ts.metric_of(Accuracy)


def test_the_target_of_an_object_is_its_y() -> None:
    class Graphs:
        y = torch.ones(2)

    predictions = torch.zeros(2, 3)
    assert default_metric_inputs((torch.tensor(0.0), predictions), Graphs()) == (predictions, Graphs.y)


def test_as_is_accepts_a_custom_loader(tmp_path: Path) -> None:
    class Parts(torch.utils.data.DataLoader[Any]):
        """`batch_size` counts parts of a graph."""

    class Own(ts.SupervisedModule):
        wrap = staticmethod(lambda loader: loader)

        def get_train_dataloader(self, sampler: type, batch_size: int) -> Any:
            return self.wrap(Parts(ROWS, batch_size=2))

    with pytest.raises(ModuleContractError, match=r"trainstack\.as_is\(loader\)"):
        run(Own(OwnLoss(), None, "sgd", ROWS), tmp_path / "refused")
    Own.wrap = staticmethod(ts.as_is)
    trainer = run(Own(OwnLoss(), None, "sgd", ROWS), tmp_path / "run")

    assert trainer.state.global_step == 4
    loader = pickle.loads(pickle.dumps(ts.as_is([1, 2])))
    assert (len(loader), list(loader)) == (2, [1, 2])
    assert not hasattr(ts.as_is(iter([1])), "__len__")
