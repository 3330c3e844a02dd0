"""Bookkeeping recognizes layers by the operations on their parameters, and is exact for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.private_shapes import run, trained
from trainstack.backends.dp.clipping import FlatClipper
from trainstack.backends.dp.modes.base import Unsupported
from trainstack.backends.dp.modes.bookkeeping import BookkeepingMode
from trainstack.backends.dp.modes.loop import LoopMode
from trainstack.backends.dp.modes.param_uses import ProductUse
from trainstack.backends.dp.modes.selection import choose_mode


class Regression(nn.Module):
    """The mean over records of a nonlinear function of `net(x)`."""

    def __init__(self, net: nn.Module, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.net, self.dtype = net, dtype

    def forward(self, stage: Any, global_step: int, batch: Any, device: torch.device) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.dtype is torch.bfloat16):
            y = self.net(batch)
        return torch.sin(y.float()).flatten(1).square().sum(1).mean()


class Positions(nn.Module):
    """A table of positions without records, as `x + table(arange(length))` has it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.table = nn.Linear(4, 4), nn.Embedding(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.mix(x)) + self.table(torch.arange(x.shape[1]))


class ClassToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.mix = nn.Parameter(torch.randn(1, 1, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(torch.cat([self.token.expand(len(x), 2, -1), x], 1))


class Flattened(nn.Module):
    """Puts records and positions into one dimension before a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(4, 5), nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.mix(x.flatten(0, 1))).view(*x.shape[:2], 5)


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.transpose(0, 1)).transpose(0, 1)


class Frozen(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4))
        self[0].weight.requires_grad_(False)
        self[2].bias.requires_grad_(False)
        self[3].weight.requires_grad_(False)


def ids(*shape: int) -> Tensor:
    return torch.randint(0, 9, shape)


class Encoder(nn.Module):
    """torch's own transformer layer, with a mask of later positions and one of padding."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=batch_first)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        later = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        padded = x[:, :, 1] > 1.0
        padded[:, 0] = False
        if self.batch_first:
            return self.layer(x, src_mask=later, src_key_padding_mask=padded.float().masked_fill(padded, -torch.inf))
        return self.layer(x.transpose(0, 1), src_mask=later).transpose(0, 1)


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x.flip(1), x, need_weights=False)[0]


class AttentionWeights(nn.Module):
    """Attention with a mask of padding, whose weights are an output as well."""

    def __init__(self, average: bool) -> None:
        super().__init__()
        self.attend, self.average = nn.MultiheadAttention(4, 2, batch_first=True), average

    def forward(self, x: Tensor) -> Tensor:
        padded = x[:, :, 1] > 1.0
        padded[:, 0] = False
        mixed, found = self.attend(x, x, x, key_padding_mask=padded, average_attn_weights=self.average)
        return torch.cat([mixed.flatten(1), found.flatten(1)], 1)


LAYERS: dict[str, tuple[Any, Any]] = {
    "linear": (lambda: nn.Linear(4, 3), lambda n: torch.randn(n, 4)),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), lambda n: torch.randn(n, 4)),
    "linear over few positions": (lambda: nn.Linear(40, 30), lambda n: torch.randn(n, 5, 40)),
    "linear over many positions": (lambda: nn.Linear(4, 3), lambda n: torch.randn(n, 25, 4)),
    "linear over two positions": (lambda: nn.Linear(4, 3), lambda n: torch.randn(n, 2, 4)),
    "linear over two dimensions": (lambda: nn.Linear(4, 3), lambda n: torch.randn(n, 2, 3, 4)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2), lambda n: torch.randn(n, 4, 12)),
    "conv1d same": (lambda: nn.Conv1d(4, 6, 4, padding="same"), lambda n: torch.randn(n, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 0)), lambda n: torch.randn(n, 3, 8, 7)),
    "conv2d in groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), lambda n: torch.randn(n, 4, 6, 6)),
    "conv2d by channel": (lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False), lambda n: torch.randn(n, 4, 6, 6)),
    "conv2d by channel, dilated": (
        lambda: nn.Conv2d(2, 4, 3, groups=2, padding=1, dilation=2),
        lambda n: torch.randn(n, 2, 7, 7),
    ),
    "conv2d valid, dilated": (
        lambda: nn.Conv2d(2, 3, 2, padding="valid", dilation=2),
        lambda n: torch.randn(n, 2, 7, 7),
    ),
    "conv2d with reflected borders": (
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
        lambda n: torch.randn(n, 2, 6, 6),
    ),
    "conv2d with an input that is not contiguous": (
        lambda: nn.Conv2d(2, 3, 3),
        lambda n: torch.randn(n, 7, 6, 2).permute(0, 3, 1, 2),
    ),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, stride=(1, 2, 1), padding=1), lambda n: torch.randn(n, 2, 4, 5, 4)),
    "conv and relu in place": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(32, 3)),
        lambda n: torch.randn(n, 1, 6, 6),
    ),
    "layer norm": (lambda: nn.LayerNorm(4), lambda n: torch.randn(n, 4)),
    "layer norm over positions": (lambda: nn.LayerNorm((3, 4)), lambda n: torch.randn(n, 2, 3, 4)),
    "rms norm": (lambda: nn.RMSNorm(4), lambda n: torch.randn(n, 5, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 6), lambda n: torch.randn(n, 6, 4, 3)),
    "group norm without positions": (lambda: nn.GroupNorm(2, 6), lambda n: torch.randn(n, 6)),
    "embedding": (lambda: nn.Embedding(9, 4), lambda n: ids(n, 12)),
    "embedding of one token": (lambda: nn.Embedding(9, 4), lambda n: ids(n)),
    "embedding with padding": (lambda: nn.Embedding(9, 4, padding_idx=-9), lambda n: ids(n, 12)),
    "embedding with padding within": (lambda: nn.Embedding(9, 4, padding_idx=4), lambda n: ids(n, 12)),
    "embedding of ids that are not contiguous": (lambda: nn.Embedding(9, 4), lambda n: ids(9).expand(n, -1)),
    "self-attention": (lambda: Encoder(batch_first=True), lambda n: torch.randn(n, 6, 4)),
    "self-attention, positions first": (lambda: Encoder(batch_first=False), lambda n: torch.randn(n, 6, 4)),
    "attention to another sequence": (CrossAttention, lambda n: torch.randn(n, 6, 4)),
    "attention and its mean weights": (lambda: AttentionWeights(average=True), lambda n: torch.randn(n, 6, 4)),
    "attention and the weights of each head": (lambda: AttentionWeights(average=False), lambda n: torch.randn(n, 6, 4)),
    "positions that all records share": (Positions, lambda n: torch.randn(n, 6, 4)),
    "positions first": (TimeFirst, lambda n: torch.randn(n, 6, 4)),
    "class token": (ClassToken, lambda n: torch.randn(n, 6, 4)),
    "records and positions in one dimension": (Flattened, lambda n: torch.randn(n, 6, 4)),
    "partly frozen": (Frozen, lambda n: torch.randn(n, 4)),
}


def both(layer: str, records: int, limit: float) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    make, batches = LAYERS[layer]
    module, batch = Regression(make()), batches(records)
    sums = []
    for kind in (BookkeepingMode, LoopMode):
        mode = kind(module, trained(module), FlatClipper(limit))
        mode.add(run, batch, records)
        sums.append(mode.pop_sums())
    return sums[0], sums[1]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("limit", [0.1, 1e6])
@pytest.mark.parametrize("records", [1, 2, 7])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_gives_the_sum_that_the_loop_gives(layer: str, records: int, limit: float) -> None:
    mine, its = both(layer, records, limit)
    size = max(float(total.norm()) for total in its)
    assert size > 0
    for left, right in zip(mine, its, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=2e-6 * max(size, limit if limit < 1 else 0.0))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("layer", LAYERS)
def test_auto_chooses_bookkeeping_for_it(layer: str) -> None:
    make, batches = LAYERS[layer]
    module = Regression(make())
    clipper = FlatClipper(1.0)
    assert choose_mode("auto", module, trained(module), clipper, run, batches(6), 6).name == "bookkeeping"


@pytest.mark.parametrize(
    ("net", "named"),
    [
        (lambda: nn.Bilinear(4, 4, 2), r"train_step raised"),
        (lambda: nn.Embedding(9, 4, max_norm=1.0), r"net\.weight changes in a forward pass"),
        (lambda: nn.Embedding(9, 4, scale_grad_by_freq=True), r"net\.weight: an Embedding with scale_grad_by_freq"),
    ],
)
@pytest.mark.parametrize("records", [4, 5, 6])
def test_an_unknown_operation_is_refused_by_name(net: Any, named: str, records: int) -> None:
    """Also where the number of records is that of the positions, so that shapes alone would not tell."""
    module = Regression(net())
    batch = ids(records, 6) if isinstance(module.net, nn.Embedding) else torch.randn(records, 6, 4)
    clipper = FlatClipper(1.0)
    with pytest.raises(Unsupported, match=named):
        choose_mode("bookkeeping", module, trained(module), clipper, run, batch, records)


def test_an_input_that_is_changed_in_place_is_refused() -> None:
    class InPlace(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(x)
            y = super().forward(x)
            x += 1
            return y + x

    module = Regression(InPlace(4, 4))
    mode = BookkeepingMode(module, trained(module), FlatClipper(1.0))
    with pytest.raises(Unsupported, match=r"input of net\.weight is changed in place"):
        mode.add(run, torch.randn(3, 4), 3)


@pytest.mark.parametrize("apart", [1e-4, 1.5, 3.0])
def test_records_with_cancelling_gradients_are_clipped_to_the_limit(apart: float) -> None:
    """The positions' gradients cancel, so that the products of which the norm is the sum are far larger than it."""
    torch.manual_seed(0)
    limit = 1.0

    class Cancelling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(64, 64, bias=False)

        def forward(self, stage: Any, global_step: int, batch: Tensor, device: torch.device) -> Tensor:
            y = self.mix(batch)
            signs = torch.tensor([1.0, -1.0])[None, :, None]
            return (3e3 * y * signs).sum((1, 2)).mean()

    module = Cancelling()
    x = 1e2 * torch.randn(8, 1, 64) + apart * torch.randn(8, 2, 64)
    mode = BookkeepingMode(module, trained(module), FlatClipper(limit))
    for record in x.split(1):
        mode.add(run, record, 1)
        assert float(mode.pop_sums()[0].norm()) <= limit * (1 + 5e-6)


@pytest.mark.parametrize("positions", [1, 3])
def test_inputs_too_small_for_float32_to_square_have_a_norm(positions: int) -> None:
    use = ProductUse(0, None)
    use.keep(torch.full((1, positions, 40), 2e-23))
    use.receive(torch.full((1, positions, 30), 1e18), 1)
    assert float(use.squares()[0]) >= (positions * 2e-5 * 1200**0.5) ** 2


def test_norms_are_float32_under_autocast() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(30, 40), nn.LayerNorm(40), nn.Tanh(), nn.Linear(40, 30))
    module = Regression(net, dtype=torch.bfloat16)
    for shape in ((1, 30), (1, 6, 30)):
        for _ in range(20):
            mode = BookkeepingMode(module, trained(module), FlatClipper(0.25))
            mode.add(run, 3 * torch.randn(shape), 1)
            sums = mode.pop_sums()
            norm = float(torch.sqrt(sum(total.square().sum() for total in sums)))  # type: ignore[arg-type]
            assert {total.dtype for total in sums} == {torch.float32}
            assert 0.25 * (1 - 1e-3) <= norm <= 0.25 * (1 + 1e-3)


def test_a_loss_for_each_record_is_taken_as_it_is() -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 3)

    class PerRecord(nn.Module):
        def __init__(self, reduction: str) -> None:
            super().__init__()
            self.net, self.reduction = net, reduction

        def forward(self, stage: Any, global_step: int, batch: Tensor, device: torch.device) -> dict[str, Tensor]:
            logits = self.net(batch)
            loss = F.cross_entropy(logits, torch.zeros(len(batch), dtype=torch.int64), reduction=self.reduction)
            return {"loss": loss, "logits": logits}

    batch, found = torch.randn(5, 4), []
    for reduction in ("mean", "none"):
        module = PerRecord(reduction)
        mode = BookkeepingMode(module, trained(module), FlatClipper(0.5))
        outputs = mode.add(run, batch, 5)
        assert outputs["loss"].dim() == 0
        assert outputs["loss"].requires_grad
        assert not outputs["logits"].requires_grad
        found.append([outputs["loss"].detach(), *mode.pop_sums()])
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("returns_batch", [True, False])
def test_max_pooling_has_the_gradients_of_single_records(returns_batch: bool) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 2)

        def forward(self, batch: Tensor) -> Tensor:
            x = self.first(batch).relu()
            x = F.max_pool2d(x, 2, 1) if returns_batch else torch.max_pool2d(x[0], 2, stride=1, padding=1)[None]
            return self.second(x).view(len(batch), -1).square().mean(1)

    module, batch = Pooled(), torch.randn(6, 2, 9, 8)
    found: dict[Any, list[Tensor]] = {}
    for kind in (BookkeepingMode, LoopMode):
        mode = kind(module, tuple(module.parameters()), FlatClipper(0.1))
        mode.add(lambda model, part: model(part), batch, 6)
        found[kind] = mode.pop_sums()
    for one, other in zip(*found.values(), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-7)
