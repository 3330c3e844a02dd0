"""What the innermost layer leaves out of torch's own calls, and when it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainstack.backends import backpropagation
from trainstack.backends.backpropagation import run_backward
from trainstack.backends.calling import bare_call


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.arange(12.0).reshape(4, 3)).square().mean()


@pytest.mark.parametrize("weight", [1.0, 0.25, 1 / 3])
def test_the_gradients_are_those_of_backward_to_the_bit(weight: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    loss_of(model).backward(torch.tensor(weight))
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    run_backward(loss_of(model), torch.tensor(weight))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))  # type: ignore[arg-type]


def test_a_graph_is_freed_and_gradients_add_up_as_with_backward() -> None:
    model = nn.Linear(3, 1)
    loss = loss_of(model)
    run_backward(loss, torch.tensor(1.0))
    once = model.weight.grad.clone()  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="second time"):
        run_backward(loss, torch.tensor(1.0))
    run_backward(loss_of(model), torch.tensor(1.0))
    assert torch.equal(model.weight.grad, 2 * once)  # type: ignore[arg-type]


class OwnBackward(Tensor):
    """A loss with a backward pass of its own."""

    called = 0

    def backward(self, *args: Any, **kwargs: Any) -> None:
        type(self).called += 1
        super().backward(*args, **kwargs)


def test_a_tensor_with_a_backward_of_its_own_is_asked_for_it() -> None:
    loss = torch.ones((), requires_grad=True).mul(2).as_subclass(OwnBackward)
    run_backward(loss, torch.tensor(1.0))
    assert OwnBackward.called == 1


def noop(*args: Any) -> None:
    return None


@pytest.mark.parametrize(
    "register",
    [
        lambda m: m.register_forward_hook(noop),
        lambda m: m.register_forward_pre_hook(noop),
        lambda m: m.register_full_backward_hook(noop),
        lambda m: m.register_full_backward_pre_hook(noop),
        lambda m: nn.modules.module.register_module_forward_hook(noop),
        lambda m: nn.modules.module.register_module_forward_pre_hook(noop),
        lambda m: nn.modules.module.register_module_full_backward_hook(noop),
        lambda m: nn.modules.module.register_module_full_backward_pre_hook(noop),
    ],
)
def test_a_module_is_called_as_it_is_while_a_hook_is_registered(register: Callable[[nn.Module], Any]) -> None:
    module = nn.Linear(2, 2)
    assert bare_call(module) == module.forward
    handle = register(module)
    assert bare_call(module) is module
    handle.remove()
    assert bare_call(module) == module.forward


def test_a_module_with_a_call_of_its_own_is_called_by_it() -> None:
    class Counting(nn.Linear):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    module = Counting(2, 2)
    assert bare_call(module) is module


def test_a_compiled_module_is_called_as_compiled() -> None:
    module = nn.Linear(2, 2)
    module.compile(backend="eager")
    assert bare_call(module) is module


def test_what_is_used_of_this_torch_is_there() -> None:
    """Where it is not, backward passes still are right, but slower; then look at `backpropagation.py`."""
    assert backpropagation._engine is not None
    assert backpropagation._transforming is not None
