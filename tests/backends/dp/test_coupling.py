"""Code that would couple records in `bookkeeping` is refused there, or applied record by record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.checkpoint import checkpoint

from tests.helpers.private_shapes import Plain, Shape, run, trained, vectors
from trainstack.backends.dp.clipping import FlatClipper
from trainstack.backends.dp.modes.base import Unsupported
from trainstack.backends.dp.modes.bookkeeping import BookkeepingMode
from trainstack.backends.dp.modes.loop import LoopMode
from trainstack.backends.dp.modes.selection import choose_mode


class Centring(torch.autograd.Function):
    """A function whose `vmap` rule gets all records, in both passes."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return x - x.mean(in_dims[0], keepdim=True), in_dims[0]


class Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Written(Plain):
    """`logits` is `written(module, x)`."""

    def __init__(self, written: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.written = written
        self.extra = nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.ConvTranspose1d(2, 1, 1))

    def logits(self, x: Tensor) -> Tensor:
        return self.written(self, x)

    def plain(self, x: Tensor) -> Tensor:
        return super().logits(x)


def packed(module: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.mean(0, keepdim=True).expand_as(t)):
        return module.plain(x)


def hooked(module: Any, x: Tensor) -> Tensor:
    hidden = module.first(x)
    hidden.register_hook(lambda gradient: gradient - gradient.mean(0))
    return module.last(hidden)


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "an autograd function with a custom rule": (
        lambda m, x: m.plain(Centring.apply(x)),
        "the autograd function Centring has no rule",
    ),
    "hooks on saved tensors": (packed, "hooks on saved tensors"),
    "a hook on a hidden tensor": (hooked, "hook"),
    "gradient checkpointing": (
        lambda m, x: m.last(checkpoint(m.first, x, use_reentrant=False)),
        "hooks on saved tensors",
    ),
    "a transform within": (
        lambda m, x: m.last(vmap(lambda row: F.linear(row, m.first.weight, m.first.bias))(x)),
        r"first\.weight is used in a way that bookkeeping does not see",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_operation_that_could_couple_records_is_refused(what: str) -> None:
    module = Written(REFUSED[what][0])
    with pytest.raises(Unsupported, match=REFUSED[what][1]):
        choose_mode("bookkeeping", module, trained(module), FlatClipper(1.0), run, vectors(6), 6)
    assert choose_mode("auto", module, trained(module), FlatClipper(1.0), run, vectors(6), 6).one_by_one


class CentredGradient(Doubled):
    """A function that mixes records in its backward pass only."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Centring.apply(gradient)  # type: ignore[no-any-return, no-untyped-call]


@torch.library.custom_op("trainstack_test::centred", mutates_args=())
def centred(x: Tensor) -> Tensor:
    return x.clone()


torch.library.register_autograd(centred, lambda ctx, gradient: gradient)
torch.library.register_vmap(centred, lambda info, in_dims, x: (x - x.mean(in_dims[0], keepdim=True), in_dims[0]))


@pytest.mark.parametrize("mode", ["bookkeeping", "vmap", "hooks"])
@pytest.mark.parametrize("mixing", [Centring.apply, CentredGradient.apply, centred])
def test_a_vmap_rule_that_receives_all_records_is_refused(mode: str, mixing: Any) -> None:
    module = Written(lambda module, x: module.last(mixing(module.first(x))))
    if mode == "hooks":
        pytest.importorskip("opacus")
        del module.extra
    with pytest.raises(Unsupported, match=r"no rule for records|might mix records|cannot be compared"):
        choose_mode(mode, module, trained(module), FlatClipper(1.0), run, vectors(6), 6)
    assert choose_mode("auto", module, trained(module), FlatClipper(1.0), run, vectors(6), 6).name == "loop"


@pytest.mark.parametrize("place", ["module", "module before", "parameter", "accumulated"])
def test_hooks_of_the_backward_pass_are_refused_at_any_time(place: str) -> None:
    module = Plain()
    mode = BookkeepingMode(module, trained(module), FlatClipper(1.0))
    mode.add(run, vectors(6), 6)
    hook = {
        "module": lambda: module.first.register_full_backward_hook(lambda *given: None),
        "module before": lambda: module.first.register_full_backward_pre_hook(lambda *given: None),
        "parameter": lambda: module.first.weight.register_hook(lambda gradient: gradient),
        "accumulated": lambda: module.first.weight.register_post_accumulate_grad_hook(lambda parameter: None),
    }[place]()
    with pytest.raises(Unsupported, match=r"hook.*grad_mode='loop'"):
        mode.add(run, vectors(6), 6)
    hook.remove()
    mode.add(run, vectors(6), 6)


def branch(module: Any, x: Tensor) -> Tensor:
    """Each record takes its own branch, by values that a batch does not have."""
    hidden = module.first(x)
    if hidden.sum() > 0:
        hidden = 2 * hidden
    return module.last(hidden) * round(float(hidden.detach()[0, 0]))


def inner_products(module: Any, x: Tensor) -> Tensor:
    """Attention across the batch."""
    return module.plain(torch.softmax(x @ x.T, 1) @ x)


def two_images(module: Any, x: Tensor) -> Tensor:
    images = torch.stack([x, 2 * x], 1).flatten(0, 1)[:, None]
    return F.conv1d(images, module.first.weight[:3, None]).flatten(1)[: len(x)]


def two_images_in_a_layer(module: Any, x: Tensor) -> Tensor:
    images = module.extra(torch.stack([x, 2 * x], 1).flatten(0, 1)[:, None])
    return module.plain(images.view(len(x), -1, 5).sum(1))


EXACT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "an autograd function with a generated rule": lambda m, x: m.plain(Doubled.apply(x)),
    "branches on values": branch,
    "attention across the batch": inner_products,
    "centring": lambda m, x: m.plain(x - x.mean(0)) + m.plain(x),
    "a shuffled batch": lambda m, x: m.plain(x.roll(1, 0)),
    "mixup within the batch": lambda m, x: m.plain(0.5 * x + 0.5 * x.flip(0)),
    "records in columns": lambda m, x: (m.first.weight @ x.T).T @ m.last.weight.T,
    "softmax of a weight": lambda m, x: m.last(x @ m.first.weight.softmax(0).t()),
    "a weight in a list": lambda m, x: m.plain(x) + torch.cat([m.last.bias, m.last.bias])[1:4],
    "an einsum": lambda m, x: m.last(torch.einsum("bi,oi->bo", x, m.first.weight)),
    "operators of torch": lambda m, x: m.plain(torch.ops.aten.mul(torch.ops.aten.mul.Tensor(x, x), x)),
    "functional_call": lambda m, x: m.last(functional_call(m.first, dict(m.first.named_parameters()), (x,))),
    "a weight without a gradient": lambda m, x: m.plain(x) * m.first.weight.detach().norm(),
    "two images a record": two_images,
    "two images a record in layers": two_images_in_a_layer,
}


@pytest.mark.parametrize("what", EXACT)
def test_operations_that_couple_a_batch_are_applied_record_by_record(what: str) -> None:
    torch.manual_seed(0)
    module, batch = Written(EXACT[what]), vectors(7, seed=1)
    assert choose_mode("auto", module, trained(module), FlatClipper(1.0), run, vectors(6), 6).name == "bookkeeping"
    found = []
    for kind in (BookkeepingMode, LoopMode):
        mode = kind(module, trained(module), FlatClipper(0.3))
        mode.add(run, batch, 7)
        found.append(torch.cat([total.flatten() for total in mode.pop_sums()]))
    assert float((found[0] - found[1]).norm()) <= 1e-6 * float(found[1].norm())


def test_a_masked_mean_and_outputs_of_groups_keep_their_order() -> None:
    class Masked(Shape):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(5, 3)

        def train_step(self, batch: Any) -> Any:
            logits = self.last(batch[0])
            losses = F.cross_entropy(logits, batch[1], reduction="none")
            return {"loss": losses[batch[1] > 0].mean() + (1.0 if losses.sum() > 1 else 0.0), "logits": logits}

    module, batch = Masked(), vectors(9, seed=2)
    mode = BookkeepingMode(module, trained(module), FlatClipper(0.3))
    outputs = mode.add(run, batch, 9)
    torch.testing.assert_close(outputs["logits"], module.last(batch[0]).detach())


@pytest.mark.parametrize("mode", ["bookkeeping", "vmap", "loop"])
def test_an_observer_sees_the_losses_and_norms_of_all_records(mode: str) -> None:
    module, batch = Plain(), vectors(7)
    chosen = choose_mode(mode, module, trained(module), FlatClipper(0.1), run, vectors(6), 6)
    seen: list[Any] = []
    chosen.observer = lambda losses, norms, outputs: seen.append((losses, norms))
    chosen.add(run, batch, 7)
    losses, norms = (torch.cat(column) for column in zip(*seen, strict=True))
    torch.testing.assert_close(losses, F.cross_entropy(module.logits(batch[0]), batch[1], reduction="none").detach())
    for i in range(7):
        loss = F.cross_entropy(module.logits(batch[0][i : i + 1]), batch[1][i : i + 1])
        gradients = torch.autograd.grad(loss, trained(module))
        torch.testing.assert_close(norms[i], torch.cat([g.flatten() for g in gradients]).norm())
    assert not losses.requires_grad


DRAWN: dict[str, tuple[bool, Callable[[Tensor], Any]]] = {
    "a number": (True, lambda x: (torch.rand(()) < 2) & (x.sum() < 1e9)),
    "a write through a view": (True, lambda x: [y := x * 1, y[0, :2].mul_(torch.rand(2)), y.sum() < 1e9][-1]),
    "dropout": (True, lambda x: F.dropout(x).sum() < 1e9),
    "dropout in place": (True, lambda x: F.dropout(x.clone(), 0.5, inplace=True).sum() < 1e9),
    "a list": (True, lambda x: torch.cat([x, torch.randn_like(x)]).sum() < 1e9),
    "an autograd function": (True, lambda x: Doubled.apply(x).sum() < 1e9),
    "an operator": (True, lambda x: torch.ops.aten.rand_like(x).sum() < 1e9),
    "an initializer": (True, lambda x: nn.init.normal_(torch.empty_like(x)).sum() < 1e9),
    "fractional pooling": (True, lambda x: F.fractional_max_pool2d(x[None].expand(1, 4, 5), 2, 2).sum() < 1e9),
    "a mask": (True, lambda x: x[torch.rand_like(x) < 2].sum()),
    "data": (False, lambda x: [F.dropout(x), x.abs().sum() < 1e9][-1]),
    "data after dropout without effect": (False, lambda x: F.dropout(x, 0.0).abs().sum() < 1e9),
    "data in place": (False, lambda x: x.clone().abs_().sum() < 1e9),
}


@pytest.mark.parametrize("what", DRAWN)
def test_a_value_with_random_numbers_never_decides_which_records_run_together(what: str) -> None:
    """Else a record draws again only if values differ: `torch.rand(()) < 0.1` was True for 1 % of 64 records."""
    passes = []

    def decided(module: Any, x: Tensor) -> Tensor:
        value = DRAWN[what][1](x)
        passes.append(value.dtype is torch.bool and bool(value))
        return module.plain(x)

    module = Written(decided)
    BookkeepingMode(module, trained(module), FlatClipper(1.0)).add(run, vectors(6), 6)
    assert len(passes) == (6 if DRAWN[what][0] else 1)
