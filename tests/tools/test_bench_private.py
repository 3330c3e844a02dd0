"""The short version of the benchmark of gradient modes that stands guard: ratios of CPU time, never times."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

from tests.helpers.costs import cpu_s, least_ratio
from tools.bench.__main__ import main
from tools.bench.private import MODELS, memory, prepared

pytestmark = pytest.mark.slow

BOUND = 2.5
"""The fastest mode costs at most this many plain steps."""


@pytest.mark.parametrize("model", MODELS)
def test_the_fastest_mode_keeps_its_bound_and_beats_opacus_hooks(model: str) -> None:
    def cost(contender: str) -> Callable[[], float]:
        step = prepared(model, contender, 64)
        return lambda: cpu_s(step)

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


def test_memory_is_what_a_new_process_needs() -> None:
    assert memory("mlp", "vmap", 64) > memory("mlp", "plain", 64)


def test_whole_steps_are_measured_beside_plain_ones_and_opacus(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["private-steps", "--model", "mlp", "--records", "8", "--threads", "1", "--rounds", "1", "--no-memory"])
        == 0
    )
    row = capsys.readouterr().out.splitlines()[-1].split("|")
    assert row[1].strip() == "mlp"
    assert all(float(ratio) > 0 for ratio in row[5:8])


def test_make_bench_reaches_it_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["private", "--model", "mlp", "--records", "4", "--only", "bookkeeping", "--rounds", "1"]) == 0
    assert "| mlp | 4 |" in capsys.readouterr().out
