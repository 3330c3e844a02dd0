"""The rows of the table: published results and their hyper-parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import nn

from tools.dp_table.scattering import CHANNELS

OPACUS = "https://github.com/pytorch/opacus/blob/main/examples/mnist_README.md"
HANDCRAFTED = "https://github.com/ftramer/Handcrafted-DP"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published result.

    Attributes:
        name: the argument of the tool.
        title: the title in the table.
        source: the address of the published result and hyper-parameters.
        published_accuracy: on MNIST's test set, in percent.
        published_epsilon: at delta 1e-5.
        architecture: `"opacus"`, `"cnn"` or `"linear"`.
        batch: the expected number of records of a step.
        steps_per_epoch: as published, of 60,000 records.
        epochs: as published.
        learning_rate: of SGD.
        momentum: of SGD.
        noise_multiplier: sigma of the steps.
        max_grad_norm: C.
        normalization_noise: noise multiplier of each of the two released statistics of the features; None for rows
            without them.
    """

    name: str
    title: str
    source: str
    published_accuracy: str
    published_epsilon: float
    architecture: str
    batch: int
    steps_per_epoch: int
    epochs: int
    learning_rate: float
    momentum: float
    noise_multiplier: float
    max_grad_norm: float
    normalization_noise: float | None = None

    @property
    def steps(self) -> int:
        """The number of steps of a whole run."""
        return self.steps_per_epoch * self.epochs


_handcrafted = partial(Row, source=HANDCRAFTED, published_epsilon=3.0, epochs=40, momentum=0.9, max_grad_norm=0.1)

ROWS = {
    row.name: row
    for row in (
        _handcrafted(
            name="scatternet-linear",
            title="ScatterNet features + linear (Tramèr and Boneh 2021)",
            published_accuracy="98.7",
            architecture="linear",
            batch=4096,
            steps_per_epoch=14,
            learning_rate=8.0,
            noise_multiplier=3.04,
            normalization_noise=8.0,
        ),
        _handcrafted(
            name="cnn",
            title="CNN from pixels (Tramèr and Boneh 2021)",
            published_accuracy="98.1",
            architecture="cnn",
            batch=512,
            steps_per_epoch=117,
            learning_rate=0.5,
            noise_multiplier=1.23,
        ),
        Row(
            name="opacus",
            title="Opacus' MNIST example",
            source=OPACUS,
            published_accuracy="96.78 ± 0.21 (10 runs)",
            published_epsilon=2.91,
            architecture="opacus",
            batch=240,
            steps_per_epoch=250,
            epochs=60,
            learning_rate=0.15,
            momentum=0.0,
            noise_multiplier=1.1,
            max_grad_norm=1.0,
        ),
    )
}


def build(architecture: str) -> nn.Module:
    """The model of a row, without the features and their normalization."""
    if architecture == "linear":
        return nn.Sequential(nn.Flatten(), nn.Linear(CHANNELS * 7 * 7, 10))
    activation = {"opacus": nn.ReLU, "cnn": nn.Tanh}[architecture]
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3 if architecture == "opacus" else 2),
        activation(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        activation(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        activation(),
        nn.Linear(32, 10),
    )
