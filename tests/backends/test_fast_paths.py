"""Fast paths: the parts of torch's calls that they omit, the cases in which they do not, and the switch for them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, weights
from trainstack.backends import fast_paths
from trainstack.backends.fast_paths import fast_backward, fast_call, fast_paths_enabled, fast_update, gradient_seed
from trainstack.errors import ConfigurationError
from trainstack.trainer.callbacks import EMA
from trainstack.trainer.data.loading import SeededDataset


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.arange(12.0).reshape(4, 3)).square().mean()


@pytest.mark.parametrize("weight", [1.0, 0.25, 1 / 3])
def test_the_gradients_are_those_of_backward_to_the_bit(weight: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    loss_of(model).backward(torch.tensor(weight))
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    fast_backward(loss_of(model), torch.tensor(weight))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))  # type: ignore[arg-type]


def test_fast_backward_frees_the_graph_and_accumulates_gradients() -> None:
    model = nn.Linear(3, 1)
    loss = loss_of(model)
    fast_backward(loss, torch.tensor(1.0))
    once = model.weight.grad.clone()  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="second time"):
        fast_backward(loss, torch.tensor(1.0))
    fast_backward(loss_of(model), torch.tensor(1.0))
    assert torch.equal(model.weight.grad, 2 * once)  # type: ignore[arg-type]


class OwnBackward(Tensor):
    """A loss with its own backward pass."""

    called = 0

    def backward(self, *args: Any, **kwargs: Any) -> None:
        type(self).called += 1
        super().backward(*args, **kwargs)


def test_an_overridden_backward_of_a_tensor_class_is_called() -> None:
    loss = torch.ones((), requires_grad=True).mul(2).as_subclass(OwnBackward)
    fast_backward(loss, torch.tensor(1.0))
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
def test_a_module_with_hooks_is_called_normally(register: Callable[[nn.Module], Any]) -> None:
    module = nn.Linear(2, 2)
    assert fast_call(module) == module.forward
    handle = register(module)
    assert fast_call(module) is module
    handle.remove()
    assert fast_call(module) == module.forward


def test_an_overridden_call_of_a_module_is_used() -> None:
    class Counting(nn.Linear):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    module = Counting(2, 2)
    assert fast_call(module) is module


def test_a_compiled_module_is_called_as_compiled() -> None:
    module = nn.Linear(2, 2)
    module.compile(backend="eager")
    assert fast_call(module) is module


def test_a_backward_that_was_replaced_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the tensor, or for all tensors."""
    calls = []
    usual = torch.autograd.backward
    monkeypatch.setattr(
        torch.autograd, "backward", lambda *args, **kwargs: (calls.append("all"), usual(*args, **kwargs))
    )
    fast_backward(torch.ones((), requires_grad=True) * 2, torch.tensor(1.0))
    monkeypatch.undo()
    loss: Any = torch.ones((), requires_grad=True) * 2
    loss.backward = lambda gradient: calls.append("one")
    fast_backward(loss, torch.tensor(1.0))
    assert calls == ["all", "one"]


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_no_gradient_seed_is_used_twice(weight: float) -> None:
    loss = torch.ones((), dtype=torch.float64)
    seed = gradient_seed(weight, loss)
    seed.data.mul_(3)
    assert gradient_seed(weight, loss).item() == weight
    assert seed.dtype is loss.dtype


# --- one switch ---------------------------------------------------------------------------------------------------

PRIVATE = (
    "_tracing_state",
    "_profiling",
    "_run_engine",
    "_transforming",
    "_foreach_norm",
    "_foreach_mul_",
    "_foreach_clamp_min_",
    "_foreach_clamp_max_",
    "_foreach_lerp_",
)
"""The private functions of torch that `fast_paths.py` calls."""
PLAIN = ("_MODULE_CALLS_KNOWN", "_STEPS_KNOWN", "_MapFetcher")
"""The other private names that it looks up when it is imported."""


class Evaluated(Classifier):
    """Evaluates ready-made batches, for which torch's loader has more work than the model."""

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        batches = zip(*(tensor.split(4) for tensor in self.dataset.tensors), strict=True)
        return DataLoader(list(batches), batch_size=None)  # type: ignore[arg-type]

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.net(batch[0])


def results(folder: Path, **changes: Any) -> list[Tensor]:
    """Weights, averages, gradients' norms and outputs of runs that take every fast path if they may."""
    found: list[Tensor] = []
    for number, clipping in enumerate(({}, {"clip_grads": False, "clip_grad_value": 0.01}, {"clip_grads": False})):
        module, average = Evaluated(optimizer=torch.optim.AdamW, scheduler=True), EMA()
        options = {"epochs": 2, "gpu_batch_size_limit": 3, "log_every": 4, **clipping, **changes}
        trainer = ts.Trainer(module, arguments(folder / str(number), **options), callbacks=[average])
        trainer.train()
        found += [
            weights(module),
            *average.get_state()["averages"].values(),
            torch.stack(trainer.validate()["default"]),
        ]
    return found


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the calls of private functions of torch, and the single reads of a data set."""
    calls: Counter[str] = Counter()

    def spy(owner: Any, name: str) -> None:
        usual = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return usual(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for name in (*PRIVATE, "_factor_on_host", "_fetching_ready"):
        spy(fast_paths, name)
    spy(SeededDataset, "__getitems__")  # a patched method of a dataset would turn the fast path off
    return calls


def test_the_pinned_torch_takes_every_fast_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails after an update of torch, results are right and steps are slower: see `fast_paths.py`."""
    monkeypatch.delenv(fast_paths.VARIABLE, raising=False)
    assert [name for name in (*PRIVATE, *PLAIN) if not getattr(fast_paths, name)] == []
    module = Classifier()
    assert fast_call(module) == module.forward
    assert fast_update(torch.optim.SGD(module.parameters())) is not None
    calls = counted(monkeypatch)
    results(tmp_path)

    assert set(calls) == {*PRIVATE, "_factor_on_host", "_fetching_ready"}  # and no row of a TensorDataset one by one


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_one_switch_disables_all_fast_paths_without_changing_bits(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(fast_paths.VARIABLE, raising=False)
    fast = results(tmp_path / "fast")
    calls = counted(monkeypatch)
    if how == "variable":
        monkeypatch.setenv(fast_paths.VARIABLE, "0")
    plain = results(tmp_path / "plain", fast_paths=how == "variable")

    assert set(calls) == {"__getitems__"}
    assert all(torch.equal(one, other) for one, other in zip(fast, plain, strict=True))


@pytest.mark.parametrize("name", [*PRIVATE[2:], *PLAIN])
def test_the_public_fallback_gives_the_same_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = results(tmp_path / "fast")
    monkeypatch.setattr(fast_paths, name, None)
    fallback = results(tmp_path / "fallback")

    assert all(torch.equal(one, other) for one, other in zip(fast, fallback, strict=True))


def test_a_missing_name_disables_fast_calls_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fast_paths._knows_module_calls()
    assert fast_paths._knows_steps()
    monkeypatch.setattr(fast_paths, "_tracing_state", None)
    monkeypatch.setattr(fast_paths, "_profiling", None)
    assert not fast_paths._knows_module_calls()
    assert not fast_paths._knows_steps()


def test_the_variable_wins_over_the_argument_and_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, on in (("0", False), ("1", True)):
        monkeypatch.setenv(fast_paths.VARIABLE, value)
        assert fast_paths_enabled(not on) is on
    monkeypatch.setenv(fast_paths.VARIABLE, "no")
    with pytest.raises(ConfigurationError, match="TRAINSTACK_FAST_PATHS='no': write 0"):
        fast_paths_enabled(True)


def test_two_trainers_in_one_process_have_a_switch_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    off, on = (ts.Trainer(Classifier(), arguments(tmp_path / str(fast), fast_paths=fast)) for fast in (False, True))
    on.validate(), off.train()
    assert not set(calls) & {*PRIVATE}
    on.train()
    assert calls["_run_engine"]


def test_a_new_torch_hook_disables_the_fast_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def call_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._forward_hooks or self._forward_later_hooks or self.forward(*args, **kwargs)

    assert fast_paths._knows_module_calls()
    monkeypatch.setattr(nn.Module, "_call_impl", call_impl)
    assert not fast_paths._knows_module_calls()


def test_a_new_torch_hook_disables_the_fast_step() -> None:
    usual = torch.optim.SGD.step
    assert fast_paths._unwrapped(usual) is not None

    @functools.wraps(usual)
    def wrapper(self: Any, closure: Any = None) -> Any:
        return self._optimizer_step_later_hooks or usual(self, closure)

    assert fast_paths._unwrapped(wrapper) is None
    wrapper.__wrapped__ = usual.__wrapped__  # type: ignore[attr-defined]
    assert fast_paths._unwrapped(wrapper) is None
