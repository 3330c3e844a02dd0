"""Canary records whose gradients are orthogonal unit vectors, so that each one is visible in every update.

The model is a table with one row a canary; a canary's gradient is its own row, long before clipping and of length C
after it. What left the private step thus shows, in row i, whether canary i was in it, and the noise.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainstack.backends.dp.arguments import DifferentialPrivacyArguments
from trainstack.backends.dp.telemetry import coordinates_of
from trainstack.backends.privacy_statement import PrivacyStatement
from trainstack.backends.spec import parse_spec
from trainstack.errors import ConfigurationError


def check_private(backend: str) -> None:
    """Refuse a backend string without a private layer."""
    if not any(record.layer.private for record in parse_spec(backend)):
        raise ConfigurationError(f"backend {backend!r} is not private: there is nothing to audit. Write 'sp-dp'.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedRun:
    """A private run that is audited.

    Attributes:
        args: the privacy settings.
        backend: the backend string.
        train_batch_size, dataset_size, epochs: of the run.
        gpu_batch_size_limit: records in one forward pass; None for all of a step.
        device: on which it runs.
    """

    args: DifferentialPrivacyArguments
    backend: str = "sp-dp"
    train_batch_size: int = 500
    dataset_size: int = 2000
    epochs: int = 2
    gpu_batch_size_limit: int | None = None
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
        args, sigma = self.args, self.args.noise_multiplier
        noise = f"noise multiplier {sigma:g}" if sigma is not None else f"target epsilon {args.target_epsilon:g}"
        return (
            f"{self.backend}: {noise}, {args.clipping} clipping, batches of {self.train_batch_size} out of "
            f"{self.dataset_size}, {self.steps} steps"
        )

    @property
    def all_included(self) -> Tensor:
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
            telemetry={name: values for name, values in self.args.telemetry.items() if name in ("loss", "grad_norm")},
            clip_learning_rate=1e-12 if self.args.clipping == "adaptive" else self.args.clip_learning_rate,
        )

    def without_noise(self) -> AuditedRun:
        """The same run, but for noise and budget."""
        return replace(self, args=replace(self.args, noise_multiplier=0.0, target_epsilon=None, max_epsilon=None))

    def gradient_noise(self, noise_multiplier: float) -> float:
        """The standard deviation of the gradient's noise over the clipping norm; telemetry and counts cost some."""
        squares = len(coordinates_of(self.pinned)) * self.args.telemetry_weight**2
        if self.args.clipping == "adaptive":
            count = self.args.count_noise_multiplier or max(self.train_batch_size / 20, noise_multiplier)
            squares += 1 / ((2 * count / noise_multiplier) ** 2 - 1)
        return noise_multiplier * math.sqrt(1 + squares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What left a private run.

    Attributes:
        updates: float64 of shape `(steps, canaries)`: the noisy sums over each step's records, in units of the
            clipping norm. A canary adds 1 to its column; the noise's standard deviation is sigma.
        included: bool of shape `(canaries,)`: those that were trained on, on all processes.
        statement: what the run says of itself.
    """

    updates: Tensor
    included: Tensor
    statement: PrivacyStatement

    @property
    def noise_multiplier(self) -> float:
        """sigma, as the run states it."""
        return self.statement.history[0][0]


class CanaryModel(nn.Module):
    """A table a layer, trained on the records `rows`; the rest of a `ModuleInterface`."""

    def __init__(self, subject: AuditedRun) -> None:
        super().__init__()
        norms = subject.norms
        self.tables = nn.ModuleList(nn.Embedding(subject.dataset_size + 1, 1) for _ in norms)
        self.rows = torch.empty(0)
        self.recorder = Recorder(self.parameters(), norms, subject.train_batch_size)
        self._length = 1e4 * max(norms)  # so much longer than allowed is a gradient before it is clipped
        self._losses_of_records = subject.args.grad_mode == "ghost"

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> tuple[Any, Any]:
        return [self.recorder], []

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        records = TensorDataset(self.rows)
        return DataLoader(records, sampler=sampler(records), batch_size=batch_size)

    def train_step(self, global_step: int, batch: Any, device: Any) -> Tensor:
        losses = self._length * torch.stack([table(batch[0])[:, 0] for table in self.tables]).sum(0)
        return losses if self._losses_of_records else losses.mean()


class Recorder(torch.optim.Optimizer):
    """Keeps what it is given: all that those can see who are shown the model after every step."""

    def __init__(self, parameters: Any, norms: tuple[float, ...], batch: int) -> None:
        super().__init__(parameters, {})
        self.sums: list[Tensor] = []
        self._factors = [batch * norm / sum(n**2 for n in norms) for norm in norms]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        tables = self.param_groups[0]["params"]
        rows = [factor * table.grad[:-1, 0].cpu().double() for factor, table in zip(self._factors, tables, strict=True)]
        self.sums.append(torch.stack(rows).sum(0))


def train_canaries(subject: AuditedRun, included: Tensor) -> Observation:
    """Train privately on canaries, by the real `Trainer` and layer; a run of its own, under a folder of its own.

    Args:
        subject: the run.
        included: bool of shape `(dataset_size,)`. In place of a canary that is not included stands a record whose
            gradient is a row that nobody looks at.
    """
    from trainstack.trainer import ModuleInterface, Trainer, TrainerArguments

    class Module(CanaryModel, ModuleInterface):
        pass

    module = Module(subject)
    names = ("epochs", "train_batch_size", "gpu_batch_size_limit", "backend", "device")
    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            **{name: getattr(subject, name) for name in names},
            "differential_privacy_args": subject.pinned,
            "output_dir": folder,
            "writers": (),
            "progress": "none",
            "log_level": "ERROR",
            "handle_signals": False,
            "checkpointer_args": {"checkpoint": False},
        }
        trainer = Trainer(module, TrainerArguments.from_dict(arguments))
        included = trainer.world.comm.broadcast_object(included, "choosing canaries")
        module.rows = torch.where(included, torch.arange(len(included)), len(included))
        trainer.train()
        statement = trainer.privacy_statement()
        trainer.close()
    return Observation(updates=torch.stack(module.recorder.sums), included=included, statement=statement)
