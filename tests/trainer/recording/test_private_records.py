"""The step log of a private run does not depend on the sampled records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import trainstack as ts
from tests.helpers.modules import Classifier, numbers
from tests.helpers.private_runs import private
from trainstack.step_log import Flag, read_step_log
from trainstack.step_log.blocks import Block, read_blocks
from trainstack.step_log.format import Kind

RECORDS = 41


def blocks_of(folder: Path, changed: int | None, **changes: Any) -> list[Block]:
    """The log of a run on a data set, or on one in which the record `changed` differs."""
    inputs, labels = (tensor.clone() for tensor in numbers(RECORDS).tensors)
    if changed is not None:
        inputs[changed], labels[changed] = inputs[changed] + 3.0, (labels[changed] + 1) % 3
    torch.manual_seed(0)
    module = Classifier(TensorDataset(inputs, labels), scheduler=True)
    saving = ts.DefaultCheckpointerArguments(every_n_steps=3, keep_last=None)
    ts.Trainer(module, private(folder, epochs=2, log_every=2, checkpointer_args=saving, **changes)).train()
    return list(read_blocks(read_step_log(folder).path))


@pytest.mark.parametrize("mode", ["steps", "full"])
def test_neighbouring_data_sets_give_the_same_bytes(mode: str, tmp_path: Path) -> None:
    """All blocks are compared except those that name the run and its checkpoints by hashes of covered files."""
    one = blocks_of(tmp_path / "one", None, record=mode)
    other = blocks_of(tmp_path / "other", 7, record=mode)
    assert [block.kind for block in one] == [block.kind for block in other]
    named = (Kind.START, Kind.CHECKPOINT)
    mine = [block.payload for block in one if block.kind not in named]
    assert mine == [block.payload for block in other if block.kind not in named]
    assert Kind.DETAILS not in {block.kind for block in one}

    first, second = (read_step_log(tmp_path / name) for name in ("one", "other"))
    assert set(first.entries["flags"].tolist()) == {int(Flag.HIDDEN)}
    assert not first.entries["loss"].any()
    assert not first.entries["norm"].any()
    assert not first.entries["samples"].any()
    assert len(set(first.entries["rates"].tolist())) > 1
    start, neighbour = first.segments[0].description, second.segments[0].description
    assert start.keys() == {"arguments", "environment", "data", "code", "optimizers", "weights"}
    assert "length of the data set" not in start["data"]
    assert {**start, "arguments": {}} == {**neighbour, "arguments": {}}
    left_out = {"output_dir"}
    assert {name: text for name, text in start["arguments"].items() if name not in left_out} == {
        name: text for name, text in neighbour["arguments"].items() if name not in left_out
    }
    assert (start["weights"], start["code"]) == (neighbour["weights"], neighbour["code"])
    assert first.segments[0].generators == []
