"""Modules that `hooks` and `ghost` refuse, and others that they must not refuse."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.private_shapes import Plain, run, trained, vectors
from trainstack.backends.dp.clipping import FlatClipper
from trainstack.backends.dp.modes.base import Unsupported
from trainstack.backends.dp.modes.opacus_modes import GhostMode, HooksMode
from trainstack.backends.dp.modes.selection import choose_mode
from trainstack.errors import PrivacyError

pytest.importorskip("opacus")

DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "torch": lambda x: torch.rand_like(x),
    "dropout": lambda x: F.dropout(x, 0.5),
    "Python": lambda x: random.random(),
    "a seed of torch": lambda x: torch.seed(),
    "numpy": lambda x: np.random.rand(),
}


class Drawing(Plain):
    per_record = True

    def __init__(self, draw: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.draw = draw

    def logits(self, x: Tensor) -> Tensor:
        self.draw(x)
        return super().logits(x)


@pytest.mark.parametrize("kind", [HooksMode, GhostMode])
@pytest.mark.parametrize("source", DRAWS)
def test_random_numbers_in_a_step_are_refused(kind: Any, source: str) -> None:
    module = Drawing(DRAWS[source])
    mode = kind(module, trained(module), FlatClipper(1.0))
    with pytest.raises(PrivacyError, match=r"draws random numbers.*Write grad_mode='auto'"):
        mode.add(run, vectors(4), 4)


def test_dropout_without_effect_is_allowed() -> None:
    module = Drawing(lambda x: nn.Dropout(0.0)(F.dropout(x, 0.5, training=False)))
    HooksMode(module, trained(module), FlatClipper(1.0)).add(run, vectors(4), 4)


class Weighted(Plain):
    def train_step(self, batch: Any) -> Any:
        losses = F.cross_entropy(self.logits(batch[0]), batch[1], reduction="none")
        return losses.mean() * (1.0 + 0.01 * batch[0][:, 0].tanh().mean())


@pytest.mark.parametrize("records", [3, 8])
def test_an_outlier_is_accepted_and_a_weighted_loss_is_refused(records: int) -> None:
    batch = vectors(records)
    batch[0][0] *= 300
    for _ in range(5):
        module = Plain()
        assert choose_mode("hooks", module, trained(module), FlatClipper(1.0), run, batch, records).name == "hooks"
    module = Weighted()
    with pytest.raises(Unsupported, match=r"not the mean|not a plain mean"):
        choose_mode("hooks", module, trained(module), FlatClipper(1.0), run, batch, records)


class Sized(Plain):
    """Its losses are scaled, and it has a layer that it does not use."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.unused = scale, nn.Linear(2, 2)

    def train_step(self, batch: Any) -> Any:
        return super().train_step(batch) * self.scale


class Shifted(Sized):
    """The loss of a batch is that of its records and a small constant."""

    def train_step(self, batch: Any) -> Any:
        return super().train_step(batch) + 0.01 * self.scale * (len(batch[0]) > 1)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_losses_are_compared_relative_to_their_size(scale: float) -> None:
    batch = vectors(4)
    for kind, fits in ((Sized, True), (Shifted, False)):
        module = kind(scale)
        mode = HooksMode(module, trained(module), FlatClipper(1.0))
        with contextlib.nullcontext() if fits else pytest.raises(PrivacyError, match="not the mean of the losses"):
            mode.add(run, batch, 4)


class _Scaled(nn.Module):
    """A layer with a weight that opacus knows by a grad sampler of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(5) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class SampledByHand(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = _Scaled()

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(self.scaled(x))


@pytest.mark.parametrize("kind", [HooksMode, GhostMode])
@pytest.mark.parametrize("share", [0.0, 0.9])
def test_a_grad_sampler_wrong_for_some_records_ends_the_run(
    kind: Any, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping

    def sample(layer: Any, activations: Any, backprops: Tensor) -> Any:
        x = activations[0]
        wrong = torch.where(x[:, :1] > 0, share, 1.0)  # smaller gradients, which are clipped too little
        return {layer.weight: backprops * x * wrong}

    for hooks in (GradSampleHooks, GradSampleHooksFastGradientClipping):
        monkeypatch.setitem(hooks.GRAD_SAMPLERS, _Scaled, sample)
    module = SampledByHand()
    module.per_record = True
    mode = kind(module, trained(module), FlatClipper(1.0))
    x, y = vectors(6)
    x[:, 0] = -x[:, 0].abs()
    mode.add(run, (x, y), 6)
    x[:, 0] = x[:, 0].abs() if kind is GhostMode else x[:, 0]  # ghost compares one record of each batch
    x[2, 0] = x[2, 0].abs()

    def add_again() -> None:
        for _ in range(3):  # along a random direction the difference may be small once
            mode.add(run, (x, y), 6)

    with pytest.raises(PrivacyError, match=r"wrong gradient for scaled\.weight"):
        add_again()
    mode.close()
