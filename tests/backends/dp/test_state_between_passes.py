"""Gradient modes apart from the sum: outputs, records that are not finite, and unchanged state."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.private_shapes import Plain, Sequence, make, reference, run, sentences, trained, vectors
from trainstack.backends.dp.clipping import AdaptiveClipper, FlatClipper
from trainstack.backends.dp.modes import base, vmap
from trainstack.backends.dp.modes.base import Unsupported
from trainstack.backends.dp.modes.selection import MODES, choose_mode
from trainstack.backends.dp.sealed.plain_state import kept_of
from trainstack.errors import ConfigurationError

SCALAR = [mode for mode in MODES if mode != "ghost"]


def mode_for(asked: str, module: nn.Module, limit: float = 1.0) -> Any:
    parameters = trained(module)
    return MODES[asked](module, parameters, FlatClipper(limit))


# --- outputs


class Wordy(Plain):
    """Returns outputs of common kinds."""

    def train_step(self, batch: Any) -> Any:
        logits = self.logits(batch[0])
        correct = (logits.argmax(1) == batch[1]).float()
        loss = F.cross_entropy(logits, batch[1])
        return {"loss": loss, "logits": logits, "correct": correct, "accuracy": correct.mean(), "split": "train"}


@pytest.mark.parametrize("asked", SCALAR)
def test_outputs_are_those_of_the_micro_batch(asked: str) -> None:
    module, batch = Wordy(), vectors(5)
    expected = run(module, batch)
    outputs = mode_for(asked, module).add(run, batch, 5)
    assert outputs.keys() == expected.keys()
    torch.testing.assert_close(outputs["logits"], expected["logits"].detach())
    torch.testing.assert_close(outputs["loss"].detach(), expected["loss"].detach())
    torch.testing.assert_close(outputs["correct"], expected["correct"])
    torch.testing.assert_close(outputs["accuracy"].mean(), expected["accuracy"])
    assert outputs["split"] == "train"
    assert outputs["loss"].is_leaf
    assert outputs["loss"].requires_grad
    assert not outputs["logits"].requires_grad


@dataclasses.dataclass(frozen=True)
class Found:
    loss: Tensor
    parts: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "logits", self.parts["logits"])


class ReturnsDataclass(Plain):
    def train_step(self, batch: Any) -> Any:
        logits = self.logits(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        return Found(loss, {"logits": logits, "inner": [Found(loss, {"logits": logits}), "train"]})


@pytest.mark.parametrize("asked", SCALAR)
def test_a_dataclass_is_returned_unchanged_without_its_graph(asked: str) -> None:
    module, batch = ReturnsDataclass(), vectors(5)
    expected = run(module, batch)
    outputs = mode_for(asked, module).add(run, batch, 5)
    inner, name = outputs.parts["inner"]
    assert (type(outputs), type(inner), name) == (Found, Found, "train")
    for logits in (outputs.parts["logits"], outputs.logits, inner.parts["logits"], inner.logits):
        torch.testing.assert_close(logits, expected.logits.detach())
        assert not logits.requires_grad
    torch.testing.assert_close(outputs.loss.detach(), expected.loss.detach())
    torch.testing.assert_close(inner.loss.mean(), expected.loss.detach())
    assert outputs.loss.is_leaf
    assert outputs.loss.requires_grad


def test_the_loop_joins_lists_of_plain_objects() -> None:
    class Names(Plain):
        def train_step(self, batch: Any) -> Any:
            logits = self.logits(batch[0])
            return F.cross_entropy(logits, batch[1]), {"labels": batch[1].tolist(), "split": "train"}

    module, batch = Names(), vectors(5)
    assert mode_for("loop", module).add(run, batch, 5)[1] == run(module, batch)[1]


@pytest.mark.parametrize("asked", SCALAR)
def test_a_tuple_with_the_loss_in_front_stays_one(asked: str) -> None:
    class Pair(Plain):
        def train_step(self, batch: Any) -> Any:
            logits = self.logits(batch[0])
            return F.cross_entropy(logits, batch[1]), logits

    loss, logits = mode_for(asked, Pair()).add(run, vectors(5), 5)
    assert loss.shape == ()
    assert logits.shape == (5, 3)


# --- sums


@pytest.mark.parametrize("asked", MODES)
def test_micro_batches_accumulate_until_their_sums_are_popped(asked: str) -> None:
    module, batches = make("plain", per_record=asked == "ghost")
    mode, batch = mode_for(asked, module, 0.1), batches(7)
    for rows in (slice(0, 2), slice(2, 7)):
        mode.add(run, tuple(part[rows] for part in batch), rows.stop - rows.start)
    for mine, its in zip(mode.pop_sums(), reference(make("plain")[0], batch, 0.1), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)
    assert all(float(total.abs().max()) == 0.0 for total in mode.pop_sums())


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize(
    ("asked", "shape"), [*((mode, "plain") for mode in MODES), *((mode, "used twice") for mode in SCALAR)]
)
def test_a_record_that_is_not_finite_adds_exactly_nothing(asked: str, bad: float, shape: str) -> None:
    module, batches = make(shape, per_record=asked == "ghost")
    x, y = batches(6)
    x[2, 1] = bad
    mode = mode_for(asked, module, 0.1)
    mode.add(run, (x, y), 6)
    others = [0, 1, 3, 4, 5]
    for mine, its in zip(mode.pop_sums(), reference(make(shape)[0], (x[others], y[others]), 0.1), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("net", ["conv", "norm", "embedding"])
def test_bookkeeping_omits_a_nonfinite_record_in_each_layer_type(net: str) -> None:
    class Net(Sequence):
        def train_step(self, batch: Any) -> Tensor:
            weight = batch[0][:, :1].float().exp() if net == "embedding" else batch[0].flatten(1)[:, :1]
            return (self.layer(batch[0]).flatten(1).square().mean(1) * weight[:, 0]).mean()

    layers: dict[str, Callable[[], nn.Module]] = {
        "conv": lambda: nn.Conv1d(2, 3, 2),
        "norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
        "embedding": lambda: nn.Embedding(1000, 4),
    }
    module = Net()
    module.layer = layers[net]()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.startswith("layer"))
    batch = torch.randint(0, 9, (5, 4)) if net == "embedding" else torch.randn(5, 2, 4)
    batch[3, 0] = 900 if net == "embedding" else math.inf
    found = []
    for asked, rows in (("bookkeeping", [0, 1, 2, 3, 4]), ("loop", [0, 1, 2, 4])):
        mode = mode_for(asked, module, 0.1)
        mode.add(run, (batch[rows],), len(rows))
        found.append(mode.pop_sums())
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


# --- vmap


def test_vmap_processes_a_batch_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = Wordy(), vectors(7)
    whole = mode_for("vmap", module, 0.1)
    expected = whole.add(run, batch, 7)
    monkeypatch.setattr(vmap, "_FLOATS_AT_ONCE", 3 * sum(p.numel() for p in trained(module)))
    chunked = mode_for("vmap", module, 0.1)
    outputs = chunked.add(run, batch, 7)
    torch.testing.assert_close(outputs["logits"], expected["logits"])
    torch.testing.assert_close(outputs["loss"].detach(), expected["loss"].detach())
    for mine, its in zip(chunked.pop_sums(), whole.pop_sums(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


def test_vmap_draws_other_dropout_for_each_record() -> None:
    class Noisy(Plain):
        def train_step(self, batch: Any) -> Any:
            kept = F.dropout(torch.ones(len(batch[0]), 50), 0.5)
            return {"loss": self.logits(batch[0]).mean() + 0 * kept.mean(), "kept": kept}

    kept = mode_for("vmap", Noisy()).add(run, vectors(4), 4)["kept"]
    assert len({tuple(row.tolist()) for row in kept}) == 4


@pytest.mark.parametrize("asked", ["vmap", "auto"])
def test_a_train_step_that_reads_values_excludes_vmap(asked: str) -> None:
    class Reading(Plain):
        def logits(self, x: Tensor) -> Tensor:
            return super().logits(x) * (2.0 if float(x.detach().sum()) > -1e9 else 1.0)

    module = Reading()
    clipper = FlatClipper(1.0)
    if asked == "vmap":
        with pytest.raises(Unsupported, match=r"cannot be vectorised over records"):
            choose_mode(asked, module, trained(module), clipper, run, vectors(4), 4)
    else:
        assert choose_mode(asked, module, trained(module), clipper, run, vectors(4), 4).name == "bookkeeping"


def test_unread_texts_in_a_batch_allow_the_fast_mode() -> None:
    module, (x, y) = Plain(), vectors(4)
    batch = {"x": x, "y": y, "text": ["a", "b", "c", "d"], "language": ["en"] * 4, "more": (["1", "2", "3", "4"], None)}

    class Reads(Plain):
        reads = ""

        def train_step(self, batch: Any) -> Any:
            scale = {"": 1.0, "b": 2.0}.get(batch[self.reads][0] if self.reads else "", 1.5)
            assert len(batch["text"]) == len(batch["x"])
            return scale * F.cross_entropy(self.logits(batch["x"]), batch["y"])

    module = Reads()
    assert choose_mode("auto", module, trained(module), FlatClipper(1.0), run, batch, 4).name == "bookkeeping"
    for reads in ("text", "language"):
        module.reads = reads
        sums = []
        for asked in ("loop", "bookkeeping"):
            mode = mode_for(asked, module, 0.1)
            mode.add(run, batch, 4)
            sums.append(mode.pop_sums())
        for one, other in zip(*sums, strict=True):
            torch.testing.assert_close(one, other)
    mode_for("vmap", module).add(run, batch, 4)  # all records have the same language
    module.reads = "text"
    with pytest.raises(Unsupported, match=r"reads batch\['text'\], which holds no tensors"):
        mode_for("vmap", module).add(run, batch, 4)


def test_an_operation_that_vmap_cannot_vectorise_is_named() -> None:
    module, (x, y) = Plain(), vectors(4)
    with pytest.raises(Unsupported, match=r"batch\[2\] is a ndarray, which vmap cannot vectorise"):
        mode_for("vmap", module).add(run, (x, y, np.zeros(4)), 4)


# --- choosing


class Random(Plain):
    """Dropout as a layer and as a function, and noise; and a buffer that is only read."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.register_buffer("scale", torch.ones(1))

    def logits(self, x: Tensor) -> Tensor:
        x = F.dropout(self.drop(x), 0.3, self.training) + torch.randn_like(x)
        return super().logits(x * self.scale)


def test_modes_are_compared_with_equal_random_numbers() -> None:
    module = Random()
    assert choose_mode("auto", module, trained(module), FlatClipper(1.0), run, vectors(6), 6).name == "bookkeeping"


def test_uncontrolled_randomness_excludes_hooks_and_keeps_bookkeeping() -> None:
    class Numpy(Plain):
        def logits(self, x: Tensor) -> Tensor:
            return super().logits(x + float(np.random.normal()))

    module = Numpy()
    assert choose_mode("auto", module, trained(module), FlatClipper(1.0), run, vectors(6), 6).name == "bookkeeping"
    with pytest.raises(Unsupported, match="draws random numbers"):
        choose_mode("hooks", module, trained(module), FlatClipper(1.0), run, vectors(6), 6)


@pytest.fixture
def untouched() -> Iterator[None]:
    def state() -> list[Any]:
        return [torch.random.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index, union-attr]

    before = state()
    yield
    assert state() == before


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("asked", SCALAR)
def test_choosing_a_mode_changes_no_state(asked: str) -> None:
    with torch.random.fork_rng():
        module = Random()
        batch = vectors(6)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    attributes = [set(vars(layer)) for layer in module.modules()]
    if asked == "hooks":
        with pytest.raises(Unsupported, match="draws random numbers"):
            choose_mode(asked, module, trained(module), FlatClipper(1.0), run, batch, 6)
    else:
        mode = choose_mode(asked, module, trained(module), FlatClipper(1.0), run, batch, 6)
        assert all(float(total.abs().max()) == 0.0 for total in mode.sums)
        mode.close()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert [set(vars(layer)) for layer in module.modules()] == attributes
    assert all(p.grad is None and not hasattr(p, "grad_sample") for p in module.parameters())


def test_modes_are_compared_in_float32_despite_a_lower_setting() -> None:
    seen = set()

    class Noting(Plain):
        def logits(self, x: Tensor) -> Tensor:
            seen.add(allowed())
            return super().logits(x)

    def allowed() -> tuple[str, ...]:
        return (*(place.fp32_precision for place in base._PRECISIONS),)

    before, module = torch.get_float32_matmul_precision(), Noting()
    torch.set_float32_matmul_precision("medium")
    try:
        during = allowed()
        assert "bf16" in during
        choose_mode("auto", module, trained(module), FlatClipper(1.0), run, vectors(6), 6)
        assert allowed() == during
    finally:
        torch.set_float32_matmul_precision(before)
    assert {precision for found in seen for precision in found} <= set(base._FULL)


def test_a_buffer_that_learns_is_refused_by_name() -> None:
    class Counting(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(5))

        def logits(self, x: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return super().logits(x)

    module = Counting()
    with pytest.raises(Unsupported, match="mean changes in a forward pass"):
        choose_mode("loop", module, trained(module), FlatClipper(1.0), run, vectors(6), 6)


def test_state_that_a_module_keeps_of_records_is_named() -> None:
    class Centred(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.centre = torch.zeros(5)

        def logits(self, x: Tensor) -> Tensor:
            self.centre = 0.9 * self.centre + 0.1 * x.detach().mean(0)
            return super().logits(x - self.centre)

    class Keeping(Plain):
        def logits(self, x: Tensor) -> Tensor:
            self.seen = super().logits(x)
            return self.seen

    module = Centred()
    with pytest.raises(Unsupported, match="centre changes in a forward pass, and the same records"):
        choose_mode("loop", module, trained(module), FlatClipper(1.0), run, vectors(6), 6)
    module = Keeping()  # which nothing reads
    assert choose_mode("auto", module, trained(module), FlatClipper(1.0), run, vectors(6), 6).name == "bookkeeping"


@pytest.mark.parametrize("asked", MODES)
def test_modes_are_compared_in_float32_and_tried_under_autocast(asked: str) -> None:
    """Those of opacus are refused there: they scale by the batch size before they round."""

    def run_bf16(model: nn.Module, batch: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return run(model, batch)

    module, batches = make("plain", per_record=asked == "ghost")
    clipper = FlatClipper(0.05)
    if asked in ("ghost", "hooks"):
        with pytest.raises(Unsupported, match="under autocast"):
            choose_mode(asked, module, trained(module), clipper, run_bf16, batches(6), 6)
        return
    mode = choose_mode(asked, module, trained(module), clipper, run_bf16, batches(6), 6)
    x, y = batches(40, seed=5)
    for i in range(40):
        mode.add(run_bf16, (x[i : i + 1], y[i : i + 1]), 1)
        norm = math.sqrt(sum(float(total.square().sum()) for total in mode.pop_sums()))
        assert 0.05 * (1 - 1e-3) <= norm <= 0.05 * (1 + 1e-3)
    mode.close()


def test_a_coupled_loss_keeps_bookkeeping_under_autocast() -> None:
    def run_bf16(model: nn.Module, batch: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return run(model, batch)

    module, batches = make("padded mean")
    mode = choose_mode("auto", module, trained(module), FlatClipper(1.0), run_bf16, batches(6), 6)
    assert mode.name == "bookkeeping"


def test_modes_that_cannot_be_chosen_are_refused() -> None:
    module = Plain()
    clipper = FlatClipper(1.0)
    with pytest.raises(ConfigurationError, match="grad_mode='fast'"):
        choose_mode("fast", module, trained(module), clipper, run, vectors(6), 6)
    with pytest.raises(ConfigurationError, match="a probe of 1 records"):
        choose_mode("auto", module, trained(module), clipper, run, vectors(1), 1)
    with pytest.raises(ConfigurationError, match="not the module's"):
        choose_mode("auto", module, [nn.Parameter(torch.zeros(2))], FlatClipper(1.0), run, vectors(6), 6)
    with pytest.raises(Unsupported, match="ghost' clips all parameters together"):
        choose_mode("ghost", module, trained(module), AdaptiveClipper(1.0), run, vectors(6), 6)


def test_sequences_of_other_lengths_and_padding_are_exact() -> None:
    module, ids = Sequence(), sentences(8)
    mode = choose_mode("auto", module, trained(module), FlatClipper(0.2), run, ids, 8)
    assert mode.name == "bookkeeping"
    mode.add(run, ids, 8)
    for mine, its in zip(mode.pop_sums(), reference(module, ids, 0.2), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.GroupNorm(2, 4)])
def test_vmap_normalises_under_autocast(norm: nn.Module) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(4, 4), norm, nn.Linear(4, 2)

        def forward(self, stage: Any, global_step: int, batch: Tensor, device: torch.device) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.last(self.norm(self.first(batch))).float().square().mean()

    torch.manual_seed(0)
    module, found = Net(), []
    batch = torch.randn(5, 4)
    for asked in ("vmap", "loop"):
        mode = mode_for(asked, module, 0.1)
        mode.add(run, batch, 5)
        found.append(mode.pop_sums())
    for mine, its in zip(*found, strict=True):
        assert float((mine - its).norm()) <= 0.05 * float(its.norm())  # both are rounded to bfloat16 on the way


@pytest.mark.parametrize("make", [torch.zeros, np.zeros])
def test_large_attributes_are_compared_without_a_copy(make: Any) -> None:
    for count, is_large in ((2**19, False), (2**19 + 1, True)):  # 4 MiB
        value = make(count, dtype=torch.float64 if make is torch.zeros else None)
        kept = kept_of(value)
        assert kept.is_large is is_large
        assert (kept.value is value) is is_large
