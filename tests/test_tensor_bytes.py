"""Tensors with one element have a memory layout that torch does not view as bytes: everything works with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import arguments, weights
from tests.helpers.processes import run_world
from tests.helpers.workers.collectives import Strided, strided
from trainstack._tensor_bytes import bytes_of


def test_bytes_are_a_view_of_memory_that_is_in_order() -> None:
    for tensor in (torch.zeros(2, 3), torch.zeros(()), torch.zeros(1, 2)[:, 0], torch.zeros(5)[3:]):
        bytes_of(tensor).fill_(255)
        assert torch.isnan(tensor).all()
    columns = torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).t()
    assert bytes_of(columns).tolist() == [1, 3, 2, 4]
    bytes_of(columns).zero_()
    assert columns.all()
    assert bytes_of(torch.zeros(0, 3)).shape == (0,)


@pytest.mark.parametrize(
    "changes",
    [
        {"record": "full", "verify_replay": 1.0},
        {"backend": "sp-dp"},
        {"checkpointer_args": ts.DefaultCheckpointerArguments(every_n_steps=1, async_save=True)},
    ],
    ids=["recorded", "private", "background"],
)
def test_a_strided_buffer_of_one_element_is_saved_and_restored(changes: dict[str, object], tmp_path: Path) -> None:
    changes = {"epochs": 2, "checkpointer_args": ts.DefaultCheckpointerArguments(every_n_steps=1), **changes}
    whole = ts.Trainer(Strided(), arguments(tmp_path / "whole", **changes))
    whole.train()
    for steps in (4, None):
        again = ts.Trainer(module := Strided(), arguments(tmp_path / "cut", resume="auto", **changes))
        again.train(**({} if steps is None else {"max_steps": steps}))
    assert torch.equal(weights(whole.module), weights(module))
    assert module.factor.tolist() == [0.5]


@pytest.mark.distributed
def test_strided_values_of_one_element_pass_between_ranks(tmp_path: Path) -> None:
    one, other = run_world(2, strided, folder=str(tmp_path))
    assert one == other
    assert len(one) == 17
