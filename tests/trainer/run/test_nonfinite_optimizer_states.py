"""No checkpoint holds inf or nan in the state of an optimizer, unless the optimizer allows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers

EVERY_STEP = ts.DefaultCheckpointerArguments(every_n_steps=1, keep_last=None)


class Lion(torch.optim.Optimizer):
    """Steps by the sign of its momentum, so that a gradient of nan does not reach the weights."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    momentum.lerp_(parameter.grad, 0.1)
                    parameter.sub_(momentum.sign().nan_to_num(), alpha=group["lr"])


class Lowest(torch.optim.SGD):
    """Keeps a value that begins at inf, a nested one and a number."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["lowest"] = {"loss": torch.full((), float("inf"))}
                self.state[parameter]["limit"] = float("inf")
                self.state[parameter]["count"] = torch.ones((), dtype=torch.long)
        return super().step(closure)


class Breaks(Classifier):
    """The gradient of one weight is nan or inf in one step."""

    def __init__(self, optimizer: Any, step: int | None, value: str = "nan", nonfinite_state: set[str] | None = None):
        super().__init__(numbers(64), optimizer=optimizer, lr=0.01)
        self.at, self.value, self.nonfinite_state = step, float(value), nonfinite_state

    def get_optimizers_schedulers(self, *sizes: Any) -> Any:
        optimizers, schedulers = super().get_optimizers_schedulers(*sizes)
        if self.nonfinite_state is not None:
            optimizers[0].nonfinite_state = self.nonfinite_state
        return optimizers, schedulers

    def on_end_backward(self, global_step: int, loss: Any) -> None:
        if global_step == self.at:
            self.net[0].weight.grad[0, 0] = self.value  # type: ignore[index, union-attr]


def values_in(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for one in state.values() if isinstance(state, dict) else state:
            yield from values_in(one)


OPTIMIZERS = [
    *(getattr(torch.optim, name) for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Adafactor")),
    *(getattr(torch.optim, name) for name in ("NAdam", "RAdam", "RMSprop", "Rprop", "SGD")),
    Lion,
]


# Rprop drops a gradient whose sign has changed, so that its state stays finite here
@pytest.mark.parametrize(
    ("optimizer", "value"),
    [(one, value) for one in OPTIMIZERS for value in ("nan", "inf") if (one, value) != (torch.optim.Rprop, "inf")],
)
def test_no_checkpoint_holds_a_state_that_is_not_finite(optimizer: Any, value: str, tmp_path: Path) -> None:
    module = Breaks(optimizer, 4, value)
    args = arguments(tmp_path, clip_grads=False, checkpointer_args=EVERY_STEP, log_level="ERROR")
    with pytest.raises(ts.NonFiniteError, match="global step 4"):
        ts.Trainer(module, args).train()

    saved = ts.list_checkpoints(tmp_path / "checkpoints")
    assert [info.global_step for info in saved] == [1, 2, 3]
    state = ts.read_checkpoint(saved[-1].path).trainer_state
    assert all(torch.isfinite(tensor.float()).all() for tensor in values_in(state))


def test_the_error_names_the_entry_and_its_parameter(tmp_path: Path) -> None:
    with pytest.raises(ts.NonFiniteError) as raised:
        ts.Trainer(Breaks(Lion, 4), arguments(tmp_path, clip_grads=False, checkpointer_args=EVERY_STEP)).train()

    assert (
        "the state 'momentum' of 'net.0.weight' in optimizer 0 (Lion) holds inf or nan after global step 4. No"
        in str(raised.value)
    )
    assert "write optimizer.nonfinite_state = {'momentum'}." in str(raised.value)


def test_an_optimizer_may_keep_inf_in_its_nonfinite_state(tmp_path: Path) -> None:
    saving = {"checkpointer_args": EVERY_STEP}
    with pytest.raises(ts.NonFiniteError, match=r"the state 'lowest' of 'net.0.weight'.*nonfinite_state = {'lowest'}"):
        ts.Trainer(Breaks(Lowest, None), arguments(tmp_path / "silent", **saving)).train()
    with pytest.raises(ts.NonFiniteError, match=r"the state 'limit' of 'net.0.weight'"):
        ts.Trainer(Breaks(Lowest, None, "nan", {"lowest"}), arguments(tmp_path / "half", **saving)).train()

    ts.Trainer(Breaks(Lowest, None, "nan", {"lowest", "limit"}), arguments(tmp_path / "says", **saving)).train()
    assert len(ts.list_checkpoints(tmp_path / "says" / "checkpoints")) == 9


def test_states_are_read_with_the_weights_in_one_read(tmp_path: Path) -> None:
    reads: list[int] = []

    class Counts(ts.AbstractTrainerBackendDecorator):
        def read(self, tensors: Any) -> list[float]:
            reads.append(len(tensors))
            return super().read(tensors)

    module = Classifier(numbers(8), optimizer=torch.optim.Adam, lr=0.01)
    args = arguments(tmp_path, checkpointer_args=ts.DefaultCheckpointerArguments(keep_last=None), log_every=100)
    ts.Trainer(module, args, trainer_backend=Counts(ts.build_trainer_backend("sp"))).train()
    assert reads.count(4 + 4 * 3) == 1  # of each weight: itself, and step, exp_avg and exp_avg_sq


def test_a_weight_added_in_training_is_checked(tmp_path: Path) -> None:
    class Grows(Classifier):
        def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
            if epoch == 1:
                self.added = nn.Parameter(torch.ones(1))
                self.optimizer.add_param_group({"params": [self.added]})

        def get_optimizers_schedulers(self, *sizes: Any) -> Any:
            made = super().get_optimizers_schedulers(*sizes)
            self.optimizer = made[0][0]
            return made

        def on_end_train_epoch(self, global_step: int) -> None:
            if hasattr(self, "added"):
                self.added.data.fill_(float("nan"))

    args = arguments(tmp_path, epochs=2, checkpointer_args=ts.DefaultCheckpointerArguments(keep_last=None))
    with pytest.raises(ts.NonFiniteError, match="'added' holds inf or nan"):
        ts.Trainer(Grows(numbers(16)), args).train()
