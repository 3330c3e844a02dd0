"""`activation_checkpointing` and `compile="units"` change no number of a training in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainstack as ts
from tests.helpers.modules import arguments, weights
from tests.helpers.workers.sharded_models import Classifies
from trainstack.trainer.recomputation import Recomputes

EAGER = {"units": True, "backend": "eager"}


def module(name: str = "plain") -> Classifies:
    """A model whose blocks have dropout."""
    made = Classifies(name)
    for block in made.model.blocks:
        block.up = nn.Sequential(block.up, nn.Dropout(0.3))
    return made


def train(made: ts.ModuleInterface, **given: Any) -> ts.Trainer:
    torch.manual_seed(3)
    trainer = ts.Trainer(made, arguments("unused", epochs=2, train_batch_size=6, **given))
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", ["plain", "buffers"])
def test_recomputed_blocks_give_the_same_bits(name: str) -> None:
    """Dropout draws the same numbers again, and buffers are written once a pass."""
    plain, recomputed = module(name), module(name)
    calls = [0, 0]
    for number, made in enumerate((plain, recomputed)):
        made.model.blocks[0].up[0].register_forward_hook(lambda *given, n=number: calls.__setitem__(n, calls[n] + 1))
    train(plain)
    train(recomputed, activation_checkpointing=True)

    assert torch.equal(weights(plain), weights(recomputed))
    for (_, one), (_, other) in zip(plain.named_buffers(), recomputed.named_buffers(), strict=True):
        assert torch.equal(one, other)
    assert calls[1] == calls[0] + 6  # once more for each of 6 steps, none in validations
    assert list(plain.state_dict()) == list(recomputed.state_dict())


def test_a_later_run_recomputes_only_if_asked() -> None:
    made = module()
    train(made, activation_checkpointing=True)
    assert isinstance(made.model.blocks[0]._compiled_call_impl, Recomputes)
    train(made)

    assert not any(isinstance(part._compiled_call_impl, Recomputes) for part in made.modules())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch 2.13.0: its compiler asks inputs for it
def test_units_are_compiled_one_by_one() -> None:
    plain, compiled = module(), module()
    train(plain)
    trainer = train(compiled, compile=EAGER)

    assert (weights(plain) - weights(compiled)).abs().max() < 1e-10
    assert "2 models" in trainer._context.compiled.describe()  # type: ignore[union-attr]
    assert compiled.model._compiled_call_impl is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"activation_checkpointing": True, "compile": EAGER}, "torch does not run compiled code within a checkpoint"),
        ({"compile": "blocks"}, "write True, False, 'units' or a dict"),
        ({"compile": {"unit": True}}, "write True, False, 'units' or a dict"),
        ({"compile": "units", "backend": "sp-dp"}, "compile='units' in a private run"),
        ({"activation_checkpointing": True, "backend": "sp-dp"}, "activation_checkpointing=True in a private run"),
    ],
)
def test_combinations_that_cannot_work_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ts.errors.ConfigurationError) as refused:
        train(module(), **given)
    assert words in str(refused.value)


@pytest.mark.parametrize("given", [{"activation_checkpointing": True}, {"compile": "units"}])
def test_a_module_without_blocks_is_refused(given: dict[str, Any], tmp_path: Path) -> None:
    made = ts.SupervisedModule(nn.Linear(2, 1), nn.MSELoss(), "sgd", [(torch.zeros(2), torch.zeros(1))] * 4)
    with pytest.raises(ts.errors.ConfigurationError, match=r"repeats a block. Return the blocks from a method"):
        train(made, **given)
