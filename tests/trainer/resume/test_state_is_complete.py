"""Every component with state is in the checkpoint: the test walks the live objects of a run and compares states."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, train
from trainstack.checkpointing.difference import children, differences
from trainstack.trainer.data.loader_state import LoaderState
from trainstack.trainer.resume.checkpoint_states import make_checkpoint

BACKENDS = ("sp", "sp-amp", "sp-bf16", "sp-dp")
OURS = ("trainstack", "torch", "tests", "opacus")


def objects_below(root: Any) -> Iterator[tuple[str, Any]]:
    """All objects below `root` by attributes, keys and positions, once each, with the path to each."""
    seen, ahead = {id(root)}, [("trainer", root)]
    kept = [root]
    while ahead:
        way, value = ahead.pop()
        yield way, value
        for name, inner in parts_of(value):
            if id(inner) not in seen and not isinstance(inner, type | types.ModuleType | torch.Tensor | str):
                seen.add(id(inner))
                kept.append(inner)  # so that no other object gets its id
                ahead.append((f"{way}.{name}", inner))


def parts_of(value: Any) -> list[tuple[Any, Any]]:
    inner = children(value)
    if inner is not None:
        return inner
    if isinstance(value, types.MethodType):
        return [("__self__", value.__self__)]
    if not type(value).__module__.startswith(OURS):
        return []
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if isinstance(name, str)]
    names = [*getattr(value, "__dict__", {}), *(name for name in slots if not name.startswith("__"))]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def state_of(value: Any) -> Any:
    """The state that `value` reports; None if it has none."""
    if isinstance(value, LoaderState):
        return value.get_state(within=True)
    if isinstance(value, torch.optim.Optimizer):  # whose parameters a checkpoint names, and `state_dict` numbers
        state = value.state_dict()
        options = [{name: one for name, one in group.items() if name != "params"} for group in state["param_groups"]]
        return {"state": state["state"], "options": dict(enumerate(options))}
    for name in ("get_state", "state_dict"):
        method = getattr(value, name, None)
        if isinstance(method, types.MethodType | types.BuiltinMethodType) and not isinstance(value, torch.Tensor):
            return method()
    return None


def is_generator(value: Any) -> bool:
    """Whether `value` is a generator; private runs use generators that are stored nowhere."""
    kinds = (torch.Generator, np.random.RandomState, np.random.Generator)
    return isinstance(value, kinds) or type(value).__name__ == "_TorchGenerator"


def subtrees(tree: Any) -> Iterator[Any]:
    yield tree
    for _, inner in children(tree) or ():
        yield from subtrees(inner)


def is_kept(state: Any, checkpoint: list[Any]) -> bool:
    """Whether `state`, or each of its items, is in the checkpoint."""
    if any(type(state) is type(kept) and not any(True for _ in differences(state, kept)) for kept in checkpoint):
        return True
    return isinstance(state, Mapping) and all(is_kept(inner, checkpoint) for inner in state.values())


def missing(trainer: ts.Trainer) -> list[str]:
    loader_state = trainer._ready().data.loader_state.get_state(within=True)
    made = make_checkpoint(trainer._context, trainer.plan, trainer.get_state, None, loader_state)
    kept = list(
        subtrees([made.module_interface_state, made.trainer_state, made.trainer_backend_state, made.history_state])
    )
    asked = [(way, value, state_of(value)) for way, value in objects_below(trainer) if not is_generator(value)]
    holders = [(way, value, state) for way, value, state in asked if state]
    assert {"AdamW", "CosineAnnealingLR"} <= {type(value).__name__ for _, value, _ in holders}, "the walk finds them"
    return [f"{way} ({type(value).__name__})" for way, value, state in holders if not is_kept(state, kept)]


def trained(tmp_path: Path, backend: str = "sp") -> ts.Trainer:
    module = Classifier(optimizer=torch.optim.AdamW, scheduler=True, validate=True)
    return train(module, tmp_path, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_everything_that_has_a_state_is_in_the_checkpoint(tmp_path: Path, backend: str) -> None:
    assert missing(trained(tmp_path, backend)) == []


class Counter:
    def __init__(self) -> None:
        self.count = 7.25

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count}


@pytest.mark.parametrize("where", ["_ready().loop", "trainer_backend", "module"])
def test_the_walk_finds_a_component_that_is_not_stored(tmp_path: Path, where: str) -> None:
    trainer = trained(tmp_path)
    holder: Any = trainer._ready().loop if where == "_ready().loop" else getattr(trainer, where)
    holder.extra = Counter()
    assert len(missing(trainer)) == 1
    assert "extra (Counter)" in missing(trainer)[0]
