"""The package as type checkers see it; `make check` runs mypy over `tests/helpers/typed_module.py`."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import trainstack as ts
from tests.helpers import typed_module
from tests.helpers.modules import arguments
from trainstack.trainer.module_interface import CallbackInterface


def test_the_typed_forms_of_the_hooks_are_called(tmp_path: Path) -> None:
    args = arguments(tmp_path, val_batch_size=8)
    with_outputs, without = typed_module.WithOutputs(), typed_module.WithoutOutputs()
    assert typed_module.run(without, args) == ["begin", "backward", "step", "epoch", "default", "end"]
    assert typed_module.run(with_outputs, args) == ["step", "epoch", "default"]


def test_each_hook_is_declared_by_the_untyped_decorator() -> None:
    """Type checkers compare an override with the type that `_hook` declares, which accepts all parameters."""
    tree = ast.parse(inspect.getsource(CallbackInterface))
    hooks = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert len(hooks) == 6
    assert all([ast.unparse(one) for one in hook.decorator_list] == ["_hook"] for hook in hooks)


def test_pyright_can_evaluate_the_names_of_the_package() -> None:
    """It supports `__all__ += module.__all__` for one module at a time, and no list of several."""
    tree = ast.parse(Path(ts.__file__).read_text(encoding="utf-8"))
    added = [ast.unparse(node.value) for node in ast.walk(tree) if isinstance(node, ast.AugAssign)]
    assert added == [f"{name}.__all__" for name in ("errors", "backends", "checkpointing", "trainer")]
