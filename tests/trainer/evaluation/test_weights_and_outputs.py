"""Each sample of an evaluation counts once, and outputs are collected as they were returned."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SequentialSampler,
    SubsetRandomSampler,
)

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers
from trainstack.trainer.evaluation.evaluator import Evaluator


@pytest.mark.parametrize("batch_size", [1, 2, 3, 9])
def test_validation_is_weighted_by_samples_for_any_batch(batch_size: int, tmp_path: Path) -> None:
    class Detection(Classifier):
        def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
            pictures = [(torch.zeros(3, 4, 4), index) for index in range(9)]
            return DataLoader(pictures, batch_size=batch_size, collate_fn=lambda items: tuple(zip(*items, strict=True)))

        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return torch.tensor([float(i == 8) for i in batch[1]]).mean()

    trainer = ts.Trainer(Detection(), arguments(tmp_path, val_batch_size=batch_size))
    assert trainer.validate().metrics["val/loss"] == pytest.approx(1 / 9)


def test_a_batch_of_unknown_size_is_refused() -> None:
    with pytest.raises(ts.ModuleContractError, match="batch_weight"):
        Classifier().batch_weight(((torch.zeros(3, 4), torch.zeros(3, 5)), (1, 2)))


@pytest.mark.parametrize(
    "outputs_of",
    [
        lambda step: torch.full((2,), float(step)),
        lambda step: (torch.full((2,), float(step)), {"x": torch.full((1, 2), step), "y": [f"text {step}"]}),
        lambda step: {"loss": torch.tensor(float(step)), "name": f"text {step}"},
    ],
    ids=["tensor", "tuple", "dict"],
)
def test_outputs_of_an_interrupted_step_are_removed(outputs_of: Any) -> None:
    interrupted, expected = ts.OutputCollector(), ts.OutputCollector()
    for step in (0, 1, 2):  # the first micro-batches of step 1 end, then it raises
        interrupted.collect(outputs_of(step))
        if step == 0:
            interrupted.mark()
    interrupted.back_to_mark()
    for collector, steps in ((interrupted, (1, 2)), (expected, (0, 1, 2))):
        for step in steps:
            collector.collect(outputs_of(step))

    assert describe(interrupted.all_outputs) == describe(expected.all_outputs)


def describe(outputs: Any) -> Any:
    """Outputs with lists instead of tensors, so that `==` compares them."""
    if isinstance(outputs, dict):
        return {key: describe(value) for key, value in outputs.items()}
    if isinstance(outputs, list):
        return [describe(value) for value in outputs]
    return outputs.tolist() if isinstance(outputs, torch.Tensor) else outputs


def test_collected_outputs_hold_no_memory_beyond_their_values() -> None:
    collector = ts.OutputCollector()
    base = torch.zeros(1000, 1000)
    buffer = np.zeros(2)
    for value in (1.0, 2.0):
        buffer[:] = value
        collector.collect((base[0, :4], buffer))

    rows, arrays = collector.all_outputs
    assert rows.shape == (8,)
    assert [array.tolist() for array in arrays] == [[1.0, 1.0], [2.0, 2.0]]
    kept = collector._root.children[0].kept  # type: ignore[union-attr, attr-defined]
    assert all(tensor.untyped_storage().nbytes() == 16 for tensor in kept)
    empty = ts.OutputCollector()
    empty.collect(((), []))
    with pytest.raises(ts.ModuleContractError, match="earlier steps returned a list here"):
        empty.collect(((), [torch.ones(1, requires_grad=True)]))


def test_states_are_not_collected_without_a_checkpoint(tmp_path: Path) -> None:
    trainer = ts.Trainer(Classifier(), arguments(tmp_path, epochs=2))
    trainer.get_state = lambda: pytest.fail("its state was read without a use")  # type: ignore[method-assign]
    trainer.save_model_checkpoint = lambda: None  # type: ignore[method-assign]
    trainer.train()

    assert copy.copy(trainer.state.last_epoch) == 1


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("handed", None),
        ("drop_last", None),
        ("subset", None),
        ("share", "5 samples were evaluated and the data set has 10"),
        ("own drop_last", "8 samples were evaluated and the data set has 10"),
        ("twice", "20 samples were evaluated and the data set has 10"),
        ("capped", None),
        ("counted by indices", "5 samples were evaluated and the data set has 10"),
    ],
)
def test_an_evaluation_of_other_samples_is_logged_once(
    kind: str, said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = numbers(10)

    class Evaluates(Classifier):
        def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
            if kind in ("handed", "drop_last"):
                return DataLoader(data, batch_size=4, sampler=sampler(data), drop_last=kind == "drop_last")
            if kind == "subset":
                part = torch.utils.data.Subset(data, range(5))
                return DataLoader(part, batch_size=4, sampler=sampler(part))
            if kind in ("share", "capped"):
                return DataLoader(data, batch_size=4, sampler=SubsetRandomSampler(range(5)))
            if kind == "twice":
                return DataLoader(data, batch_sampler=[list(range(10)), list(range(10))])
            if kind == "counted by indices":
                return DataLoader(data, batch_sampler=[list(range(5))], collate_fn=lambda samples: object())
            return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, True))

        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return torch.zeros(1)

    trainer = ts.Trainer(Evaluates(), arguments(tmp_path, max_val_steps_per_epoch=1 if kind == "capped" else None))
    trainer.validate()
    trainer.validate()

    told = [record.message for record in caplog.records if "samples were evaluated" in record.message]
    assert len(told) == (said is not None)
    if said is not None:
        assert told[0].startswith("val loader 'default': ")
        assert said in told[0]
        assert "sampler=sampler(dataset)" in told[0]


@pytest.mark.parametrize("kept", ["main", "own"])
def test_a_hook_with_outputs_needs_them_on_each_process(kept: Any) -> None:
    def evaluator(size: int, reads: bool) -> Any:
        context = SimpleNamespace(module=Classifier(), world=SimpleNamespace(size=size))
        return SimpleNamespace(_context=context, _hooks=SimpleNamespace(val_outputs=reads))

    with pytest.raises(ts.ConfigurationError, match=f"keep_outputs='{kept}', and Classifier.on_end_val_epoch"):
        Evaluator._kept(evaluator(2, True), kept)
    assert Evaluator._kept(evaluator(1, True), kept) == Evaluator._kept(evaluator(2, False), kept) == kept
    assert Evaluator._kept(evaluator(2, True), False) is True
