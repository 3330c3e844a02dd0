"""Evaluation without training, on any data, with outputs of any lengths."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, train
from tests.helpers.processes import run_world

LENGTHS = (2, 1, 3, 1, 2, 2, 4)


class EvaluatesOnly(Classifier):
    """Methods for training raise."""

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        raise AssertionError("training data are requested")

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
        raise AssertionError("optimizers are requested")

    def test_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.val_step(global_step, batch, device)

    def predict_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.net(batch[0])


class Rows(ts.ModuleInterface):
    """Predicts as many columns as its longest row has items, as a padded batch of sentences does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)

    get_train_dataloader = EvaluatesOnly.get_train_dataloader
    get_optimizers_schedulers = EvaluatesOnly.get_optimizers_schedulers

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        raise AssertionError("trained")

    def predict_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return {"ids": batch, "length": (batch >= 0).sum(1)}

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.predict_step(global_step, batch, device)


def pad(rows: list[Any]) -> Any:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def sentences() -> list[Any]:
    return [torch.full((length,), index) for index, length in enumerate(LENGTHS)]


class Sentences:
    data_collator = staticmethod(pad)

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> Any:
        return sentences()[index]


def predicted(directory: str, backend: str = "ddp") -> dict[str, Any]:
    """Predictions of different lengths, in each of the three forms; as plain lists."""
    # 7: an evaluation does not need a training batch that two processes can share
    trainer = ts.Trainer(Rows(), arguments(directory, backend=backend, val_batch_size=2, train_batch_size=7))
    listed = trainer.predict(Sentences())
    padded = trainer.predict(Sentences(), pad_value=-9)
    streamed = [batch["ids"].tolist() for batch in trainer.predict(Sentences(), stream=True)]
    own = trainer.predict(DataLoader(sentences(), batch_size=2, collate_fn=pad), stream=True)
    return {
        "list": [batch.tolist() for batch in listed["ids"]],
        "lengths": listed["length"].tolist(),
        "padded": padded["ids"].tolist(),
        "stream": streamed,
        "loader": [batch["ids"].tolist() for batch in own],
        "validated": [batch.tolist() for batch in trainer.validate(Sentences())["default"]["ids"]],
    }


EXPECTED = [pad(sentences()[i : i + 2]).tolist() for i in range(0, len(LENGTHS), 2)]


@pytest.mark.spec("PA-19")
def test_predictions_of_different_lengths_are_a_list_padded_or_streamed(tmp_path: Path) -> None:
    one = predicted(str(tmp_path), "sp")
    assert one["list"] == one["stream"] == one["loader"] == one["validated"] == EXPECTED
    assert one["lengths"] == list(LENGTHS)
    assert one["padded"] == [row + [-9] * (4 - len(row)) for batch in EXPECTED for row in batch]


@pytest.mark.distributed
def test_predictions_on_two_ranks_equal_those_of_one(tmp_path: Path) -> None:
    one = predicted(str(tmp_path), "sp")
    assert run_world(2, predicted, directory=str(tmp_path / "two")) == [one, one]


def predicted_of_few(directory: str, backend: str = "ddp") -> list[Any]:
    """Shapes and values of predictions of one sample and of three: a second rank gets none of the one."""
    trainer = ts.Trainer(EvaluatesOnly(), arguments(directory, backend=backend))
    data = numbers(3)
    some = [trainer.predict(DataLoader(TensorDataset(*data[:count]), batch_size=2)) for count in (1, 3)]
    return [[list(one.shape), one.flatten().tolist()] for one in some]


@pytest.mark.distributed
def test_a_rank_without_a_batch_predicts_a_tensor_too(tmp_path: Path) -> None:
    alone = predicted_of_few(str(tmp_path), "sp")
    assert [shape for shape, _ in alone] == [[1, 3], [3, 3]]
    for rank in run_world(2, predicted_of_few, directory=str(tmp_path / "two")):
        for (shape, values), (its_shape, its_values) in zip(alone, rank, strict=True):
            assert shape == its_shape
            assert values == pytest.approx(its_values)


def test_tensors_with_other_numbers_of_dimensions_are_not_padded(tmp_path: Path) -> None:
    class Odd(Rows):
        def predict_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return batch if len(batch) > 1 else batch[0]

    trainer = ts.Trainer(Odd(), arguments(tmp_path))
    assert [one.dim() for one in trainer.predict(Sentences(), batch_size=2)] == [2, 2, 2, 1]
    with pytest.raises(ts.ModuleContractError, match=r"\[1, 2\] dimensions cannot be padded"):
        trainer.predict(Sentences(), batch_size=2, pad_value=0)


@pytest.mark.spec("PA-19")
def test_an_export_is_evaluated_without_training_data_and_optimizers(tmp_path: Path) -> None:
    trained = train(Classifier(validate=True, seed=1), tmp_path / "run")
    expected = trained.validate().metrics["val/loss"]
    trained.export(tmp_path / "export")

    args = arguments(tmp_path / "other", init_weights_from=str(tmp_path / "export"))
    trainer = ts.Trainer(EvaluatesOnly(validate=True), args)
    assert trainer.validate().metrics["val/loss"] == expected
    assert trainer.test(numbers(41)).metrics["test/loss"] == expected
    assert torch.equal(trainer.predict(numbers(41)).argmax(1), trained.validate()["default"][1])
    with pytest.raises(AssertionError, match="training data are requested"):
        trainer.train()


def test_a_checkpoint_is_evaluated_with_the_averages_of_ema(tmp_path: Path) -> None:
    saves = {"checkpointer_args": ts.DefaultCheckpointerArguments()}
    args = arguments(tmp_path, epochs=2, **saves)
    trained = ts.Trainer(Classifier(validate=True), args, callbacks=[ts.callbacks.EMA(0.9, use_at_end=False)])
    trained.train()
    expected = trained.validate().metrics["val/loss"]

    ema = ts.callbacks.EMA(0.9, use_at_end=False)
    resumed = ts.Trainer(EvaluatesOnly(validate=True), arguments(tmp_path, resume=True, **saves), callbacks=[ema])
    assert resumed.validate().metrics["val/loss"] == expected
    assert resumed.state.global_step == trained.state.global_step


@pytest.mark.parametrize("backend", ["sp", "sp-bf16", "sp-amp"])
def test_an_evaluation_before_training_changes_no_bit_of_it(backend: str, tmp_path: Path) -> None:
    def trained(evaluates: bool) -> dict[str, Any]:
        module = Classifier(validate=True, dropout=0.5, scheduler=True)
        trainer = ts.Trainer(module, arguments(tmp_path / str(evaluates), backend=backend, epochs=2))
        torch.manual_seed(3)
        if evaluates:
            trainer.validate()
        trainer.train()
        return module.state_dict()

    plain, after = trained(False), trained(True)
    assert all(torch.equal(plain[name], after[name]) for name in plain)


@pytest.mark.spec("PA-19")
def test_batch_size_and_collate_fn_are_arguments_of_evaluations(tmp_path: Path) -> None:
    seen: list[int] = []

    def collate(rows: Any) -> Any:
        seen.append(len(rows))
        return torch.utils.data.default_collate(rows)

    trainer = ts.Trainer(EvaluatesOnly(validate=True), arguments(tmp_path, val_batch_size=7))
    whole = trainer.validate(numbers(41), batch_size=40, collate_fn=collate)
    assert seen == [40, 1]
    assert whole.metrics["val/loss"] == pytest.approx(trainer.validate(batch_size=3).metrics["val/loss"])
    assert set(trainer.validate({"a": numbers(5), "b": DataLoader(numbers(6), batch_size=2)})) == {"a", "b"}
    with pytest.raises(ts.ConfigurationError, match="batch_size=2 and collate_fn=None with a DataLoader"):
        trainer.validate(DataLoader(numbers(5)), batch_size=2)


def test_a_supervised_module_without_training_data_can_evaluate(tmp_path: Path) -> None:
    module = ts.SupervisedModule(nn.Linear(6, 3), nn.CrossEntropyLoss(), val_dataset=numbers(9))
    trainer = ts.Trainer(module, arguments(tmp_path))
    assert list(trainer.validate().metrics) == ["val/loss"]
    for use in (trainer.train, lambda: trainer.plan):
        with pytest.raises(ts.ModuleContractError, match="has no train_dataset, so it can evaluate"):
            use()
    module.train_dataset = numbers(9)
    with pytest.raises(ts.ModuleContractError, match="has no optimizer, so it can evaluate"):
        trainer.train()


def test_a_stream_evaluates_lazily_and_restores_the_module(tmp_path: Path) -> None:
    module = EvaluatesOnly(dropout=0.5)
    trainer = ts.Trainer(module, arguments(tmp_path, val_batch_size=10))
    stream = trainer.predict(numbers(41), stream=True)
    assert inspect.isgenerator(stream)
    before = torch.get_rng_state()
    first = next(stream)
    assert module.training
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        module.net[-1].bias += 1.0  # type: ignore[union-attr]
    rest = list(stream)
    assert [len(one) for one in (first, *rest)] == [10, 10, 10, 10, 1]
    now = trainer.predict(numbers(41))
    assert torch.allclose(torch.cat([first + 1.0, *rest]), now)
    with pytest.raises(ts.ConfigurationError, match="write one loader or dataset, and no pad_value"):
        trainer.predict({"a": numbers(3)}, stream=True)


@pytest.mark.parametrize(
    ("pad_value", "convert"),
    [(-0.5, Tensor.long), (2, Tensor.bool), (-1, lambda rows: rows.to(torch.uint8)), (float("nan"), Tensor.long)],
)
def test_a_pad_value_outside_of_the_dtype_is_refused(pad_value: Any, convert: Any, tmp_path: Path) -> None:
    class Converted(Rows):
        def predict_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return convert(batch)

    trainer = ts.Trainer(Converted(), arguments(tmp_path))
    rows = [torch.ones(length) for length in LENGTHS]
    with pytest.raises(ts.ModuleContractError, match=r"pad_value=.* with tensors of torch\..*cannot represent it"):
        trainer.predict(rows, batch_size=2, collate_fn=pad, pad_value=pad_value)


def test_invalid_data_and_batch_sizes_are_refused(tmp_path: Path) -> None:
    trainer = ts.Trainer(Rows(), arguments(tmp_path))
    with pytest.raises(ts.ConfigurationError, match="gave None instead of data"):
        trainer.predict(None)
    with pytest.raises(ts.ModuleContractError, match="returned str under 'default'"):
        trainer.predict("train.csv")
    for size in (0, -2, 2.5, True):
        with pytest.raises(ts.ConfigurationError, match=f"batch_size={size}: write an integer of at least 1"):
            trainer.predict([torch.ones(1)], batch_size=size)
        with pytest.raises(ts.ConfigurationError, match=f"batch_size={size}: write an integer of at least 1"):
            trainer.validate(batch_size=size)


def test_batch_size_applies_to_an_iterable_dataset(tmp_path: Path) -> None:
    class Numbers(IterableDataset[Tensor]):
        def __iter__(self) -> Any:
            return iter(torch.arange(7.0)[:, None])

    trainer = ts.Trainer(Rows(), arguments(tmp_path))
    found = list(trainer.predict(Numbers(), batch_size=3, stream=True))
    assert [one["ids"].flatten().tolist() for one in found] == [[0, 1, 2], [3, 4, 5], [6]]


def test_lists_of_outputs_are_refused_with_a_correction(tmp_path: Path) -> None:
    class Texts(Rows):
        def predict_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return [str(row) for row in batch]

    trainer = ts.Trainer(Texts(), arguments(tmp_path))
    with pytest.raises(ts.ModuleContractError, match=r"If it has one for each sample, use predict\(\.\.\., stream"):
        trainer.predict(TensorDataset(torch.ones(5)), batch_size=2, collate_fn=lambda rows: [row[0] for row in rows])


def test_unused_averaged_weights_of_a_checkpoint_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def made(resume: Any, *callbacks: Any) -> ts.Trainer:
        args = arguments(tmp_path, resume=resume, checkpointer_args=ts.DefaultCheckpointerArguments())
        return ts.Trainer(Classifier(validate=True), args, callbacks=callbacks)

    trained = made(False, ts.callbacks.EMA(0.9), ts.callbacks.EarlyStopping(patience=9))
    trained.train()
    averaged = made("auto", ts.callbacks.EMA(0.9)).validate().metrics["val/loss"]
    assert averaged == trained.validate().metrics["val/loss"]
    assert "evaluated weights" not in caplog.text
    assert made("auto").validate().metrics["val/loss"] != averaged
    assert caplog.text.count("evaluated weights of its callback 'EMA'") == 1
    assert "EarlyStopping" not in caplog.text
