"""The short version of the benchmark of gradient modes that stands guard: ratios of CPU time, never times."""

from __future__ import annotations

from statistics import median

import pytest
import torch

from tools.bench.__main__ import main
from tools.bench.private import MODELS, memory, ratios

pytestmark = pytest.mark.slow

BOUND = 2.5
"""The fastest mode costs at most this many plain steps."""


@pytest.mark.parametrize("model", MODELS)
def test_the_fastest_mode_keeps_its_bound_and_beats_opacus_hooks(model: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = ratios(model, ["bookkeeping", "opacus hooks"], 256, 3)
    finally:
        torch.set_num_threads(threads)
    assert median(found["bookkeeping"]) <= BOUND
    assert median(found["bookkeeping"]) < median(found["opacus hooks"])


def test_memory_is_what_a_new_process_needs() -> None:
    assert memory("mlp", "vmap", 64) > memory("mlp", "plain", 64)


def test_make_bench_reaches_it_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["private", "--model", "mlp", "--records", "4", "--only", "bookkeeping", "--rounds", "1"]) == 0
    assert "| mlp | 4 |" in capsys.readouterr().out
