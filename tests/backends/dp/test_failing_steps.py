"""The state that a gradient mode leaves when `train_step` fails, and the error."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import default_collate

import trainstack as ts
from tests.helpers.modules import Classifier
from tests.helpers.private_runs import private, promise
from tests.helpers.private_shapes import Plain, reference, run, trained, vectors
from trainstack.backends.dp.clipping import FlatClipper
from trainstack.backends.dp.modes.base import GradientMode
from trainstack.backends.dp.modes.selection import MODES, choose_mode


class Failing(Plain):
    """Raises `error`, once it is set, after the first layer."""

    error: Exception | None = None

    def __init__(self, per_record: bool = False) -> None:
        super().__init__()
        self.per_record = per_record

    def logits(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.error is not None:
            raise self.error
        return self.last(torch.tanh(x))


def chosen(asked: str, module: Failing, limit: float = 0.2) -> GradientMode:
    return choose_mode(asked, module, trained(module), FlatClipper(limit), run, vectors(6), 6)


@pytest.mark.parametrize("asked", MODES)
def test_a_failed_step_does_not_change_later_steps(asked: str) -> None:
    module = Failing(per_record=asked == "ghost")
    mode, batch = chosen(asked, module), vectors(5, seed=2)
    module.error = ValueError("label 7 out of range")
    with pytest.raises(ValueError, match="label 7"):
        mode.add(run, batch, 5)
    mode.pop_sums()
    module.error = None
    mode.add(run, batch, 5)
    sums = mode.pop_sums()
    mode.close()
    for mine, its in zip(sums, reference(module, batch, 0.2), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("asked", MODES)
@pytest.mark.parametrize(
    "error", [ValueError("label 7 out of range"), NotImplementedError("later"), torch.OutOfMemoryError("CUDA is full")]
)
def test_an_exception_of_train_step_is_raised_unchanged(asked: str, error: Exception) -> None:
    module = Failing(per_record=asked == "ghost")
    mode = chosen(asked, module)
    module.error = error
    with pytest.raises(type(error)) as caught:
        mode.add(run, vectors(4), 4)
    assert caught.value is error
    mode.close()


class Full(torch.autograd.Function):
    """Its backward pass runs out of memory for more than one record."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        if len(gradients[0]) > 1:
            raise torch.OutOfMemoryError("CUDA is full")
        return gradients[0]


def test_an_out_of_memory_error_of_a_trial_is_unchanged() -> None:
    class Large(Plain):
        def logits(self, x: Tensor) -> Tensor:
            return self.last(Full.apply(self.first(x)))

    module = Large()
    with pytest.raises(torch.OutOfMemoryError, match="CUDA is full"):
        choose_mode("hooks", module, trained(module), FlatClipper(1.0), run, vectors(6), 6)
    assert choose_mode("auto", module, trained(module), FlatClipper(1.0), run, vectors(6), 6).name == "loop"


class Counting(Plain):
    """Histograms have no rule for `vmap`, which then warns that it is slow."""

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x + torch.histc(x.detach(), 2, -9, 9).sum() - 5)


def test_vmap_leaves_the_filters_of_warnings_as_they_were() -> None:
    module, before = Counting(), list(warnings.filters)
    mode = choose_mode("vmap", module, trained(module), FlatClipper(1.0), run, vectors(6), 6)
    mode.add(run, vectors(4), 4)
    assert list(warnings.filters) == before


@pytest.mark.parametrize("asked", ["vmap", "hooks"])
def test_a_warning_of_train_step_is_shown_at_most_once(asked: str) -> None:
    class Warning(Plain):
        def logits(self, x: Tensor) -> Tensor:
            warnings.warn("a habit", stacklevel=1)
            return super().logits(x)

    module = Warning()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        mode = choose_mode(asked, module, trained(module), FlatClipper(1.0), run, vectors(6), 6)
        shown.clear()
        for _ in range(3):
            mode.add(run, vectors(4), 4)
    assert len(shown) <= 1
    mode.close()


def test_a_module_that_was_refused_is_left_without_hooks(tmp_path: Path) -> None:
    class Scaled(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return F.cross_entropy(self.net(batch[0]), batch[1]) / batch[2].sum(1).mean()

    def collate(samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return x, y, x.max().expand(len(x), 1)

    module = Scaled(collate_fn=collate)
    with pytest.raises(ts.PrivacyError, match=r"together than alone|when one is left out"):
        ts.Trainer(module, private(tmp_path, promise(noise_multiplier=1.0, grad_mode="hooks"))).train()
    assert not any(layer._forward_hooks or "activations" in vars(layer) for layer in module.modules())


def test_an_error_of_torch_in_a_private_step_reaches_the_user(tmp_path: Path) -> None:
    class Broken(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if global_step == 2:
                raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
            return super().train_step(global_step, batch, device)

    with pytest.raises(RuntimeError, match="cannot be multiplied") as raised:
        ts.Trainer(Broken(), private(tmp_path)).train()
    assert "In a private run" in "".join(raised.value.__notes__)
