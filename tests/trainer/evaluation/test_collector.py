"""`OutputCollector`: its results for each kind of output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import trainstack as ts


def collected(*outputs: Any) -> Any:
    collector = ts.OutputCollector()
    for output in outputs:
        collector.collect(output)
    return collector.all_outputs


@pytest.mark.spec("PMB-06")
def test_tensors_are_joined_along_the_first_dimension() -> None:
    joined = collected(torch.zeros(4, 2, 3), torch.ones(3, 2, 3))

    assert [t.shape for t in joined] == [(7, 2, 3)]


@pytest.mark.spec("PMB-07", "F113")
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_0_dim_tensor_becomes_one_item_a_step(steps: int) -> None:
    assert collected(*[torch.tensor(1.0)] * steps)[0].shape == (steps,)
    assert collected(*[torch.ones(1, 1)] * steps)[0].shape == (steps, 1)


@pytest.mark.spec("PMB-08", "B5")
def test_tuples_and_lists_are_joined_by_position() -> None:
    loss, labels = collected(*[(torch.tensor(0.5), torch.zeros(n, 3)) for n in (4, 3, 4, 3)])

    assert loss.shape == (4,)
    assert labels.shape == (14, 3)


@pytest.mark.spec("PMB-08", "F112", "F113")
def test_nested_structures_are_joined_item_by_item() -> None:
    step = {"logits": torch.ones(2, 3), "text": ["a", "b"], "inner": (torch.tensor(1), None, {"x": torch.ones(1)})}

    joined = collected(step, step)

    assert joined["logits"].shape == (4, 3)
    assert joined["text"] == [["a", "b"], ["a", "b"]]
    inner = joined["inner"]
    assert (inner[0].tolist(), inner[1], inner[2]["x"].shape) == ([1, 1], [None, None], (2,))


def test_a_list_of_strings_is_joined_by_position() -> None:
    assert collected(["a", 1], ["b", 2]) == [["a", "b"], [1, 2]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float64, torch.complex64])
def test_dtypes_are_kept(dtype: torch.dtype) -> None:
    assert collected(torch.ones(2, dtype=dtype), torch.ones(1, dtype=dtype))[0].dtype == dtype


def test_inference_tensors_are_collected() -> None:
    with torch.inference_mode():
        outputs = [torch.ones(2) * i for i in range(2)]

    assert collected(*outputs)[0].tolist() == [0.0, 0.0, 1.0, 1.0]


def test_collected_outputs_have_no_graph() -> None:
    assert not collected(torch.ones(2, requires_grad=True) * 2)[0].requires_grad


def test_a_collector_is_empty_before_outputs_and_after_reset() -> None:
    collector = ts.OutputCollector()
    assert collector.all_outputs == []
    collector.collect(torch.ones(1))
    collector.reset()
    assert collector.all_outputs == []
    collector.collect({"other": 1})
    assert collector.all_outputs == {"other": [1]}


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (None, "earlier steps returned a list here, this one returned NoneType"),
        ((torch.ones(1),), r"the items \[0, 1\], this one \[0\]"),
        ((torch.ones(1), "x"), r"outputs\[1\]: earlier steps returned a tensor here, this one returned str"),
    ],
)
def test_another_structure_than_before_is_refused(second: Any, message: str) -> None:
    with pytest.raises(ts.ModuleContractError, match=message):
        collected((torch.ones(1), torch.ones(2, 3)), second)


def test_tensors_of_different_lengths_become_a_list() -> None:
    first, second = collected((torch.ones(1), torch.ones(2, 3)), (torch.ones(1), torch.ones(2, 5)))
    assert first.shape == (2,)
    assert [tuple(one.shape) for one in second] == [(2, 3), (2, 5)]


def test_a_tensor_that_is_changed_afterwards_is_refused() -> None:
    """Otherwise the outputs of every step would have the values of the last one."""
    buffer = torch.zeros(2)
    collector = ts.OutputCollector()
    for value in (1.0, 2.0):
        collector.collect(buffer.fill_(value))

    with pytest.raises(ts.ModuleContractError, match=r"step 0 returned was changed in place.*tensor\.clone\(\)"):
        _ = collector.all_outputs


@dataclass(frozen=True)
class Output:
    scores: torch.Tensor
    more: Any
    name: str = "step"


def test_a_dataclass_is_copied_without_graphs() -> None:
    scores, counts = torch.ones(2, requires_grad=True), np.zeros(2)
    given = Output(scores * 2, {"list": [scores * 3, (scores * 4, counts)], "own": Output(scores * 5, None)})
    ((kept,),) = collected(given)
    assert type(kept) is Output
    tensors = [kept.scores, kept.more["list"][0], kept.more["list"][1][0], kept.more["own"].scores]
    assert [tensor.tolist() for tensor in tensors] == [[2.0, 2.0], [3.0, 3.0], [4.0, 4.0], [5.0, 5.0]]
    assert not any(tensor.requires_grad for tensor in tensors)
    with torch.no_grad():
        given.scores.zero_()
    counts += 1
    assert kept.scores.tolist() == [2.0, 2.0]
    assert kept.more["list"][1][1].tolist() == [0.0, 0.0]
    assert given.scores.requires_grad  # the object of the step is unchanged


def test_dataclasses_in_lists_are_copied_without_graphs() -> None:
    scores = torch.ones(2, requires_grad=True)
    (output,), (inner,) = collected([Output(scores * 2, None), [Output(scores * 3, None)]])
    assert [output.scores.tolist(), inner[0].scores.tolist()] == [[2.0, 2.0], [3.0, 3.0]]
    assert not output.scores.requires_grad
    assert not inner[0].scores.requires_grad


def test_a_scalar_may_be_changed_afterwards() -> None:
    running, collector = torch.tensor(1.0), ts.OutputCollector()
    for _ in range(2):
        collector.collect(running)
        running.mul_(2)
    assert collector.all_outputs[0].tolist() == [1.0, 2.0]


def test_borrowed_steps_give_their_structure_and_no_rows() -> None:
    collector = ts.OutputCollector()
    collector.collect_structure({"logits": torch.ones(2, 3), "loss": torch.tensor(1.0)})
    assert {key: found.shape for key, found in collector.all_outputs.items()} == {"logits": (0, 3), "loss": (0,)}
