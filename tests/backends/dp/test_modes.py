"""Gradient modes give the sum of clipped per-record gradients exactly, or refuse and say where."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.private_shapes import SHAPES, Plain, Shape, make, reference, run, trained, vectors
from trainstack.backends.dp.clipping import FlatClipper
from trainstack.backends.dp.modes import loss_check, op_interceptor
from trainstack.backends.dp.modes.base import GradientMode, Unsupported
from trainstack.backends.dp.modes.loss_check import LossCheck
from trainstack.backends.dp.modes.param_uses import NormUse
from trainstack.backends.dp.modes.selection import MODES, _Reference, choose_mode
from trainstack.errors import ModuleContractError

BATCH_NORM = r"norm \(BatchNorm1d\) normalises records by each other"
COUPLED = "not the mean of the losses of its records"

# The shapes that a mode refuses, and the words of the refusal. Everything else is exact.
REFUSED: dict[str, dict[str, str]] = {
    "loop": {},
    "vmap": {},
    "bookkeeping": {},
    "hooks": {
        "loss normalised by weights": COUPLED,
        "contrastive": COUPLED,
        "padded mean": COUPLED,
        "direct parameter": r"the module itself \(Direct\), which holds parameters directly \(offset, gain\)",
        "keyword call": r"named\.inner \(Linear\)",
        "functional weight": r"wrong gradient for shared\.weight",
        "language model head": r"wrong gradient for embedding\.weight",
    },
    "ghost": {
        "loss normalised by weights": COUPLED,
        "contrastive": COUPLED,
        "tied modules": "Parameter tying",
        "used twice": "Parameter tying",
        "padded mean": COUPLED,
        "direct parameter": r"the module itself \(Direct\), which holds parameters directly \(offset, gain\)",
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
    """A case; `grad_mode="auto"` never takes the modes of opacus, which each run tries with some shapes they take."""
    of_opacus, some = mode in ("hooks", "ghost"), {"plain", "custom layer", "unused parameter", *REFUSED[mode]}
    marks = [pytest.mark.slow, *([] if shape in some else [pytest.mark.long])] if of_opacus else []
    return pytest.param(mode, shape, marks=marks)


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
    mode, batches = chosen(asked, shape)
    batch = batches(7, seed=1)
    for limit in (0.05, 1.0, 1e6):
        mode.clipper = FlatClipper(limit)
        expected = reference(make(shape)[0], batch, limit)
        size = distance(expected, [torch.zeros_like(e) for e in expected])
        assert distance(summed(mode, batch), expected) <= 1e-6 * max(size, limit if limit < 1e6 else 1.0)
    mode.close()


@pytest.mark.parametrize(
    ("asked", "shape"),
    [
        pytest.param(*case, marks=() if "bookkeeping" in case or "plain" in case else pytest.mark.long)
        for case in CASES
        if case[1] not in REFUSED[case[0]]
    ],
)
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
def test_auto_takes_the_fastest_exact_mode(shape: str) -> None:
    if shape.startswith("batch norm"):
        with pytest.raises(Unsupported, match=BATCH_NORM):
            chosen("auto", shape)
    else:
        assert chosen("auto", shape)[0].name == AUTOMATIC[shape]


def test_a_product_with_a_transposed_weight_needs_no_copies_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_interceptor, "FLOATS_OF_COPIES", 0)
    mode, batches = chosen("bookkeeping", "language model head")
    assert distance(summed(mode, batches(7, seed=1)), reference(mode.module, batches(7, seed=1), 1.0)) < 1e-5


def test_auto_logs_its_choice_and_why_faster_modes_are_excluded(caplog: pytest.LogCaptureFixture) -> None:
    class Steered(Plain):
        def logits(self, x: Tensor) -> Tensor:
            return super().logits(x.clone().requires_grad_())

    module = Steered()
    with caplog.at_level("INFO", logger="trainstack"):
        choose_mode("auto", module, trained(module), FlatClipper(1.0), run, vectors(6), 6)
    first, *reasons = caplog.messages
    assert first == "gradient mode 'loop', one record at a time, is slow"
    assert [re.match(r"not '(\w+)': train_step cannot be vectorised over records\. ", line)[1] for line in reasons] == [  # type: ignore[index]
        "bookkeeping",
        "vmap",
    ]
    assert max(map(len, caplog.messages)) < 500


def _reference(scales: list[float]) -> _Reference:
    sums = [torch.zeros(2) for _ in scales]
    return _Reference(batch=None, records=2, scaling=None, sums=sums, scales=torch.tensor(scales))  # type: ignore[arg-type]


@pytest.mark.parametrize("parameter", [0, 1])
def test_the_tolerance_scales_with_own_and_largest_gradients(parameter: int) -> None:
    case = _reference([1.0, 1e-4])
    limit = 1e-4 * (case.scales[parameter] + 1e-2)
    for factor, expected in ((0.99, None), (1.01, parameter)):
        sums = [torch.zeros(2), torch.zeros(2)]
        sums[parameter][0] = factor * limit
        assert case.differs(sums, case.scales, 1e-4) == expected
        scales = case.scales.clone()
        scales[parameter] += factor * limit
        assert case.differs(case.sums, scales, 1e-4) == expected
    assert case.differs([torch.full((2,), math.nan), torch.zeros(2)], case.scales, 1e-4) == 0


def test_a_slightly_wrong_gradient_of_one_record_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_check.secrets, "randbits", lambda bits: 0)
    torch.manual_seed(0)
    module, (x, y) = Plain(), vectors(4)
    parameters = trained(module)
    check = LossCheck(module, [name for name, _ in module.named_parameters()], parameters)
    assert check.check(run, (x, y), 4) is not None
    losses = [run(module, (x[i : i + 1], y[i : i + 1])) for i in range(4)]
    rows = [
        torch.stack(parts) for parts in zip(*(torch.autograd.grad(loss, parameters) for loss in losses), strict=True)
    ]
    norms = torch.cat([row.flatten(1) for row in rows], 1).norm(dim=1)
    assert check.wrong_row(rows, norms, 1.0) is None
    rows[0][2] *= 1.1
    assert check.wrong_row(rows, norms, 1.0) == 2


class ZeroGradient(Shape):
    """The biases of the first convolution and norm have no gradient, because each group has one channel."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3),
            nn.GroupNorm(8, 8),
            nn.Conv2d(8, 8, 3),
            nn.GroupNorm(8, 8),
            nn.Flatten(),
            nn.Linear(32, 3),
        )

    def logits(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 10))])
def test_a_zero_gradient_does_not_prevent_the_fast_mode(seed: int) -> None:
    torch.manual_seed(seed)
    module = ZeroGradient()
    batch = torch.randn(6, 1, 6, 6), torch.randint(0, 3, (6,))
    assert choose_mode("auto", module, trained(module), FlatClipper(1.0), run, batch, 6).name == "bookkeeping"


def test_a_wrong_mode_is_refused_despite_a_zero_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = NormUse.receive

    def doubled(self: NormUse, gradient: Tensor, records: int) -> None:
        receive(self, gradient, records)
        self._rows = {which: 1.001 * rows for which, rows in self._rows.items()}

    monkeypatch.setattr(NormUse, "receive", doubled)
    module = ZeroGradient()
    batch = torch.randn(6, 1, 6, 6), torch.randint(0, 3, (6,))
    with pytest.raises(Unsupported, match=r"wrong gradient for net\."):
        choose_mode("bookkeeping", module, trained(module), FlatClipper(1.0), run, batch, 6)


@pytest.mark.parametrize("shape", ["loss normalised by weights", "plain"])
def test_a_normalisation_without_effect_is_logged_once(shape: str, caplog: pytest.LogCaptureFixture) -> None:
    chosen("auto", shape)
    told = [line for line in caplog.messages if "the loss of a batch is not the mean" in line]
    assert len(told) == (shape != "plain")


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_part_compiled_by_torch_jit_is_refused() -> None:
    module = Plain()
    module.first = torch.jit.script(nn.Linear(5, 8))
    with pytest.raises(Unsupported, match=r"^first is compiled by torch\.jit.*Give the nn\.Module"):
        choose_mode("auto", module, trained(module), FlatClipper(1.0), run, vectors(6), 6)


@pytest.mark.parametrize("asked", MODES)
def test_a_loss_without_gradient_is_an_error_in_every_mode(asked: str) -> None:
    class Detached(Plain):
        def train_step(self, batch: Any) -> Tensor:
            return super().train_step(batch).detach()

    module = Detached()
    module.per_record = asked == "ghost"
    mode = MODES[asked](module, trained(module), FlatClipper(1.0))
    with pytest.raises(ModuleContractError, match="without a gradient graph"):
        mode.add(run, vectors(6), 6)
    mode.close()
