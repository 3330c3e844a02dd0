"""Short runs of the benchmark of private training: bounds of ratios of CPU times, not of times."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.costs import cpu_s, least_ratio
from tools.bench.__main__ import main
from tools.bench.private import peak
from tools.bench.private_contenders import MODELS, dataset, prepared
from tools.bench.private_floor import floor_step

slow = pytest.mark.slow

BOUND = 2.5
"""The fastest mode costs at most this many plain steps."""


@slow
@pytest.mark.parametrize("model", [m if m == "mlp" else pytest.param(m, marks=pytest.mark.long) for m in MODELS])
def test_the_fastest_mode_keeps_its_bound_and_beats_opacus_hooks(model: str, tmp_path: Path) -> None:
    data = dataset(model)

    def cost(contender: str) -> Callable[[], float]:
        steps = prepared("gradients", contender, model, 64, data, tmp_path)
        return lambda: cpu_s(lambda: steps(1))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # opacus warns in every step
            ours = cost("bookkeeping")
            assert least_ratio(ours, cost("plain"), BOUND) <= BOUND
            assert least_ratio(ours, cost("opacus hooks"), 0.95) <= 0.95
    finally:
        torch.set_num_threads(threads)


@slow
def test_memory_is_measured_in_a_new_process() -> None:
    assert peak("gradients", "mlp", "vmap", 64) > peak("gradients", "mlp", "plain", 64)


def _table_row(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["private", "--records", "8", "--threads", "1", "--rounds", "1", *arguments]) == 0
    return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| mlp")).split("|")


@slow
def test_whole_steps_are_measured_together_with_plain_ones_and_opacus(capsys: pytest.CaptureFixture[str]) -> None:
    row = _table_row(capsys, "--model", "mlp", "--no-memory")
    assert all(float(ratio) > 0 for ratio in row[5:11])


@slow
def test_gradients_alone_are_measured_by_mode(capsys: pytest.CaptureFixture[str]) -> None:
    row = _table_row(capsys, "--gradients", "--model", "mlp", "--only", "bookkeeping", "--no-memory")
    assert float(row[4]) > 0


@pytest.mark.parametrize("model", MODELS)
def test_the_step_by_hand_is_a_private_step(model: str) -> None:
    make, inputs = MODELS[model]
    torch.manual_seed(0)
    net, x, y = make(), inputs(6), torch.randint(10, (6,))
    parameters = list(net.parameters())
    expected = [torch.zeros_like(p) for p in parameters]
    for i in range(6):
        loss = F.cross_entropy(net(x[i : i + 1]), y[i : i + 1])
        gradients = torch.autograd.grad(loss, parameters)
        norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        for total, g in zip(expected, gradients, strict=True):
            total += g * min(1.0, 0.5 / norm.item()) / 6
    before = [p.detach().clone() for p in parameters]
    floor_step(net, torch.optim.SGD(parameters, lr=1.0), x, y, norm=0.5, sigma=0.0)
    for old, p, mean in zip(before, parameters, expected, strict=True):
        torch.testing.assert_close(old - p.detach(), mean, rtol=1e-4, atol=1e-6)
