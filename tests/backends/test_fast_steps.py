"""An optimizer is stepped without torch's wrappers where no listener needs them, and with them otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset

from tests.helpers.modules import Classifier, train, weights
from trainstack.backends.clipping import clip_gradients
from trainstack.backends.fast_paths import MOST_ON_HOST, fast_step, fast_update
from trainstack.backends.workload import Clipping

BARE = ["SGD", "Adam", "AdamW", "RMSprop", "Adadelta", "Adagrad", "NAdam", "RAdam", "Adamax"]


def trained(kind: str, step: Any, **options: Any) -> list[Tensor]:
    """Weights after five steps and a scheduler, then the optimizer's state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.05, **options)
    scheduler = StepLR(optimizer, 2, gamma=0.5)
    for _ in range(5):
        model(torch.randn(3, 4)).square().mean().backward()
        step(optimizer)
        scheduler.step()
        optimizer.zero_grad()
    state = [value for held in optimizer.state.values() for value in held.values() if isinstance(value, Tensor)]
    return [*model.state_dict().values(), *state]


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"weight_decay": 0.1}, {"maximize": True}])
@pytest.mark.parametrize("kind", BARE)
def test_the_bits_are_those_of_the_wrapped_step(kind: str, options: dict[str, Any]) -> None:
    mine, usual = trained(kind, fast_step, **options), trained(kind, lambda o: o.step(), **options)

    assert all(torch.equal(one, other) for one, other in zip(mine, usual, strict=True))


@pytest.mark.parametrize("kind", BARE)
def test_the_step_wrappers_of_this_torch_are_recognized(kind: str) -> None:
    """Otherwise steps are correct but slower; `fast_paths.py` then needs a change."""
    optimizer = getattr(torch.optim, kind)([nn.Parameter(torch.ones(2))])

    assert fast_update(optimizer) is not None
    StepLR(optimizer, 1)
    assert fast_update(optimizer) is not None


@pytest.mark.parametrize("what", ["pre", "post", "global pre", "global post", "replaced", "subclass"])
def test_each_listener_of_a_step_is_called(what: str) -> None:
    calls = []

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            calls.append(what)
            return super().step(closure)

    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer: Any = (Own if what == "subclass" else torch.optim.SGD)([weight], lr=0.5)

    def hear(*_: Any) -> None:
        calls.append(what)

    add: Any = {
        "pre": optimizer.register_step_pre_hook,
        "post": optimizer.register_step_post_hook,
        "global pre": register_optimizer_step_pre_hook,
        "global post": register_optimizer_step_post_hook,
    }.get(what)
    handle = add(hear) if add else None
    if what == "replaced":
        usual = optimizer.step
        optimizer.step = lambda: (hear(), usual())
    try:
        fast_step(optimizer)
    finally:
        if handle is not None:
            handle.remove()

    assert calls == [what]
    assert weight.tolist() == [0.5, 0.5]


def test_a_profiler_sees_the_step() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fast_step(optimizer)

    assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}


def test_a_scheduler_gives_no_warning_after_a_fast_step(recwarn: pytest.WarningsRecorder) -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight])
    scheduler = StepLR(optimizer, 1)
    fast_step(optimizer)
    scheduler.step()

    assert not recwarn.list


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-3, 0.02, 1.0, 1e4, 1e20, float("inf"), float("nan")])
@pytest.mark.parametrize("limit", [1e-3, 1.0, 7.3, MOST_ON_HOST])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_clipping_gives_the_bits_of_torch(scale: float, limit: float, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    shapes = [(8, 4), (8,), (3, 8), (3,)]
    mine = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    usual = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for one, other in zip(mine, usual, strict=True):
        one.grad = torch.randn(one.shape).to(dtype) * scale
        other.grad = one.grad.clone()
    norm = clip_gradients(mine, Clipping(kind="norm", limit=limit))
    theirs = nn.utils.clip_grad_norm_(usual, limit)

    assert norm is not None
    assert torch.equal(norm.nan_to_num(-1), theirs.nan_to_num(-1))
    for one, other in zip(mine, usual, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad.nan_to_num(-1), other.grad.nan_to_num(-1))


@pytest.mark.parametrize("dense_too", [True, False])
@pytest.mark.parametrize("rows", [[1, 3], [1, 1, 3]])
def test_clipping_by_value_sums_a_sparse_gradient_first(rows: list[int], dense_too: bool) -> None:
    """Row 1 is looked up once, or twice: then neither part of its gradient exceeds the limit, and the sum does."""
    embedding, usual = nn.Embedding(5, 2, sparse=True), nn.Embedding(5, 2)
    linear = nn.Linear(2, 1)
    for one in (embedding, usual):
        one(torch.tensor(rows)).mul(torch.tensor([0.3, -0.9])).sum().backward()
    linear.weight.grad = torch.full((1, 2), 7.0)
    clipping = Clipping(kind="value", limit=0.5)
    clip_gradients([embedding.weight, *([linear.weight] if dense_too else [])], clipping)
    clip_gradients([usual.weight], clipping)

    assert embedding.weight.grad is not None
    assert embedding.weight.grad.is_sparse
    assert torch.equal(embedding.weight.grad.to_dense(), usual.weight.grad)  # type: ignore[arg-type]
    assert linear.weight.grad.tolist() == [[0.5, 0.5] if dense_too else [7.0, 7.0]]


def test_an_embedding_with_sparse_gradients_is_trained_with_values_clipped(tmp_path: Path) -> None:
    ends = []
    for sparse in (True, False):
        module = Looking(sparse)
        train(module, tmp_path / str(sparse), clip_grad_value=0.001)
        ends.append(weights(module))

    assert torch.equal(*ends)


class Looking(Classifier):
    def __init__(self, sparse: bool) -> None:
        super().__init__(TensorDataset(torch.arange(32) % 3, torch.arange(32) % 3))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Embedding(3, 4, sparse=sparse), nn.Linear(4, 3))
