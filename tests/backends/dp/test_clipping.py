"""Clippers bound the contribution of one record, in every kind of clipping."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.private_shapes import make, run, trained
from trainstack.backends.dp.clipping import (
    AdaptiveClipper,
    AutomaticClipper,
    Clipper,
    FlatClipper,
    PerLayerClipper,
    per_layer_clipper,
)
from trainstack.backends.dp.modes.loop import LoopMode
from trainstack.backends.dp.modes.selection import MODES, choose_mode
from trainstack.errors import ConfigurationError

SQUARES = torch.tensor([[9.0, 0.0, 1e-4], [16.0, 0.0, 0.0]])  # norms 5, 0 and 0.01


def norms_after(clipper: Clipper, squares: Tensor) -> Tensor:
    rows = torch.stack(clipper.factors(squares).rows)
    return (rows**2 * squares).sum(0).sqrt()


def test_flat_clipping_shortens_long_gradients_and_leaves_the_rest() -> None:
    assert norms_after(FlatClipper(2.0), SQUARES).tolist() == pytest.approx([2.0, 0.0, 0.01], rel=1e-6)


def test_a_clipped_norm_is_never_above_the_limit() -> None:
    squares = torch.rand(3, 10_000) * torch.logspace(-8, 12, 10_000)
    assert float(norms_after(FlatClipper(0.7), squares).max()) <= 0.7 * (1 + 1e-6)
    assert float(norms_after(AutomaticClipper(0.7), squares).max()) <= 0.7 * (1 + 1e-6)
    per_layer = PerLayerClipper([0, 1, 1], [0.3, 0.4])
    assert per_layer.sensitivity == pytest.approx(0.5)
    assert float(norms_after(per_layer, squares).max()) <= 0.5 * (1 + 1e-6)


def test_automatic_clipping_divides_by_the_norm_and_a_constant() -> None:
    clipper = AutomaticClipper(1.0, stability=0.01)
    assert norms_after(clipper, SQUARES).tolist() == pytest.approx([5 / 5.01, 0.0, 0.5], rel=1e-5)


def test_adaptive_clipping_counts_unclipped_records_minus_half_of_all() -> None:
    clipper = AdaptiveClipper(2.0)
    clipper.factors(SQUARES)  # one norm above the limit, two within it
    clipper.factors(torch.tensor([[math.inf], [0.0]]))  # a record that is not finite counts as 0
    assert float(clipper.pop_counts()) == -0.5 + 0.5 + 0.5
    clipper.limit = 10.0
    clipper.factors(SQUARES)
    assert float(clipper.pop_counts()) == 1.5


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize(
    "clipper", [FlatClipper(1.0), AutomaticClipper(), AdaptiveClipper(1.0), PerLayerClipper([0, 1], [1.0, 1.0])]
)
def test_one_nonfinite_gradient_drops_a_record_from_all_parameters(clipper: Clipper, bad: float) -> None:
    factors = clipper.factors(torch.tensor([[1.0, bad], [1.0, 1.0]]))
    assert factors.dropped is not None
    assert factors.dropped.tolist() == [False, True]
    assert [float(row[1]) for row in factors.rows] == [0.0, 0.0]
    assert clipper.factors(torch.ones(2, 2)).dropped is None


def test_per_layer_limits_are_common_per_parameter_or_per_module() -> None:
    names = ["encoder.weight", "encoder.bias", "head.weight"]
    assert per_layer_clipper(names, 3.0).sensitivity == pytest.approx(3.0)
    assert per_layer_clipper(names, [1.0, 2.0, 2.0]).sensitivity == pytest.approx(3.0)
    by_module = per_layer_clipper(names, [3.0, 4.0])
    assert by_module.sensitivity == pytest.approx(5.0)
    rows = by_module.factors(torch.full((3, 1), 50.0)).rows
    assert [float(row) for row in rows] == pytest.approx([0.3, 0.3, 4 / 50**0.5], rel=1e-5)
    with pytest.raises(ConfigurationError, match="3 trained parameters and 2 top-level modules"):
        per_layer_clipper(names, [1.0] * 4)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan, math.inf])
def test_a_limit_that_bounds_nothing_is_refused(limit: float) -> None:
    with pytest.raises(ConfigurationError, match="above 0"):
        FlatClipper(limit)


def clippers(parameters: int) -> list[Clipper]:
    return [
        PerLayerClipper(range(parameters), [0.1 * (i + 1) for i in range(parameters)]),
        AutomaticClipper(0.5),
        AdaptiveClipper(0.5),
    ]


@pytest.mark.parametrize("asked", [mode for mode in MODES if mode != "loop"])
@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("shape", ["plain", "tied modules", "padded mean"])
def test_modes_agree_with_the_loop_under_every_kind_of_clipping(asked: str, kind: int, shape: str) -> None:
    module, batches = make(shape, per_record=asked == "ghost")
    parameters = trained(module)
    probe, batch = batches(6, seed=9), batches(7, seed=1)
    try:
        mode = choose_mode(asked, module, parameters, clippers(len(parameters))[kind], run, probe, 6)
    except ConfigurationError:
        assert (asked, shape) in REFUSED or (asked == "ghost" and kind != 1)
        return
    other = make(shape)[0]
    oracle = LoopMode(other, trained(other), clippers(len(parameters))[kind])
    oracle.add(run, batch, 7)
    mode.add(run, batch, 7)
    for mine, its in zip(mode.pop_sums(), oracle.pop_sums(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)
    assert counts_of(mode.clipper) == counts_of(oracle.clipper)
    mode.close()


REFUSED = {("ghost", "tied modules"), *((asked, "padded mean") for asked in ("bookkeeping", "hooks", "ghost"))}


def counts_of(clipper: Any) -> float | None:
    return float(clipper.pop_counts()) if isinstance(clipper, AdaptiveClipper) else None


@pytest.mark.parametrize("asked", ["bookkeeping", "vmap", "loop"])
def test_norms_are_float32_under_autocast_and_reduced_matmul_precision(asked: str) -> None:
    module, batches = make("plain")
    mode = MODES[asked](module, trained(module), FlatClipper(0.05))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        for seed in range(20):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                mode.add(run, batches(1, seed=seed), 1)
            norm = math.sqrt(sum(float(total.square().sum()) for total in mode.pop_sums()))
            assert 0.05 * (1 - 1e-3) <= norm <= 0.05 * (1 + 1e-3)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("limit", [0.05, 0.7, 1.0, 1000.0])
def test_in_float64_no_clipped_norm_exceeds_the_limit_at_all(limit: float) -> None:
    """float32 rounds norms and factors; the noise is scaled to the limit."""
    norms = limit * (1 + torch.rand(100_000, dtype=torch.float64) * torch.logspace(-9, 8, 100_000, dtype=torch.float64))
    squares = norms.square().float()[None]
    for clipper in (FlatClipper(limit), PerLayerClipper([0], [limit]), AutomaticClipper(limit), AdaptiveClipper(limit)):
        assert float((clipper.factors(squares).rows[0].double() * norms).max()) <= limit
