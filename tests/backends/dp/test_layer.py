"""The private step, compared with the same training in plain PyTorch."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, numbers, train, weights
from tests.helpers.private_runs import (
    LIMIT,
    Recorded,
    Shaped,
    TwoOptimizers,
    by_hand,
    counts,
    private,
    promise,
)
from tests.helpers.private_shapes import SHAPES, make
from tools.attacks.runs import unprobed

NEVER = ("contrastive", "batch norm without affine", "batch norm frozen")
"""Shapes of which no gradient belongs to one record."""


def trained(module: Any, directory: Path, args: Any = None, **changes: Any) -> ts.Trainer:
    trainer = ts.Trainer(module, private(directory, args, **changes))
    trainer.train()
    return trainer


@pytest.mark.spec("PMB-13")
@pytest.mark.parametrize("mode", ["auto", pytest.param("bookkeeping", marks=pytest.mark.long), "vmap", "hooks", "loop"])
def test_without_noise_a_step_is_the_mean_of_clipped_gradients(mode: str, tmp_path: Path) -> None:
    module = TwoOptimizers()
    trainer = trained(module, tmp_path, promise(grad_mode=mode), epochs=2)

    assert (weights(module) - by_hand()).abs().max() <= 1e-6
    assert (weights(module) - weights(Classifier())).abs().max() > 0.01
    steps = trainer.privacy_statement().steps
    assert steps == trainer.plan.total_steps == 12  # two optimizers, and each step is charged once
    assert trainer.privacy_statement().grad_mode == ("bookkeeping" if mode == "auto" else mode)


@pytest.mark.processes
@pytest.mark.parametrize(("limit", "workers"), [(1, 0), (3, 0), (3, 1)])
def test_neither_micro_batches_nor_workers_change_anything(limit: int, workers: int, tmp_path: Path) -> None:
    module = TwoOptimizers(num_workers=workers)
    trained(module, tmp_path, epochs=2, gpu_batch_size_limit=limit)
    assert (weights(module) - by_hand()).abs().max() <= 1e-6


@pytest.mark.parametrize("limit", [3, 8])
def test_the_logged_loss_is_a_mean_over_the_drawn_records(limit: int, tmp_path: Path) -> None:
    class Constant(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return 1.0 + 1e-6 * super().train_step(global_step, batch, device)

    args = promise(log_train_loss=True)
    trainer = trained(Constant(), tmp_path, args, epochs=1, log_every=1, gpu_batch_size_limit=limit)
    assert trainer.history.get_metric_values("train/loss") == pytest.approx([1.0] * trainer.plan.total_steps, abs=1e-5)


def test_schedulers_advance_once_a_step(tmp_path: Path) -> None:
    trainer = trained(TwoOptimizers(), tmp_path, epochs=1)
    state = trainer.get_state()
    rates = [optimizer["groups"][0]["lr"] for optimizer in state["optimizers"]]
    assert rates == pytest.approx([0.2 * 0.9**6, 0.05 * 0.9**6])


@pytest.mark.parametrize(
    ("backend", "mode"),
    [
        ("sp-dp", "auto"),
        pytest.param("sp-dp", "vmap", marks=pytest.mark.long),
        ("sp-dp", "hooks"),
        ("sp-dp-bf16", "auto"),
        ("sp-dp-bf16", "vmap"),
    ],
)
def test_norms_are_those_of_float32_also_in_half_precision(backend: str, mode: str, tmp_path: Path) -> None:
    module = Recorded(numbers(30))
    args = promise(grad_mode=mode, per_sample_max_grad_norm=0.01)
    trained(module, tmp_path, args, backend=backend, train_batch_size=2, epochs=2)

    alone = [norm for norm, count in zip(module.released, counts(30, 2 / 30, range(1, 31)), strict=True) if count == 1]
    assert len(alone) > 3
    for gradient in alone:
        assert float(gradient.norm()) * 2 == pytest.approx(0.01, rel=1e-3)
        assert gradient.dtype == torch.float32


def test_empty_samples_are_steps_like_others(tmp_path: Path) -> None:
    handed_over = list[int]()

    class Listens(Recorded):
        def on_end_train_step(self, global_step: int, losses: Any) -> None:
            handed_over.append(len(losses))

    module = Listens(numbers(60))
    args = promise(noise_multiplier=1.0, debug_seed=3, expose_records=True)
    trainer = trained(module, tmp_path, args, train_batch_size=1)

    drawn = counts(60, 1 / 60, range(1, 61))
    assert drawn.count(0) > 10
    assert len(module.released) == trainer.global_steps_finished == trainer.privacy_statement().steps == 60
    assert all(float(gradient.norm()) > 0 for gradient in module.released)  # noise, also where nothing was drawn
    assert trainer.state.skipped_steps == 0
    assert [count > 0 for count in handed_over] == [count > 0 for count in drawn]  # 0 rows of a borrowed record


EACH_MODE = ("plain", "tied modules", "contrastive")
"""Shapes that are tried under each mode in each run; one that all modes take, one that some refuse, one that all do."""


def by_mode() -> list[Any]:
    """Each shape under each mode. The sums of each mode over each shape are in `test_modes`."""
    return [
        pytest.param(shape, mode, marks=() if mode == "auto" or shape in EACH_MODE else pytest.mark.long)
        for shape in SHAPES
        for mode in ("auto", "bookkeeping", "vmap", "hooks", "loop", "ghost")
    ]


@pytest.mark.parametrize(("shape", "mode"), by_mode())
def test_one_more_record_moves_the_release_within_the_limit(shape: str, mode: str, tmp_path: Path) -> None:
    """Or the module is refused, and the message names the fault."""
    batches = make(shape)[1]
    x, y = batches(9)
    if x.is_floating_point():
        x[8] *= 30  # an outlier in one of the two runs
    data, released, refusal = torch.utils.data.TensorDataset(x, y), [], ""
    for records in (9, 8):
        module = Shaped(make(shape, per_record=mode == "ghost")[0], data, range(records))
        args = promise(grad_mode=mode, dataset_size=9, delta=1e-2)
        try:
            with nullcontext() if shape in NEVER else unprobed():
                trained(module, tmp_path / str(records), args, train_batch_size=9, gpu_batch_size_limit=5)
        except ts.PrivacyError as error:
            refusal = str(error)
            break
        released.append(module.made.seen[0])
    if refusal:
        assert mode != "auto" or shape in NEVER
        assert any(word in refusal for word in ("grad_mode=", "GroupNorm", "alone", "reduction='none'"))
        return
    moved = float((released[0] - released[1]).norm()) * 9
    assert shape not in NEVER
    assert 0 < moved <= LIMIT * (1 + 1e-3)


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic", "adaptive"])
def test_every_clipping_keeps_its_sensitivity(clipping: str, tmp_path: Path) -> None:
    released = []
    for records in (9, 8):
        module = Recorded(torch.utils.data.Subset(numbers(9), range(records)))
        args = promise(clipping=clipping, dataset_size=9, delta=1e-2, per_sample_max_grad_norm=0.05)
        trained(module, tmp_path / str(records), args, train_batch_size=9)
        released.append(module.released[0])
    moved = float((released[0] - released[1]).norm()) * 9
    assert 0.01 < moved <= 0.05 * (1 + 1e-3)


def test_one_limit_a_module_is_applied_to_each(tmp_path: Path) -> None:
    module = Recorded(numbers(9))
    args = promise(clipping="per_layer", per_sample_max_grad_norm=[0.01, 0.02, 0.03, 0.04])
    trained(module, tmp_path, args, train_batch_size=9)
    parts = torch.split(module.released[0], [p.numel() for p in module.parameters()])
    for part, limit in zip(parts, (0.01, 0.02, 0.03, 0.04), strict=True):
        assert 0.1 * limit < float(part.norm()) <= limit * (1 + 1e-3)


def test_an_adaptive_limit_follows_the_quantile_and_is_restored(tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments()
    args = promise(clipping="adaptive", per_sample_max_grad_norm=50.0, target_quantile=0.5, clip_learning_rate=0.5)
    first = trained(Classifier(), tmp_path, args, epochs=6, checkpointer_args=saving)
    limit = first.privacy_statement().max_grad_norm[0]
    assert 0.1 < limit < 10  # gradients are about 1 long

    again = ts.Trainer(Classifier(), private(tmp_path, args, epochs=6, checkpointer_args=saving, resume=True))
    assert again.privacy_statement().max_grad_norm == (limit,)


@pytest.mark.slow
def test_adaptive_noise_is_split_between_gradients_and_their_count(tmp_path: Path) -> None:
    """Andrew et al., theorem 1: sigma_g^-2 + (2 sigma_b)^-2 = sigma^-2."""
    module = Recorded(numbers(60), lr=0.0)
    args = promise(
        clipping="adaptive", noise_multiplier=2.0, debug_seed=1, count_noise_multiplier=1.5, clip_learning_rate=1e-9
    )
    trained(module, tmp_path, args, train_batch_size=1, epochs=8)
    empty = [i for i, count in enumerate(counts(60, 1 / 60, range(1, 481), seed=1)) if count == 0]
    noise = torch.stack([module.released[i] for i in empty]) / LIMIT
    assert float(noise.std()) == pytest.approx((2.0**-2 - 3.0**-2) ** -0.5, rel=0.03)


def test_a_recurrent_module_trains_without_a_torch_warning(tmp_path: Path) -> None:
    class Recurrent(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.LSTM(6, 3, batch_first=True)  # type: ignore[assignment]

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return torch.nn.functional.cross_entropy(self.net(batch[0][:, None])[0][:, -1], batch[1])

    train(Recurrent(), tmp_path, backend="sp-dp", max_steps=2)
