"""A step zeroes, clips and steps the parameters that module and optimizers hold at that step."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainstack as ts
from tests.helpers.modules import arguments
from trainstack.trainer.core.module_snapshot import ModuleSnapshot

STEPS, MICRO, AT = 8, 2, 3
"""Global steps, micro-batches in each, and the step at which something changes."""


class Changing(ts.ModuleInterface):
    """A model that `change` alters at step `AT`, at the point `where`."""

    def __init__(self, change: Callable[[Changing], None], where: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.change, self.where = change, where
        self.net, self.more = nn.Linear(3, 2), nn.ModuleList()
        self.data = TensorDataset(torch.randn(STEPS * MICRO, 3) * 9)
        self.norms: list[float] = []
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.data, batch_size)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
        return self.optimizer

    def at(self, where: str, step: int) -> None:
        if where == self.where and step == AT and self.change is not None:
            self.change(self)

    def loss(self, inputs: Tensor, step: int) -> Tensor:
        self.at("forward", step)
        return sum((part(inputs) for part in self.more), self.net(inputs)).square().mean()  # type: ignore[no-any-return]

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        return self.loss(batch[0], global_step)

    def on_end_backward(self, global_step: int, loss: Any) -> None:
        self.at("backward", global_step)

    def on_end_train_step(self, global_step: int) -> None:
        self.at("step", global_step)


class Hooked(ts.Callback):
    """Changes the module in events."""

    def __init__(self, module: Changing) -> None:
        self._module = module

    def on_before_optimizer_step(self, trainer: Any) -> None:
        self._module.at("update", trainer.state.global_step + 1)

    def on_after_zero_grad(self, trainer: Any) -> None:
        self._module.at("zeroed", trainer.state.global_step)


def grow(module: Changing) -> None:
    torch.manual_seed(1)
    module.more.append(nn.Linear(3, 2))
    module.optimizer.add_param_group({"params": module.more[-1].parameters()})
    module.change = None  # type: ignore[assignment]


def replace(module: Changing) -> None:
    """Replace a parameter in the module and in its group."""
    module.net.weight = nn.Parameter(torch.ones(2, 3))
    module.optimizer.param_groups[0]["params"][0] = module.net.weight
    module.change = None  # type: ignore[assignment]


def freeze(module: Changing) -> None:
    module.net.weight.requires_grad_(False)


def shrink(module: Changing) -> None:
    """Remove a parameter from its group and from the module."""
    module.optimizer.param_groups[0]["params"].pop()
    module.net.bias = None  # type: ignore[assignment]
    module.change = None  # type: ignore[assignment]


def by_hand(module: Changing) -> None:
    rows = module.data.tensors[0]
    for step in range(1, STEPS + 1):
        for number in range(MICRO):
            at = (step - 1) * MICRO + number
            loss = module.loss(rows[at : at + 1], step)
            (loss / MICRO).backward()
            module.at("backward", step)
        held = {id(p): p for group in module.optimizer.param_groups for p in group["params"]}
        torch.nn.utils.clip_grad_norm_(list(held.values()), 1.0)
        module.at("update", step)
        module.optimizer.step()
        module.optimizer.zero_grad()
        module.zero_grad()
        module.at("zeroed", step)
        module.at("step", step)


@pytest.mark.parametrize("where", ["forward", "backward", "update", "zeroed", "step"])
@pytest.mark.parametrize("change", [grow, replace, freeze, shrink])
@pytest.mark.parametrize("fast_paths", [True, False])
def test_parameters_may_change_in_every_hook(change: Any, where: str, fast_paths: bool, tmp_path: Path) -> None:
    module, plain = Changing(change, where), Changing(change, where)
    changes = {"train_batch_size": MICRO, "gpu_batch_size_limit": 1, "epochs": 1, "fast_paths": fast_paths}
    ts.Trainer(module, arguments(tmp_path, **changes), callbacks=[Hooked(module)]).train()
    by_hand(plain)

    ours, theirs = module.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


def test_an_unfrozen_parameter_is_trained_from_then_on(tmp_path: Path) -> None:
    def unfreeze(module: Changing) -> None:
        module.net.weight.requires_grad_(True)

    modules = [Changing(unfreeze, "step") for _ in range(2)]
    for module in modules:
        module.net.weight.requires_grad_(False)
    ts.Trainer(modules[0], arguments(tmp_path, train_batch_size=MICRO, gpu_batch_size_limit=1, epochs=1)).train()
    by_hand(modules[1])

    torch.testing.assert_close(modules[0].net.weight, modules[1].net.weight, rtol=0, atol=1e-6)


def test_a_parameter_outside_the_module_is_refused_when_it_joins(tmp_path: Path) -> None:
    def join(module: Changing) -> None:
        module.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(5))]})
        module.change = None  # type: ignore[assignment]

    trainer = ts.Trainer(Changing(join, "step"), arguments(tmp_path, train_batch_size=MICRO, epochs=1))
    with pytest.raises(
        ts.ModuleContractError, match=r"1 parameters that the module does not have, of shapes \[\(5,\)\]"
    ):
        trainer.train()


def test_an_optimizer_may_keep_a_parameter_that_the_module_lost(tmp_path: Path) -> None:
    def lose(module: Changing) -> None:
        module.more = nn.ModuleList()
        module.change = None  # type: ignore[assignment]

    modules = [Changing(lose, "step") for _ in range(2)]
    for module in modules:
        torch.manual_seed(1)
        module.more.append(nn.Linear(3, 2))
        module.optimizer.add_param_group({"params": module.more[-1].parameters()})
    ts.Trainer(modules[0], arguments(tmp_path, train_batch_size=MICRO, gpu_batch_size_limit=1, epochs=1)).train()
    by_hand(modules[1])

    torch.testing.assert_close(modules[0].net.weight, modules[1].net.weight, rtol=0, atol=1e-6)


class Decaying(torch.optim.Optimizer):
    """Counts its steps, and decays all parameters in each step, with or without a gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9)
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / self.calls)


class Skipping(Changing):
    """Has steps to skip, in which the gradient is nan."""

    poisoned: frozenset[int] = frozenset({2, 5})

    def __init__(self) -> None:
        super().__init__(lambda module: None, "never")
        self.optimizer: Any = Decaying(self.net.parameters())  # type: ignore[assignment]
        self.register_buffer("mean", torch.zeros(3))

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * batch[0].detach().mean(0)
        return super().train_step(global_step, batch, device) * (float("nan") if self.spoils(global_step) else 1.0)

    def spoils(self, step: int) -> bool:
        return step in self.poisoned


class WithoutItems(Skipping):
    step = 0

    def batch_weight(self, batch: Any) -> float:
        self.step += 1
        return 0.0 if self.step in self.poisoned else 1.0

    def spoils(self, step: int) -> bool:
        return False


@pytest.mark.parametrize("kind", [Skipping, WithoutItems])
def test_a_skipped_step_does_not_call_the_optimizer(kind: Any, tmp_path: Path) -> None:
    module, plain, fired = kind(), Skipping(), list[str]()
    callback = ts.Callback()
    callback.on_before_optimizer_step = lambda: fired.append("before")  # type: ignore[method-assign]
    callback.on_after_optimizer_step = lambda: fired.append("after")  # type: ignore[method-assign]
    changes = {"train_batch_size": MICRO, "epochs": 1, "nonfinite": "skip", "clip_grads": False}
    trainer = ts.Trainer(module, arguments(tmp_path, **changes), callbacks=[callback])
    trainer.train()
    for step, rows in enumerate(module.data.tensors[0].split(MICRO), 1):
        if step not in Skipping.poisoned:
            plain.mean = 0.9 * plain.mean + 0.1 * rows.mean(0)
            plain.loss(rows, step).backward()
            plain.optimizer.step()
            plain.optimizer.zero_grad()

    moved = STEPS - len(Skipping.poisoned)
    assert (module.optimizer.calls, trainer.state.skipped_steps) == (moved, len(Skipping.poisoned))
    assert torch.equal(module.net.weight, plain.net.weight)
    assert torch.equal(module.mean, plain.mean)
    assert fired == ["before", "after"] * moved


def test_an_overridden_zero_grad_is_called_once_a_step(tmp_path: Path) -> None:
    class Own(torch.optim.SGD):
        zeroed = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.zeroed += 1
            super().zero_grad(set_to_none=False)

    module = Changing(lambda module: None, "never")
    module.optimizer = Own(module.net.parameters(), lr=0.1)  # type: ignore[assignment]
    ts.Trainer(module, arguments(tmp_path, train_batch_size=MICRO, epochs=1)).train()

    assert module.optimizer.zeroed == STEPS  # type: ignore[attr-defined]
    assert module.net.weight.grad is not None
    assert not module.net.weight.grad.any()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_one_overflow_in_the_forward_pass_is_skipped(value: float, tmp_path: Path) -> None:
    class Overflows(Changing):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return super().train_step(global_step, batch, device) * (value if global_step == 3 else 1.0)

    module = Overflows(lambda module: None, "never")
    changes = {"train_batch_size": MICRO, "epochs": 1, "log_every": 4, "backend_options": {"amp": {"init_scale": 2.0}}}
    trainer = ts.Trainer(module, arguments(tmp_path, backend="sp-amp", **changes))
    trainer.train()

    assert (trainer.state.skipped_steps, trainer.global_steps_finished) == (1, STEPS)
    assert all(map(math.isfinite, trainer.history.get_metric_values("train/loss")))


@pytest.mark.parametrize("kind", ["read-only", "expanded", "without values"])
def test_a_skipped_step_does_not_write_unchanged_buffers(kind: str, tmp_path: Path) -> None:
    class Holds(Skipping):
        def __init__(self) -> None:
            super().__init__()
            table = torch.zeros(4)
            if kind == "read-only":
                table = torch.from_file(str(tmp_path / "table"), shared=False, size=4)
            if kind == "expanded":
                table = torch.zeros(1, 4).expand(3, 4)
            self.register_buffer("table", table, persistent=False)
            if kind == "without values":
                table.untyped_storage().resize_(0)

    (tmp_path / "table").write_bytes(bytes(16))
    changes = {"train_batch_size": MICRO, "epochs": 1, "nonfinite": "skip", "clip_grads": False}
    if kind == "without values":  # other code cannot read it
        changes["checkpointer_args"] = ts.DefaultCheckpointerArguments(checkpoint=False)
    snapshot = ModuleSnapshot(Holds())
    snapshot.keep()
    snapshot.restore()
    if kind != "without values":
        assert ts.Trainer(Holds(), arguments(tmp_path, **changes)).train() is None


def test_a_nonfinite_loss_with_a_masked_gradient_is_skipped(tmp_path: Path) -> None:
    class Masks(Changing):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            loss = super().train_step(global_step, batch, device)
            return torch.where(loss > 1e9, loss, torch.full((), math.inf)) if global_step == 3 else loss

    module = Masks(lambda module: None, "never")
    trainer = ts.Trainer(module, arguments(tmp_path, train_batch_size=MICRO, epochs=1, nonfinite="skip"))
    trainer.train()

    assert trainer.state.skipped_steps == 1


@pytest.mark.parametrize("counts", [[0, 900, 800, 700], [1, 900, 800, 700]])
def test_batch_weights_known_late_never_exceed_one(counts: list[int], tmp_path: Path) -> None:
    class Counts(Changing):
        number = -1

        def batch_weight(self, batch: Any) -> float:
            self.number += 1
            return counts[self.number % 4]

    seen: list[float] = []

    class Notes(ts.AbstractTrainerBackendDecorator):
        def backward(self, work: Any, loss: Tensor, weight: float) -> None:
            seen.append(weight)
            super().backward(work, loss, weight)

    module, plain = (Counts(lambda module: None, "never") for _ in range(2))
    changes = {"train_batch_size": 4, "gpu_batch_size_limit": 1, "epochs": 1, "clip_grads": False}
    ts.Trainer(module, arguments(tmp_path, **changes), trainer_backend=Notes(ts.build_trainer_backend("sp"))).train()
    for step, rows in enumerate(plain.data.tensors[0].split(4), 1):
        sum(c / sum(counts) * plain.loss(row[None], step) for c, row in zip(counts, rows, strict=True)).backward()
        plain.optimizer.step()
        plain.optimizer.zero_grad()

    assert max(seen) <= 1
    torch.testing.assert_close(module.net.weight, plain.net.weight, rtol=0, atol=1e-5)


def test_gradients_that_an_optimizer_keeps_at_zero_last_over_epochs(tmp_path: Path) -> None:
    class Keeps(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none=False)

    class InTurn(Changing):
        def loss(self, inputs: Tensor, step: int) -> Tensor:
            return self.more[step % 2](inputs).square().mean()  # type: ignore[no-any-return]

    modules = [InTurn(lambda module: None, "never") for _ in range(2)]
    for module in modules:
        torch.manual_seed(1)
        module.more.extend(nn.Linear(3, 2) for _ in range(2))
        module.optimizer = Keeps(module.more.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)  # type: ignore[assignment]
    ts.Trainer(modules[0], arguments(tmp_path, train_batch_size=2, epochs=3, clip_grads=False)).train()
    for step in range(3 * STEPS):
        modules[1].loss(modules[1].data.tensors[0].split(2)[step % STEPS], step + 1).backward()
        modules[1].optimizer.step()
        modules[1].optimizer.zero_grad()

    for ours, theirs in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_a_step_without_gradients_does_not_count_as_overflow(tmp_path: Path) -> None:
    class Elsewhere(Changing):
        def __init__(self) -> None:
            super().__init__(lambda module: None, "never")
            self.other = nn.Linear(3, 1)

        def loss(self, inputs: Tensor, step: int) -> Tensor:
            return self.other(inputs).mean()  # type: ignore[no-any-return]

    trainer = ts.Trainer(Elsewhere(), arguments(tmp_path, train_batch_size=1, epochs=4, backend="sp-amp"))
    trainer.train()

    assert trainer.state.skipped_steps == 0


class Computing(Changing):
    """Computes gradients before the first epoch and between epochs, which no step may use."""

    def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
        self.loss(self.data[:3][0], 0).backward()


@pytest.mark.parametrize("fast_paths", [True, False])
def test_gradients_of_user_code_between_epochs_belong_to_no_step(fast_paths: bool, tmp_path: Path) -> None:
    plain, module = (kind(lambda module: None, "nowhere") for kind in (Changing, Computing))
    for one in (plain, module):
        ts.Trainer(one, arguments(tmp_path / type(one).__name__, epochs=3, fast_paths=fast_paths)).train()

    assert torch.equal(plain.net.weight, module.net.weight)
