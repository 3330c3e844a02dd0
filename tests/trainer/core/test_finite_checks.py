"""The check of weights before a save: all kinds of tensors, no temporary of a tensor's size, one read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers
from trainstack.backends.single_process import SingleProcess
from trainstack.trainer.core import tensors
from trainstack.trainer.core.tensors import are_finite

NAN, INF = float("nan"), float("inf")
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e5m2]


class Stack(SingleProcess):
    reads = 0

    def read(self, tensors: Any) -> list[float]:
        self.reads += 1
        return super().read(tensors)


def finite(*given: Tensor, fast_paths: bool = True) -> list[bool]:
    return are_finite(Stack(), given, fast_paths=fast_paths)


@pytest.mark.parametrize("fast_paths", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_element_decides(dtype: torch.dtype, fast_paths: bool) -> None:
    good = torch.ones(4, 3).to(dtype)
    given = [good, good.t(), good[0, 0], good[:0], good[:, ::2]]
    for value in (NAN, INF, -INF):
        bad = good.clone()
        bad[2, 1] = value
        given += [bad, bad.t()]
    assert finite(*given, fast_paths=fast_paths) == [True] * 5 + [False] * 6


def test_tensors_that_cannot_hold_inf_are_finite() -> None:
    whole = [torch.ones(2).to(dtype) for dtype in (torch.int64, torch.uint8, torch.bool, torch.uint16)]
    assert finite(*whole, torch.ones(0), torch.tensor(3)) == [True] * 6


def test_complex_numbers_with_overflowing_absolute_values_are_finite() -> None:
    large = torch.full((3,), complex(3e38, 3e38), dtype=torch.complex64)
    assert finite(large, large.conj(), large * NAN) == [True, True, False]


@pytest.mark.filterwarnings("ignore")  # sparse CSR and nested tensors are in beta
def test_values_of_sparse_and_nested_tensors_are_checked() -> None:
    at = torch.tensor([[0, 0]])
    nested = [[torch.ones(2), torch.tensor([value])] for value in (1.0, NAN)]
    assert finite(
        torch.tensor([[1.0, NAN]]).to_sparse(),
        torch.eye(2).to_sparse(),
        torch.sparse_coo_tensor(at, torch.tensor([3e38, 3e38]), (2,)),  # they add up to inf
        torch.tensor([[INF, 0.0]]).to_sparse_csr(),
        torch.zeros(2, 2).to_sparse_csr(),
        *(torch.nested.nested_tensor(one) for one in nested),
    ) == [False, True, False, False, True, True, False]


class LargestResult(TorchDispatchMode):
    """The bytes of the largest new tensor."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known, self.bytes = {one.untyped_storage().data_ptr() for one in known}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and one.untyped_storage().data_ptr() not in self.known:
                self.bytes = max(self.bytes, one.untyped_storage().nbytes())
        return result


def test_checks_allocate_little_and_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float8 weight is converted in pieces; others are not converted."""
    monkeypatch.setattr(tensors, "_MOST_AT_ONCE", 1 << 12)
    weights = [torch.ones(1 << 18), torch.ones(1 << 19, dtype=torch.bfloat16), torch.ones(1 << 16, 4).t()]
    weights += [torch.ones(1 << 10, 1 << 10).to(torch.float8_e4m3fn).t(), torch.ones(1 << 17, dtype=torch.complex64)]
    stack = Stack()
    with LargestResult(*weights) as largest:
        assert are_finite(stack, weights) == [True] * 5
    assert largest.bytes <= 1 << 14  # of tensors of 1 MiB
    assert stack.reads == 1


class WithTable(Classifier):
    """4 MiB of weights, and as much of momentum."""

    def __init__(self) -> None:
        super().__init__(numbers(8), optimizer=lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9))
        self.table = nn.Parameter(torch.zeros(1 << 10, 1 << 10))

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return super().train_step(global_step, batch, device) + self.table[:8].sum()


def test_a_checkpoint_allocates_nothing_large(tmp_path: Path) -> None:
    trainer = ts.Trainer(module := WithTable(), arguments(tmp_path, clip_grads=False))
    trainer.train()
    (optimizer,) = trainer.optimizers
    with LargestResult(module.table, *optimizer.state[module.table].values()) as largest:
        trainer._take_checkpoint()
    assert largest.bytes <= 1 << 18
