"""The workloads: W1 to W5 of the table, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from tools.bench.task import Feed, Task

SEED = 1234


def _rows(shape: tuple[int, ...], classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(shape, generator=generator), torch.randint(classes, shape[:1], generator=generator)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def _tiny(feed: Feed, title: str, name: str, spread: float = 2.0, steps: int = 2000) -> Task:
    """`spread` is the standard deviation of the inputs: norm 1 clips every gradient with 2, and none with 1."""
    inputs, targets = _rows((32 * steps, 64), 10)
    return Task(
        name=name,
        title=f"tiny MLP 64-64-10, batch 32, SGD, {title}",
        kind="train",
        make_model=_mlp,
        make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        inputs=spread * inputs,
        targets=targets,
        micro_batch=32,
        feed=feed,
    )


def mlp() -> Task:
    """W1 with a loader that collates samples."""
    return _tiny("tensors", "DataLoader over a TensorDataset", "W1")


def mlp_ready() -> Task:
    """W1 with ready-made batches in a loader."""
    return _tiny("loader", "DataLoader over ready-made batches", "W1-ready")


def mlp_list() -> Task:
    """W1 without a loader."""
    return _tiny("list", "list of ready-made batches", "W1-list")


def mlp_calm() -> Task:
    """W1 with gradients below the clipping norm, so that clipping can skip the scaling."""
    return _tiny("loader", "DataLoader over ready-made batches, no gradient above norm 1", "W1-calm", spread=1.0)


def cnn() -> Task:
    """W2: a step takes a few milliseconds."""
    inputs, targets = _rows((64 * 100, 1, 28, 28), 10)
    return Task(
        name="W2",
        title="small CNN 1x28x28, batch 64, Adam",
        kind="train",
        make_model=lambda: nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 49, 10),
        ),
        make_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        inputs=inputs,
        targets=targets,
        micro_batch=64,
    )


def cnn_tuned() -> Task:
    """W2 with a fused optimizer and channels last for contenders that support them."""
    return replace(
        cnn(),
        name="W2-tuned",
        title="small CNN as in W2, fused Adam and channels last where asked for",
        kind="tuned",
        tuned_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3, fused=True),
    )


class _TinyTransformer(nn.Module):
    """Predicts a class from a sequence of 64 tokens out of 256."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, 128), nn.Parameter(torch.zeros(64, 128))
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """`(batch, 64)` int64 to `(batch, 10)`."""
        return self.head(self.encoder(self.tokens(tokens) + self.places).mean(1))  # type: ignore[no-any-return]


def transformer() -> Task:
    """W3: a step takes tens of milliseconds."""
    noise, targets = _rows((16 * 20, 64), 10)
    return Task(
        name="W3",
        title="transformer 2x128, sequence 64, batch 16, AdamW",
        kind="train",
        make_model=_TinyTransformer,
        make_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        inputs=(noise * 40 + 128).long().clamp(0, 255),
        targets=targets,
        micro_batch=16,
    )


def accumulation() -> Task:
    """W4: W1 with four micro-batches per update."""
    return replace(_tiny("tensors", "4 micro-batches an update", "W4", spread=4.0), accumulation=4)


def accumulation_ready() -> Task:
    """W4 with ready-made batches in a loader."""
    task = _tiny("loader", "4 micro-batches an update, ready-made batches", "W4-ready", spread=4.0)
    return replace(task, accumulation=4)


def evaluation() -> Task:
    """W5: outputs of shape `(32, 10)` collected over 2,000 batches."""
    task = _tiny("tensors", "evaluation with collected outputs", "W5")
    return replace(task, kind="evaluate", title=task.title.replace(", SGD", ""))


def evaluation_ready() -> Task:
    """W5 with ready-made batches in a loader."""
    task = _tiny("loader", "evaluation with collected outputs, ready-made batches", "W5-ready")
    return replace(task, kind="evaluate", title=task.title.replace(", SGD", ""))


WORKLOADS: dict[str, Callable[[], Task]] = {
    "W1": mlp,
    "W1-ready": mlp_ready,
    "W1-list": mlp_list,
    "W1-calm": mlp_calm,
    "W2": cnn,
    "W2-tuned": cnn_tuned,
    "W3": transformer,
    "W4": accumulation,
    "W4-ready": accumulation_ready,
    "W5": evaluation,
    "W5-ready": evaluation_ready,
}
