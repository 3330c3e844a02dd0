"""Modules with uses of parameters for which per-record gradients may be wrong, and a reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, CLASSES, TOKENS, LENGTH = 5, 3, 11, 6


class Shape(nn.Module):
    """A module as the loop calls it. `per_record` losses have shape `(records,)`."""

    per_record = False

    def forward(self, stage: Any, global_step: int, batch: Any, device: torch.device) -> Any:
        return self.train_step(batch)

    def train_step(self, batch: Any) -> Any:
        logits = self.logits(batch[0])
        return F.cross_entropy(logits, batch[1], reduction="none" if self.per_record else "mean")

    def logits(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Plain(Shape):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)

    def logits(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class _Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.scale = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.table) * self.scale


class CustomLayer(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.custom = _Custom()

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(self.custom(x))


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(self.two(torch.tanh(self.one(x))))


class Twice(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, WIDTH)

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(self.again(torch.tanh(self.again(x))))


class Direct(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.offset, self.gain = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(1, WIDTH))

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(self.gain * (x + self.offset))


class _Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, inp: Tensor) -> Tensor:
        return self.inner(input=inp)


class Keyword(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.named = _Named()

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(self.named(inp=x))


class Functional(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(self.shared(x) + F.linear(x.cos(), self.shared.weight))


class Unused(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(2, 2)


class WeightNormalised(Plain):
    def train_step(self, batch: Any) -> Tensor:
        weights = 1.0 + batch[1].float()
        losses = F.cross_entropy(self.logits(batch[0]), batch[1], reduction="none")
        return (weights * losses).sum() / weights.sum()


class Contrastive(Plain):
    def train_step(self, batch: Any) -> Tensor:
        h = F.normalize(self.first(batch[0]), dim=1)
        other = F.normalize(self.first(batch[0].flip(1)), dim=1)
        return F.cross_entropy(h @ other.T, torch.arange(len(h)), reduction="mean")


class Normed(Plain):
    """Batch normalisation that no walk over trainable parameters finds."""

    def __init__(self, affine: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, affine=affine).requires_grad_(False)

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(self.norm(x))


class Sequence(Shape):
    """Over token ids of shape `(records, LENGTH)`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(TOKENS, 8, padding_idx=0), nn.Linear(8, 8)
        self.norm, self.last = nn.LayerNorm(8), nn.Linear(8, CLASSES)

    def hidden(self, ids: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.mix(self.embedding(ids))))

    def logits(self, x: Tensor) -> Tensor:
        return self.last(self.hidden(x).mean(1))


class LanguageModel(Sequence):
    def train_step(self, batch: Any) -> Tensor:
        logits = self.hidden(batch[0])[:, :-1] @ self.embedding.weight.T
        losses = F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten(), reduction="none")
        losses = losses.view(len(batch[0]), -1).mean(1)
        return losses if self.per_record else losses.mean()


class Padded(Sequence):
    def logits(self, x: Tensor) -> Tensor:
        mask = (x != 0).float()
        return self.last((self.hidden(x) * mask[:, :, None]).sum(1) / mask.sum(1).max())


def vectors(records: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn(records, WIDTH, generator=generator)
    return x, torch.randint(0, CLASSES, (records,), generator=generator)


def sentences(records: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, TOKENS, (records, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (records, 1), generator=generator)
    return ids * (torch.arange(LENGTH) < lengths), torch.randint(0, CLASSES, (records,), generator=generator)


SHAPES: dict[str, Callable[[], Shape]] = {
    "plain": Plain,
    "custom layer": CustomLayer,
    "tied modules": Tied,
    "used twice": Twice,
    "direct parameter": Direct,
    "keyword call": Keyword,
    "functional weight": Functional,
    "unused parameter": Unused,
    "loss normalised by weights": WeightNormalised,
    "contrastive": Contrastive,
    "batch norm without affine": lambda: Normed(affine=False),
    "batch norm frozen": lambda: Normed(affine=True),
    "language model head": LanguageModel,
    "padded mean": Padded,
}


def make(name: str, *, per_record: bool = False) -> tuple[Shape, Callable[..., Any]]:
    """The module, the same each time, and the function that makes its batches."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = SHAPES[name]()
    module.per_record = per_record
    return module, sentences if isinstance(module, Sequence) else vectors


def run(model: nn.Module, batch: Any) -> Any:
    return model(stage=None, global_step=1, batch=batch, device=torch.device("cpu"))


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def reference(module: nn.Module, batch: Any, limit: float) -> list[Tensor]:
    """The sum of clipped gradients, written out: one record after the other, joint norm, flat clipping."""
    parameters = trained(module)
    sums = [torch.zeros_like(p) for p in parameters]
    for i in range(len(batch[0])):
        loss = run(module, tuple(part[i : i + 1] for part in batch)).sum()
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
        norm = torch.sqrt(sum((g**2).sum() for g in gradients))  # type: ignore[arg-type]
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient * min(1.0, limit / (float(norm) + 1e-6))
    return sums
