"""Gradient modes give the sum of clipped per-record gradients exactly, or refuse and say where."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.private_shapes import SHAPES, make, reference, run, trained
from trainstack.backends.dp.clipping import FlatClipper
from trainstack.backends.dp.modes.base import GradientMode, Unsupported
from trainstack.backends.dp.modes.selection import MODES, choose_mode

BATCH_NORM = r"norm \(BatchNorm1d\) normalises records by each other"
COUPLED = "not the mean of the losses of its records"

# What a mode refuses: the shape, and what the refusal names. Everything else is exact.
REFUSED: dict[str, dict[str, str]] = {
    "loop": {},
    "vmap": {},
    "bookkeeping": {},
    "hooks": {
        "loss normalised by weights": COUPLED,
        "contrastive": COUPLED,
        "padded mean": COUPLED,
        "direct parameter": r"the module itself \(Direct\), which has parameters of its own \(offset, gain\)",
        "keyword call": r"named\.inner \(Linear\)",
        "functional weight": r"wrong gradient for shared\.weight",
        "language model head": r"wrong gradient for embedding\.weight",
    },
    "ghost": {
        "loss normalised by weights": "one loss per example",
        "contrastive": "Parameter tying",
        "tied modules": "Parameter tying",
        "used twice": "Parameter tying",
        "padded mean": COUPLED,
        "direct parameter": r"the module itself \(Direct\), which has parameters of its own \(offset, gain\)",
        "keyword call": r"named\.inner \(Linear\)",
        "functional weight": r"wrong gradient for shared\.weight",
        "language model head": r"wrong gradient for embedding\.weight",
    },
}
for mode in REFUSED.values():
    mode |= {"batch norm without affine": BATCH_NORM, "batch norm frozen": BATCH_NORM}

# The fastest exact mode.
AUTOMATIC = dict.fromkeys(SHAPES, "bookkeeping")
CASES = [(mode, shape) for mode in MODES for shape in SHAPES]


def marked(mode: str, shape: str) -> Any:
    """A case; those of the modes that `grad_mode="auto"` takes last or never are slow."""
    return pytest.param(mode, shape, marks=pytest.mark.slow if mode in ("hooks", "ghost") else ())


def chosen(asked: str, shape: str, limit: float = 1.0, seed: int = 0) -> tuple[GradientMode, Any]:
    module, batches = make(shape, per_record=asked == "ghost")
    parameters = trained(module)
    clipper = FlatClipper(limit)
    return choose_mode(asked, module, parameters, clipper, run, batches(6, seed=9), 6), batches


def summed(mode: GradientMode, batch: Any) -> list[Tensor]:
    mode.add(run, batch, len(batch[0]))
    return mode.pop_sums()


def distance(left: list[Tensor], right: list[Tensor]) -> float:
    return float(torch.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(left, right, strict=True))))  # type: ignore[arg-type]


@pytest.mark.parametrize(("asked", "shape"), [marked(*case) for case in CASES])
def test_a_mode_is_exact_or_refuses_by_name(asked: str, shape: str) -> None:
    if shape in REFUSED[asked]:
        with pytest.raises(Unsupported, match=REFUSED[asked][shape]):
            chosen(asked, shape)
        return
    for limit in (0.05, 1.0, 1e6):
        mode, batches = chosen(asked, shape, limit)
        batch = batches(7, seed=1)
        expected = reference(make(shape)[0], batch, limit)
        size = distance(expected, [torch.zeros_like(e) for e in expected])
        assert distance(summed(mode, batch), expected) <= 1e-6 * max(size, limit if limit < 1e6 else 1.0)
        mode.close()


@pytest.mark.parametrize(("asked", "shape"), [marked(*case) for case in CASES if case[1] not in REFUSED[case[0]]])
def test_one_record_changes_the_sum_by_at_most_the_limit(asked: str, shape: str) -> None:
    limit = 0.05
    mode, batches = chosen(asked, shape, limit)
    batch = batches(7, seed=2)
    whole = summed(mode, batch)
    changes = [
        distance(whole, summed(mode, tuple(torch.cat([part[:i], part[i + 1 :]]) for part in batch))) for i in range(7)
    ]
    assert max(changes) <= limit * (1 + 1e-3)
    assert shape == "contrastive" or max(changes) >= 0.9 * limit


@pytest.mark.parametrize("shape", SHAPES)
def test_auto_takes_the_fastest_that_is_exact(shape: str) -> None:
    if shape.startswith("batch norm"):
        with pytest.raises(Unsupported, match=BATCH_NORM):
            chosen("auto", shape)
    else:
        assert chosen("auto", shape)[0].name == AUTOMATIC[shape]


def test_auto_says_what_it_chose_and_why_not_something_faster(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="trainstack"):
        chosen("auto", "language model head")
    assert re.search(r"gradient mode 'vmap'.*bookkeeping: embedding\.weight", caplog.text)
