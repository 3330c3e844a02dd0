"""What is audited: the user's privacy settings, in the public numbers of a run of their own."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainstack.backends.dp.arguments import DifferentialPrivacyArguments
from trainstack.backends.grammar import parse_spec
from trainstack.errors import ConfigurationError


def check_private(backend: str) -> None:
    """Refuse a backend string without a private layer."""
    if not any(record.layer.private for record in parse_spec(backend)):
        raise ConfigurationError(f"backend {backend!r} is not private: there is nothing to audit. Write 'sp-dp'.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A private run that is audited.

    Attributes:
        args: the privacy settings.
        backend: the backend string.
        train_batch_size, dataset_size, epochs: of the run.
        gpu_batch_size_limit: records in one forward pass.
        device: on which it runs.
    """

    args: DifferentialPrivacyArguments
    backend: str = "sp-dp"
    train_batch_size: int = 500
    dataset_size: int = 2000
    epochs: int = 2
    gpu_batch_size_limit: int = 512
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_private(self.backend)
        if self.dataset_size < 100 or not 1 <= self.train_batch_size <= self.dataset_size or self.epochs < 1:
            raise ConfigurationError(
                f"an audit with dataset_size={self.dataset_size}, train_batch_size={self.train_batch_size}, "
                f"epochs={self.epochs}: write at least 100 records, a batch of 1 up to as many, and at least 1 epoch."
            )

    @property
    def rate(self) -> float:
        """q, the probability with which a record is to be in a step."""
        return self.train_batch_size / self.dataset_size

    @property
    def steps(self) -> int:
        """T, the global steps of the run."""
        return self.epochs * -(-self.dataset_size // self.train_batch_size)

    @property
    def text(self) -> str:
        """Backend, privacy settings and numbers, in one line."""
        args = self.args
        noise = (
            f"noise multiplier {args.noise_multiplier:g}"
            if args.noise_multiplier is not None
            else f"target epsilon {args.target_epsilon:g}"
        )
        return (
            f"{self.backend}: {noise}, {args.clipping} clipping, batches of {self.train_batch_size} out of "
            f"{self.dataset_size}, {self.steps} steps"
        )

    @property
    def everybody(self) -> Tensor:
        """All records as canaries: bool of shape `(dataset_size,)`."""
        return torch.ones(self.dataset_size, dtype=torch.bool)

    @property
    def norms(self) -> tuple[float, ...]:
        """The clipping norm, or that of each layer."""
        norms = self.args.per_sample_max_grad_norm
        return (float(norms),) if isinstance(norms, int | float) else tuple(float(norm) for norm in norms)

    @property
    def pinned(self) -> DifferentialPrivacyArguments:
        """The settings without what belongs to the user's own data, and with a clipping norm that stays."""
        return replace(
            self.args,
            dataset_size=None,
            sample_rate=None,
            max_epsilon=None,
            clip_learning_rate=1e-12 if self.args.clipping == "adaptive" else self.args.clip_learning_rate,
        )

    def without_noise(self) -> Subject:
        """The same run, but for noise and budget."""
        return replace(self, args=replace(self.args, noise_multiplier=0.0, target_epsilon=None, max_epsilon=None))

    def gradient_noise(self, noise_multiplier: float) -> float:
        """The standard deviation of the gradient's noise over the clipping norm; counts cost adaptive clipping some."""
        if self.args.clipping != "adaptive":
            return noise_multiplier
        count = self.args.count_noise_multiplier or max(self.train_batch_size / 20, noise_multiplier)
        return 1 / math.sqrt(noise_multiplier**-2 - (2 * count) ** -2)
